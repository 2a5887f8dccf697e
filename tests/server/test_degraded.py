"""A choice that was computed in a degraded mode says so, streamed or not; any other says nothing of it."""

import msgspec
import pytest

from novainfer import Delta
from novainfer.fsm.messages.outputs import FinishReason
from novainfer.server.openai.chunks import ChatChunks, ChunkOptions, CompletionChunks
from novainfer.server.openai.replies import AssistantMessage, ChatChoice, Choice, CompletionChoice, Tally


def last_delta(is_degraded: bool) -> Delta:
    return Delta(request_id="r", text="a", token_ids=[1], finish_reason=FinishReason.STOP, is_degraded=is_degraded)


@pytest.mark.parametrize("is_degraded", [False, True])
def test_a_whole_answer_says_that_it_is_degraded_only_when_it_is(is_degraded: bool) -> None:
    choice = Choice()
    choice.add(last_delta(is_degraded))
    chat = ChatChoice(index=0, message=AssistantMessage(choice.text), **choice.ending())
    plain = CompletionChoice(index=0, text=choice.text, **choice.ending())
    for reply in (chat, plain):
        assert msgspec.json.decode(msgspec.json.encode(reply)).get("degraded", False) is is_degraded


@pytest.mark.parametrize("is_degraded", [False, True])
def test_a_stream_says_that_it_is_degraded_only_when_it_is(is_degraded: bool) -> None:
    options = ChunkOptions()
    chat = ChatChunks("r", 0, "m", Tally(1, 1), options, n=1)
    plain = CompletionChunks("r", 0, "m", Tally(1, 1), options, echoes=[""], n=1)
    for chunks in (chat, plain):
        assert (b'"degraded":true' in chunks.delta(last_delta(is_degraded))) is is_degraded
