"""JSONL in, JSONL out: records to requests, answers to records, in input order, and resumable.

A record that cannot be used gets an error record in its place; the others go on. The output holds one line per record,
in order, so what is there already need not be done again: a line cut off by a crash is dropped and done anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from novainfer import EngineOverloaded, InvalidParameter, NovaInferError, SamplingParams, UnsupportedParameter
from novainfer.server.decode import decode
from novainfer.server.engine import ServedEngine
from novainfer.server.errors import ErrorDetail, detail_of
from novainfer.server.protocol import ChatCompletionRequest, CompletionRequest
from novainfer.server.replies import Choice, CompletionLogprobs, Tally, Usage, completion_logprobs

ADMISSION_TRIES_MAX = 100  # against an engine that is full: the window below keeps that from happening by itself


class BatchChoice(msgspec.Struct, kw_only=True):
    """One answer to a record."""

    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class BatchResult(msgspec.Struct, kw_only=True):
    """A line of the output: `index` is the record's place in the input, from 0; either `choices` or `error` is set.

    `ignored_fields` names what the record held and nothing came of.
    """

    index: int
    id: Any = None
    choices: list[BatchChoice] | msgspec.UnsetType = msgspec.UNSET
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    error: ErrorDetail | msgspec.UnsetType = msgspec.UNSET
    ignored_fields: list[str] | msgspec.UnsetType = msgspec.UNSET


class _Request(msgspec.Struct):
    """A record, decoded and checked."""

    prompt: Any
    params: SamplingParams
    return_token_ids: bool
    ignored: list[str]


class _Line(msgspec.Struct):
    """What must be known of a record before anything else: which kind it is."""

    id: Any = None
    prompt: Any = msgspec.UNSET
    messages: Any = msgspec.UNSET
    prompt_token_ids: Any = msgspec.UNSET


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling fields for records that do not set them."""

    max_tokens: int
    temperature: float
    top_p: float


class Batch:
    """Runs records through an engine, at most `window` at a time."""

    def __init__(self, engine: ServedEngine, defaults: Defaults, window: int) -> None:
        self._engine = engine
        self._defaults = defaults
        self._window = window

    async def run(
        self, lines: Iterator[bytes], first_index: int, output: BinaryIO, on_done: Callable[[BatchResult], None]
    ) -> None:
        """Answer `lines`, the first of which is record `first_index`; each result is written as soon as it may be."""
        pending: dict[int, asyncio.Task[BatchResult]] = {}
        written = index = first_index
        try:
            for line in lines:
                pending[index] = asyncio.create_task(self._answer(index, line))
                index += 1
                if len(pending) >= self._window:
                    await asyncio.wait([pending[written]])
                    written = self._write(pending, written, output, on_done)
            while pending:
                await asyncio.wait([pending[written]])
                written = self._write(pending, written, output, on_done)
        finally:
            for task in pending.values():
                task.cancel()
            await asyncio.gather(*pending.values(), return_exceptions=True)

    def _write(
        self,
        pending: dict[int, asyncio.Task[BatchResult]],
        written: int,
        output: BinaryIO,
        on_done: Callable[[BatchResult], None],
    ) -> int:
        while written in pending and pending[written].done():
            result = pending.pop(written).result()
            output.write(msgspec.json.encode(result) + b"\n")
            on_done(result)
            written += 1
        output.flush()
        return written

    async def _answer(self, index: int, line: bytes) -> BatchResult:
        record_id = None
        try:
            record_id = _record_id(line)
            request = self._request(line)
            for attempt in range(ADMISSION_TRIES_MAX):
                try:
                    return await self._generate(index, record_id, request)
                except EngineOverloaded as error:
                    if attempt == ADMISSION_TRIES_MAX - 1:
                        raise
                    await asyncio.sleep(error.retry_after_s)
            raise AssertionError("unreachable")
        except NovaInferError as error:
            return BatchResult(index=index, id=record_id, error=detail_of(error))

    async def _generate(self, index: int, record_id: Any, request: _Request) -> BatchResult:
        params = request.params
        choices = [Choice() for _ in range(params.n)]
        tally = Tally(1, params.n)
        async for delta in self._engine.generate(request.prompt, params, request_id=f"batch-{index}"):
            tally.add(delta)
            choices[delta.index].add(delta)
        return BatchResult(
            index=index,
            id=record_id,
            choices=[
                BatchChoice(
                    index=i,
                    text=choice.text,
                    finish_reason=str(choice.ending()["finish_reason"]),
                    logprobs=completion_logprobs(choice.logprobs) if params.logprobs is not None else msgspec.UNSET,
                    token_ids=choice.token_ids if request.return_token_ids else msgspec.UNSET,
                )
                for i, choice in enumerate(choices)
            ],
            usage=tally.usage(),
            ignored_fields=request.ignored or msgspec.UNSET,
        )

    def _request(self, line: bytes) -> _Request:
        """A record, checked; raises `CallerError` with the field."""
        found = _kind(line)
        body: ChatCompletionRequest | CompletionRequest
        prompt: Any
        if found == "messages":
            chat, ignored = decode(ChatCompletionRequest, line)
            body, prompt = chat, chat.prompt()
            if chat.max_completion_tokens is not None:
                chat.max_tokens, chat.max_completion_tokens = chat.max_completion_tokens, None
        else:
            completion, ignored = decode(CompletionRequest, _as_completion(line, found))
            prompts = completion.prompts()
            if len(prompts) != 1:
                raise InvalidParameter("prompt must be one prompt: write a line for each", param="prompt")
            if completion.echo:
                raise UnsupportedParameter("echo is not supported in batches: leave it out", param="echo")
            body, prompt = completion, prompts[0]
        if body.stream:
            raise InvalidParameter("stream must be left out: a batch has no streams", param="stream")
        if body.max_tokens is None:
            body.max_tokens = self._defaults.max_tokens
        if body.temperature is None:
            body.temperature = self._defaults.temperature
        if body.top_p is None:
            body.top_p = self._defaults.top_p
        ignored = [name for name in ignored if name != "id"]
        return _Request(prompt, body.sampling_params(), bool(body.return_token_ids), ignored)


def _kind(line: bytes) -> str:
    """Which of the three kinds of prompt a record has; it must have exactly one."""
    try:
        fields = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        decode(CompletionRequest, line)  # raises with the right sentence
        raise
    kinds = ("prompt", "messages", "prompt_token_ids")
    given = [name for name in kinds if getattr(fields, name) is not msgspec.UNSET]
    if len(given) != 1:
        what = f"not {' and '.join(given)}" if given else "but has none of them"
        raise InvalidParameter(f"a record needs one of prompt, messages and prompt_token_ids, {what}", param="prompt")
    return given[0]


def _record_id(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line, type=_Line).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _as_completion(line: bytes, kind: str) -> bytes:
    """A record with `prompt_token_ids` as the completion request that it means."""
    if kind == "prompt":
        return line
    fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    fields["prompt"] = fields.pop("prompt_token_ids")
    return msgspec.json.encode(fields)


def num_done(output: Path) -> int:
    """How many records `output` holds already; a last line that was cut off is removed from the file.

    Raises `InvalidParameter` when the file was not written by an earlier run.
    """
    if not output.exists():
        return 0
    count = end = 0
    with output.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                result = msgspec.json.decode(line, type=BatchResult)
            except (msgspec.DecodeError, UnicodeDecodeError):
                result = None
            if result is None or result.index != count:
                raise InvalidParameter(
                    f"output {output} holds something else in line {count + 1}: choose another file", param="output"
                )
            count += 1
            end += len(line)
    os.truncate(output, end)
    return count
