"""The lines of a batch: what a record asks for, and how its answer is written. There are two formats.

    ours      {"prompt": …}, {"messages": …} or {"prompt_token_ids": …}, with fields of OpenAI's API, and an "id"
    OpenAI's  {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}

An answer has the format of its record. Each carries the record's digest, by which the next run knows it again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from novainfer import InvalidParameter, NovaInferError, UnsupportedParameter
from novainfer.fsm.parsing.formats import Formats
from novainfer.reading import Asked, asked_for
from novainfer.server.http.errors import ErrorDetail, detail_of
from novainfer.server.openai.decode import decode, explain
from novainfer.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from novainfer.server.openai.reading import message_of
from novainfer.server.openai.replies import (
    AssistantMessage,
    ChatCompletion,
    Choice,
    Completion,
    CompletionLogprobs,
    Offsets,
    ToolCallReply,
    Usage,
    completion_logprobs,
)

DIGEST_BYTES = 16
LINE_ID = "batch_req_"  # before the digest, in the `id` of a line of OpenAI's format

Body = ChatCompletionRequest | CompletionRequest


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling fields for records that do not set them; None leaves a field to the model's own default."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None


class Record(msgspec.Struct, frozen=True):
    """A line of the input: its place among the records, from 0, its digest, and its bytes."""

    index: int
    digest: str
    line: bytes


class Result(msgspec.Struct, frozen=True):
    """What came of a record: the line to write, without its end."""

    record: Record
    line: bytes
    is_error: bool


class Request(msgspec.Struct):
    """A record, decoded and checked, and what the engine is asked for it; `custom_id` is of OpenAI's format."""

    prompt: Any
    asked: Asked
    body: Body
    ignored: list[str]
    custom_id: str | None


class Answered(msgspec.Struct):
    """What the engine gave, and the name of its model."""

    choices: list[Choice]
    usage: Usage
    model: str


# ---- lines of the output ---------------------------------------------------------------------------------------------


class BatchChoice(msgspec.Struct, kw_only=True):
    """One answer to a record; that to a chat is read for thoughts and calls, which `text` does not hold then."""

    index: int
    text: str
    finish_reason: str
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallReply] | msgspec.UnsetType = msgspec.UNSET
    logprobs: CompletionLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class BatchResult(msgspec.Struct, kw_only=True):
    """A line of our format: `index` is the record's place in the input, from 0; either `choices` or `error` is set.

    `ignored_fields` names what the record held and nothing came of.
    """

    index: int
    digest: str
    id: Any = None
    choices: list[BatchChoice] | msgspec.UnsetType = msgspec.UNSET
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    error: ErrorDetail | msgspec.UnsetType = msgspec.UNSET
    ignored_fields: list[str] | msgspec.UnsetType = msgspec.UNSET


class BatchResponse(msgspec.Struct, kw_only=True):
    """What a server would have answered."""

    status_code: int
    request_id: str
    body: Any


class BatchLine(msgspec.Struct, kw_only=True):
    """A line of OpenAI's format. A request that failed has its status and its error in `response`, as a server's."""

    id: str
    custom_id: str | None
    response: BatchResponse
    error: None = None
    ignored_fields: list[str] | msgspec.UnsetType = msgspec.UNSET


class Known(msgspec.Struct, frozen=True):
    """What a line of an earlier run says of itself."""

    digest: str
    is_error: bool


class _AnyLine(msgspec.Struct):
    """What tells the lines of both formats apart from anything else."""

    id: Any = None
    digest: str | None = None
    choices: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    response: BatchResponse | None = None


def digest_of(line: bytes, settings: bytes) -> str:
    """By which a record is known again, together with whatever else decides its answer."""
    return blake2b(line.strip() + b"\n" + settings, digest_size=DIGEST_BYTES).hexdigest()


