from typing import Any

import pytest

from novainfer.fsm.events import Begun, Cause, End, Finished, Output, Pause, Read, Resume, Stop
from novainfer.fsm.machine import Send
from novainfer.fsm.outputs import Delta, FinishReason, TokenLogprob
from novainfer.fsm.stream import STALL_TOKENS_HIGH, STALL_TOKENS_LOW, Stream, StreamState

WELL = End(finish_reason=FinishReason.STOP)


def stream(num_choices: int = 1, **marks: int) -> Stream:
    return Stream(7, "req-7", num_choices, **marks)


def output(*tokens: int, choice: int = 0, **fields: Any) -> Output:
    return Output(choice, 7, choice, list(tokens), "".join(map(chr, tokens)), **fields)


def read(stream: Stream) -> Any:
    """What the reader is given, or None."""
    found = [e.event for e in stream.handle(Read()) if isinstance(e, Send) and e.to == "reader"]
    return found[0] if found else None


def test_outputs_that_were_not_read_merge_into_one_delta():
    s = stream()
    s.handle(output(65, first=Begun(3, 2, [1, 2, 3], 42)))
    s.handle(output(66))
    s.handle(output(67, end=WELL))
    delta = read(s)
    assert isinstance(delta, Delta)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("ABC", [65, 66, 67], FinishReason.STOP)
    assert (delta.num_prompt_tokens, delta.num_cached_tokens, delta.num_generated_tokens, delta.seed) == (3, 2, 3, 42)
    assert delta.prompt_token_ids == [1, 2, 3]


def test_merged_deltas_keep_every_log_probability():
    s = stream()
    logprobs = [TokenLogprob(i, b"", -1.0, []) for i in (65, 66)]
    for token, logprob in zip((65, 66), logprobs, strict=True):
        s.handle(output(token, logprobs=[logprob]))
    assert read(s).logprobs == logprobs


def test_counts_go_on_from_delta_to_delta():
    s = stream()
    counts = []
    for token in (65, 66, 67):
        s.handle(output(token))
        counts.append(read(s).num_generated_tokens)
    assert counts == [1, 2, 3]


def test_choices_are_read_one_after_the_other():
    s = stream(2)
    s.handle(output(66, choice=1))
    s.handle(output(65, choice=0))
    assert [read(s).index, read(s).index] == [1, 0]
    assert read(s) is None


def test_a_stream_stalls_above_its_high_mark_and_opens_at_its_low_mark():
    s = stream(2, stall_high=2, stall_low=1)
    assert s.handle(output(1)) == []
    assert s.handle(output(2, choice=1)) == []
    assert s.handle(output(3)) == [Send("engine", Pause(7))]
    assert s.state is StreamState.STALLED
    assert Send("engine", Resume(7)) in s.handle(Read())  # two of the three
    assert s.state is StreamState.OPEN


def test_a_stalled_stream_asks_again_at_each_output_because_a_pause_may_have_been_ignored():
    s = stream(stall_high=0)
    for token in (1, 2):
        assert s.handle(output(token)) == [Send("engine", Pause(7))]


def test_a_stalled_stream_stays_so_until_enough_was_read():
    s = stream(2, stall_high=1, stall_low=0)
    s.handle(output(1))
    s.handle(output(2, choice=1))
    assert [e.to for e in s.handle(Read())] == ["reader"]
    assert s.state is StreamState.STALLED
    assert [e.to for e in s.handle(Read())] == ["reader", "engine"]


def test_the_marks_are_far_apart_by_default():
    assert STALL_TOKENS_HIGH > 2 * STALL_TOKENS_LOW > 0


def test_a_stream_ends_well_when_all_its_choices_have_and_everything_was_read():
    s = stream(2)
    s.handle(output(65, end=WELL))
    assert s.state is StreamState.OPEN
    s.handle(output(66, choice=1, end=WELL))
    assert s.state is StreamState.CLOSED
    assert [type(read(s)) for _ in range(3)] == [Delta, Delta, Finished]


def test_what_came_before_a_bad_end_can_still_be_read_and_nothing_comes_after_it():
    s = stream(2)
    s.handle(output(65))
    s.handle(output(choice=1, end=End(error="broken")))
    assert s.handle(output(66, choice=0, end=End(cause=Cause.SIBLING))) == []
    assert read(s).text == "A"
    assert read(s) == End(error="broken")


@pytest.mark.parametrize(("error", "code"), [(None, "draining"), ("the worker is lost", "engine_dead")])
def test_a_stop_ends_an_open_stream_and_leaves_an_ended_one(error, code):
    s, ended = stream(), stream()
    ended.handle(output(65, end=WELL))
    for each in (s, ended):
        each.handle(Stop(error))
    assert read(s).code == code
    assert [type(read(ended)) for _ in range(2)] == [Delta, Finished]
