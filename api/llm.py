"""The engine for scripts: blocking, in batches, with a progress bar.

llm = LLM("path/to/model", dtype="float32")
for output in llm.generate(["Once upon a time", "The capital of France is"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from novainfer.actors.device.location import DEMO_MODEL
from novainfer.arguments import must_be
from novainfer.assembly import callers_tokenizer
from novainfer.config import AT_MOST, EngineConfig
from novainfer.embedding import EmbeddingOutput, PoolingParams
from novainfer.engine import Engine
from novainfer.fsm.messages.errors import EngineClosed, InvalidParameter, NovaInferError
from novainfer.fsm.messages.events import Chat
from novainfer.fsm.messages.params import SamplingParams
from novainfer.model import ModelInfo
from novainfer.offer import Offered, called_in, offered, tools_of_template
from novainfer.output import RequestOutput, answer_to
from novainfer.progress import Bar, LoadingBar
from novainfer.prompt import PromptLike

T = TypeVar("T")
Answer = TypeVar("Answer", RequestOutput, EmbeddingOutput)

logger = logging.getLogger(__name__)

# Streams open at once, in batches of max_num_seqs: the next ones are tokenised while the last ones decode.
OPEN_BATCHES = 2


class LLM:
    """A model in this process. Takes `EngineConfig`'s fields as keywords; close it, or use it in a `with`."""

    def __init__(self, model: str | Path = DEMO_MODEL, **config: Any) -> None:
        # A script's own queue needs no admission.
        limits = {name: AT_MOST[name] for name in ("max_num_queued_reqs", "max_num_queued_tokens")}
        try:
            settings = EngineConfig(model=model, **{**limits, **config})
        except TypeError as error:
            raise InvalidParameter(str(error).replace("Unexpected keyword argument", "LLM has no setting")) from error
        self._engine = Engine(settings, on_progress=LoadingBar())
        self._loop = _new_loop()
        self._thread = threading.Thread(target=_live, args=(self._loop,), name="novainfer-llm", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _shut, self._loop, self._thread, self._engine)
        try:
            self._run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: PromptLike | Sequence[str | list[int] | dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt, in order; `prompts` is a string, `{"prompt_token_ids": [...]}`, or a list of either.

        `sampling_params` is one for all, or one for each. A prompt of a list that cannot be answered has an `error` in
        its place, and a line in the log; the others are answered. A single prompt raises it.
        """
        listed, is_one = _listed(prompts)
        return self._answer(listed, sampling_params, use_tqdm, is_one)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the model's chat template.

        `tools`, `tool_choice` and `parallel_tool_calls` are OpenAI's, for all of them; `chat_template_kwargs` are the
        template's own, such as `enable_thinking`. Errors are as in `generate`: of a list each has its own, a single
        conversation raises; tools that cannot be offered raise in any case.
        """
        must_be("messages", messages, list, "a list of messages, or a list of such lists")
        is_one = not messages or not isinstance(messages[0], list)
        many: list[Any] = [messages] if is_one else messages
        offer = offered(tools, tool_choice, parallel_tool_calls, self._engine.model_info.formats)
        described, kwargs = tools_of_template(offer.tools or []), chat_template_kwargs or {}
        chats = [
            Chat(
                messages=called_in(conversation) if isinstance(conversation, list) else conversation,
                tools=described,
                template_kwargs=kwargs,
            )
            for conversation in many
        ]
        return self._answer(chats, sampling_params, use_tqdm, is_one, offer)

    def embed(
        self,
        prompts: PromptLike | Sequence[str | list[int] | dict[str, Any]],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """The vector of each prompt, in order; `prompts` and errors are as in `generate`."""
        listed, is_one = _listed(prompts)
        if pooling_params is not None:
            must_be("pooling_params", pooling_params, PoolingParams, "PoolingParams")
        params = pooling_params or PoolingParams()

        async def one(at: int) -> tuple[EmbeddingOutput, int]:
            try:
                output = await self._engine.embed(listed[at], params)
            except NovaInferError as error:
                return EmbeddingOutput(error=error), 0
            return output, len(output.prompt_token_ids)

        outputs = self._run(_each(self._engine, len(listed), one, use_tqdm))
        return _with_errors_told(outputs, is_one)

    @property
    def model_info(self) -> ModelInfo:
        """The served model, as in `Engine`."""
        return self._engine.model_info

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it; raises `ModelLoadError` when the model has none."""
        if not self._finalizer.alive:
            raise EngineClosed("this LLM is closed")
        return callers_tokenizer(self._engine.config)

    def close(self) -> None:
        """Free the model; any number of times."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _answer(
        self, prompts: list[Any], sampling_params: Any, use_tqdm: bool, is_one: bool, offer: Offered | None = None
    ) -> list[RequestOutput]:
        params = sampling_params
        if params is None:
            params = SamplingParams(**self._engine.model_info.sampling_defaults)
        params = _spread(params, len(prompts))

        async def one(at: int) -> tuple[RequestOutput, int]:
            output = await answer_to(self._engine, prompts[at], params[at], offer)
            return output, sum(len(choice.token_ids) for choice in output.outputs)

        outputs = self._run(_each(self._engine, len(prompts), one, use_tqdm))
        return _with_errors_told(outputs, is_one)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` on the loop's thread; Ctrl-C here cancels it there."""
        if not self._finalizer.alive:
            work.close()
            raise EngineClosed("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _listed(prompts: Any) -> tuple[list[Any], bool]:
    """All prompts, and whether it is a single one that was not in a list."""
    if isinstance(prompts, str | bytes | dict | Chat) or not isinstance(prompts, Iterable):
        return [prompts], True  # or nothing that could be a prompt: the engine says so
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):  # one prompt of token ids
        return [listed], True
    return listed, False


def _with_errors_told(outputs: list[Answer], is_one: bool) -> list[Answer]:
    """`outputs`, after a line in the log where some have errors; raises the error of a single prompt."""
    errors = [output.error for output in outputs if output.error is not None]
    if is_one and errors:
        raise errors[0]
    if errors:
        logger.warning("%d of %d prompts got an error, the first: %s", len(errors), len(outputs), errors[0])
    return outputs


async def _each(
    engine: Engine, num_prompts: int, do: Callable[[int], Awaitable[tuple[T, int]]], use_tqdm: bool
) -> list[T]:
    """What `do` gives for each prompt, and its tokens, which the bar counts; some prompts at a time."""
    open_streams = asyncio.Semaphore(OPEN_BATCHES * engine.config.max_num_seqs)
    tokens = 0
    with Bar(total=num_prompts, desc="prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:

        async def one(at: int) -> T:
            nonlocal tokens
            async with open_streams:
                output, num_tokens = await do(at)
            tokens += num_tokens
            bar.set_postfix_str(f"{tokens} tokens")
            bar.update()
            return output

        tasks = [asyncio.ensure_future(one(at)) for at in range(num_prompts)]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


def _spread(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    must_be("sampling_params", params, Sequence, "SamplingParams, or one for each prompt")
    for at, one in enumerate(params):
        must_be(f"sampling_params[{at}]", one, SamplingParams, "SamplingParams")
    if len(params) != count:
        message = f"sampling_params must be one, or one for each of {count} prompts, not {len(params)}"
        raise InvalidParameter(message, param="sampling_params")
    return list(params)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _live(loop: asyncio.AbstractEventLoop) -> None:
    """The LLM's thread: its loop's life."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _shut(loop: asyncio.AbstractEventLoop, thread: threading.Thread, engine: Engine) -> None:
    """Close the engine, its loop and its thread; the LLM itself may be gone already."""
    asyncio.run_coroutine_threadsafe(_end(engine), loop)
    if thread is not threading.current_thread():  # the garbage collector runs in any thread, also in this one
        thread.join()


async def _end(engine: Engine) -> None:
    """Close the engine, let those who wait for it in other threads hear of it, and end the loop."""
    await engine.aclose()
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()