def known(line: bytes) -> Known | None:
    """What a line of the output says of itself; None when no run has written it."""
    try:
        found = msgspec.json.decode(line, type=_AnyLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if found.response is not None:
        digest = str(found.id).removeprefix(LINE_ID)
        return Known(digest, found.response.status_code != 200) if digest != found.id else None
    if found.digest is None or (found.choices is msgspec.UNSET) == (found.error is msgspec.UNSET):
        return None
    return Known(found.digest, found.error is not msgspec.UNSET)


def result_line(record: Record, request: Request, answered: Answered) -> bytes:
    """The line of an answer, in its record's format."""
    if request.custom_id is not None:
        reply = _reply(record, request, answered)
        response = BatchResponse(status_code=200, request_id=reply.id, body=reply)
        return _encode_line(record, request.custom_id, response, request.ignored)
    result = BatchResult(
        index=record.index,
        digest=record.digest,
        id=_look(record.line).id,
        choices=[_choice(i, choice, request) for i, choice in enumerate(answered.choices)],
        usage=answered.usage,
        ignored_fields=request.ignored or msgspec.UNSET,
    )
    return msgspec.json.encode(result)


def _choice(index: int, choice: Choice, request: Request) -> BatchChoice:
    body, has_logprobs = request.body, request.asked.params.logprobs is not None
    found = BatchChoice(
        index=index,
        text=choice.text,
        finish_reason=str(choice.ending()["finish_reason"]),
        logprobs=completion_logprobs(choice.logprobs, Offsets()) if has_logprobs else msgspec.UNSET,
        token_ids=choice.token_ids if body.return_token_ids else msgspec.UNSET,
    )
    if isinstance(body, ChatCompletionRequest):
        message = _message(choice, body)
        found.text, found.tool_calls = message.content or "", message.tool_calls
        found.reasoning_content = message.reasoning_content
    return found


def _message(choice: Choice, body: ChatCompletionRequest) -> AssistantMessage:
    return message_of(choice.pieces, has_reasoning=body.include_reasoning is not False)


def error_line(record: Record, error: NovaInferError) -> bytes:
    """The line of a record that failed."""
    look = _look(record.line)
    if look.is_openai:
        custom_id = look.custom_id if isinstance(look.custom_id, str) else None
        body = {"error": detail_of(error)}
        response = BatchResponse(status_code=error.status, request_id=f"batch-{record.index}", body=body)
        return _encode_line(record, custom_id, response)
    result = BatchResult(index=record.index, digest=record.digest, id=look.id, error=detail_of(error))
    return msgspec.json.encode(result)


def moved(line: bytes, index: int) -> bytes:
    """A line of the output, with the place that its record has now."""
    fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    if "index" not in fields:  # OpenAI's format knows no places
        return line
    return msgspec.json.encode(fields | {"index": msgspec.Raw(str(index).encode())})


def _encode_line(
    record: Record, custom_id: str | None, response: BatchResponse, ignored: list[str] | None = None
) -> bytes:
    line = BatchLine(
        id=LINE_ID + record.digest, custom_id=custom_id, response=response, ignored_fields=ignored or msgspec.UNSET
    )
    return msgspec.json.encode(line)


def _reply(record: Record, request: Request, answered: Answered) -> ChatCompletion | Completion:
    """What a server would have answered."""
    body = request.body
    created = int(time.time())
    if isinstance(body, ChatCompletionRequest):
        return ChatCompletion(
            id=f"chatcmpl-batch-{record.index}",
            created=created,
            model=answered.model,
            choices=[choice.of_chat(i, body, _message(choice, body)) for i, choice in enumerate(answered.choices)],
            usage=answered.usage,
            prompt_token_ids=answered.choices[0].prompt_token_ids if body.return_token_ids else msgspec.UNSET,
        )
    return Completion(
        id=f"cmpl-batch-{record.index}",
        created=created,
        model=answered.model,
        choices=[choice.of_completion(i, body) for i, choice in enumerate(answered.choices)],
        usage=answered.usage,
    )


# ---- lines of the input ----------------------------------------------------------------------------------------------


class _Look(msgspec.Struct):
    """What must be known of a record before anything else: which kind it is."""

    id: Any = None
    prompt: Any = msgspec.UNSET
    messages: Any = msgspec.UNSET
    prompt_token_ids: Any = msgspec.UNSET
    custom_id: Any = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_openai(self) -> bool:
        return self.body is not msgspec.UNSET or self.custom_id is not msgspec.UNSET


class _OpenAILine(msgspec.Struct):
    custom_id: str
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


def _look(line: bytes) -> _Look:
    try:
        return msgspec.json.decode(line, type=_Look)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Look()


def parse(record: Record, defaults: Defaults, sampling: Mapping[str, Any], formats: Formats) -> Request:
    """A record, checked; `sampling` and `formats` are the model's own. Raises `CallerError` with the field."""
    look = _look(record.line)
    custom_id: str | None = None
    if look.is_openai:
        try:
            envelope = msgspec.json.decode(record.line, type=_OpenAILine)
        except msgspec.ValidationError as error:
            raise explain(error, _OpenAILine) from None
        custom_id, line = envelope.custom_id, bytes(envelope.body)
        kind = "messages" if envelope.url.endswith("chat/completions") else "prompt"
    else:
        kind, line = _kind(look, record.line), record.line
    body: Body
    prompt: Any
    if kind == "messages":
        chat, ignored = decode(ChatCompletionRequest, line)
        body, prompt = chat, chat.prompt(has_tools=formats.has_tools)
        if chat.max_completion_tokens is not None:
            chat.max_tokens, chat.max_completion_tokens = chat.max_completion_tokens, None
    else:
        completion, ignored = decode(CompletionRequest, _as_completion(line, kind))
        prompts = completion.prompts()
        if len(prompts) != 1:
            raise InvalidParameter("prompt must be one prompt: write a line for each", param="prompt")
        if completion.echo:
            raise UnsupportedParameter("echo is not supported in batches: leave it out", param="echo")
        body, prompt = completion, prompts[0]
    if body.stream:
        raise InvalidParameter("stream must be left out: a batch has no streams", param="stream")
    for name in defaults.__struct_fields__:
        if getattr(body, name) is None:
            setattr(body, name, getattr(defaults, name))
    params = body.sampling_params(sampling)
    asked = asked_for(params, body, formats) if isinstance(body, ChatCompletionRequest) else Asked(params)
    return Request(prompt, asked, body, [name for name in ignored if name != "id"], custom_id)


def _kind(look: _Look, line: bytes) -> str:
    """Which of the three kinds of prompt a record of ours has; it must have exactly one."""
    given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(look, name) is not msgspec.UNSET]
    if not given:
        try:
            msgspec.json.decode(line, type=_Look)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decode(CompletionRequest, line)  # raises with the right sentence
            raise
    if len(given) != 1:
        what = f"not {' and '.join(given)}" if given else "but has none of them"
        raise InvalidParameter(f"a record needs one of prompt, messages and prompt_token_ids, {what}", param="prompt")
    return given[0]


def _as_completion(line: bytes, kind: str) -> bytes:
    """A record with `prompt_token_ids` as the completion request that it means."""
    if kind == "prompt":
        return line
    fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    fields["prompt"] = fields.pop("prompt_token_ids")
    return msgspec.json.encode(fields)
