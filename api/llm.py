"""The engine for scripts: blocking, in batches, with a progress bar.

llm = LLM("path/to/model", dtype="float32")
for output in llm.generate(["Once upon a time", "The capital of France is"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from novainfer.actors.location import DEMO_MODEL
from novainfer.config import EngineConfig
from novainfer.engine import Engine
from novainfer.fsm.errors import EngineClosed, InvalidParameter
from novainfer.fsm.events import Chat
from novainfer.fsm.outputs import FinishReason, TokenLogprob
from novainfer.fsm.params import SamplingParams
from novainfer.progress import Bar, LoadingBar
from novainfer.prompt import PromptLike

T = TypeVar("T")


# Streams open at once, in batches of max_num_seqs: the next ones are tokenised while the last ones decode.
OPEN_BATCHES = 2
UNLIMITED = 2**62  # a script's own queue needs no admission


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice: its text, its token ids, and how it ended."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """The answer to one prompt; `prompt` is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    seed: int | None = None
    finished: bool = True


class LLM:
    """A model in this process. Takes `EngineConfig`'s fields as keywords; close it, or use it in a `with`."""

    def __init__(self, model: str | Path = DEMO_MODEL, **config: Any) -> None:
        limits = {"max_num_queued_reqs": UNLIMITED, "max_num_queued_tokens": UNLIMITED}
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
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt, in order; `prompts` is a string, `{"prompt_token_ids": [...]}`, or a list of either.

        `params` is one for all, or one for each. The first prompt that cannot be answered raises, and ends the rest.
        """
        listed: list[Any]
        if isinstance(prompts, str | bytes | dict | Chat) or not isinstance(prompts, Iterable):
            listed = [prompts]  # one prompt, or nothing that could be one: the engine says which
        else:
            listed = list(prompts)
            if listed and all(isinstance(item, int) for item in listed):  # one prompt of token ids
                listed = [listed]
        return self._run(_generate_all(self._engine, listed, _spread(params, len(listed)), use_tqdm))

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the model's chat template."""
        many = messages if messages and isinstance(messages[0], list) else [messages]
        chats = [Chat(messages=list(conversation)) for conversation in many]  # type: ignore[arg-type]
        return self._run(_generate_all(self._engine, list(chats), _spread(params, len(chats)), use_tqdm))

    def close(self) -> None:
        """Free the model; any number of times."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------

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


async def _generate_all(
    engine: Engine, prompts: list[Any], params: list[SamplingParams | None], use_tqdm: bool
) -> list[RequestOutput]:
    open_streams = asyncio.Semaphore(OPEN_BATCHES * engine.config.max_num_seqs)
    tokens = 0
    with Bar(total=len(prompts), desc="prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:

        async def one(at: int) -> RequestOutput:
            nonlocal tokens
            async with open_streams:
                output = await _generate_one(engine, prompts[at], params[at])
            tokens += sum(len(choice.token_ids) for choice in output.outputs)
            bar.set_postfix_str(f"{tokens} tokens")
            bar.update()
            return output

        tasks = [asyncio.ensure_future(one(at)) for at in range(len(prompts))]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


async def _generate_one(engine: Engine, prompt: Any, params: SamplingParams | None) -> RequestOutput:
    num_choices = params.n if params is not None else 1
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
    choices = [CompletionOutput(index=index, token_ids=[]) for index in range(num_choices)]
    output = RequestOutput(request_id="", prompt=text, prompt_token_ids=[], outputs=choices)
    stream = engine.generate(prompt, params)
    try:
        async for delta in stream:
            choice = choices[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            if delta.logprobs is not None:
                choice.logprobs = [*(choice.logprobs or ()), *delta.logprobs]
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
            output.request_id, output.seed = delta.request_id, delta.seed
            output.num_cached_tokens = delta.num_cached_tokens
            output.prompt_token_ids = delta.prompt_token_ids or output.prompt_token_ids
    finally:
        await stream.aclose()
    return output


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidParameter(f"params must be one, or one for each of {count} prompts, not {len(params)}")
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
