import random
import tracemalloc
from typing import Any

import pytest

from novainfer.fsm.client.stream import STALL_TOKENS_HIGH, STALL_TOKENS_LOW, Stream, StreamState
from novainfer.fsm.core.machine import After, Drop, Send
from novainfer.fsm.messages.events import (
    Begun,
    Cancel,
    Cause,
    End,
    Finished,
    Incident,
    Output,
    Pause,
    Read,
    Resume,
    StallOver,
    Stop,
)
from novainfer.fsm.messages.outputs import Delta, FinishReason, Mark, TokenLogprob

WELL = End(finish_reason=FinishReason.STOP)


MIB = 1 << 20


def stream(num_choices: int = 1, **marks: Any) -> Stream:
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


def test_merged_deltas_keep_the_places_of_marked_tokens():
    s = stream()
    for at in range(3):
        s.handle(output(65, marks=[Mark(9, at, at + 1, at + 1)] if at != 1 else []))
    assert read(s).marks == [Mark(9, 0, 1, 1), Mark(9, 2, 3, 3)]
    s.handle(output(65))
    assert read(s).marks == []


def test_a_prompt_was_cached_as_far_as_its_first_choice_found_it():
    """What the second one finds there is what the first has computed."""
    s = Stream(1, "r", 2)
    s.handle(output(65, first=Begun(8, 4, [], 42)))
    s.handle(output(65, choice=1, first=Begun(8, 7, [], 43)))
    found = [read(s), read(s)]
    s.handle(output(66, end=WELL))
    s.handle(output(66, choice=1, end=WELL))
    found += [read(s), read(s)]
    assert [delta.num_cached_tokens for delta in found if isinstance(delta, Delta)] == [4, 4, 4, 4]


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
    assert s.handle(output(3)) == [Send("engine", Pause(7)), After(300.0, StallOver(7))]
    assert s.state is StreamState.STALLED
    assert Send("engine", Resume(7)) in s.handle(Read())  # two of the three
    assert s.state is StreamState.OPEN


def test_a_stalled_stream_asks_again_for_each_choice_that_goes_on_because_its_pause_may_have_been_ignored():
    s = stream(2, stall_high=0)
    s.handle(output(1))
    assert s.handle(output(2)) == [Send("engine", Pause(7, 0))]
    assert s.handle(output(2, choice=1)) == [Send("engine", Pause(7, 1))]


def test_a_stalled_stream_stays_so_until_enough_was_read():
    s = stream(2, stall_high=1, stall_low=0)
    s.handle(output(1))
    s.handle(output(2, choice=1))
    assert [e.to for e in s.handle(Read()) if isinstance(e, Send)] == ["reader"]
    assert s.state is StreamState.STALLED
    assert [e.to for e in s.handle(Read()) if isinstance(e, Send)] == ["reader", "engine"]


def test_a_reader_that_takes_nothing_for_too_long_finds_what_there_was_and_one_error():
    s = stream(stall_high=1, stall_low=0, stall_timeout_s=20.0)
    s.handle(output(65))
    assert s.handle(output(66))[1] == After(20.0, StallOver(7))
    cancel, incident = s.handle(StallOver(7))
    assert cancel == Send("gate", Cancel(7, Cause.STALLED), urgent=True)
    assert isinstance(incident, Send)
    assert isinstance(incident.event, Incident)
    assert (incident.to, incident.event.kind, incident.event.stream_ids) == ("incidents", "stall", [7])
    assert s.state is StreamState.CLOSED
    assert s.handle(output(67)) == []
    assert s.handle(output(end=End(cause=Cause.STALLED))) == []
    assert read(s).text == "AB"
    assert read(s) == End(error="the reader of this stream took nothing for 20 seconds", code="stalled")


def test_a_reader_that_came_back_in_time_has_lost_nothing_and_has_all_its_time_again():
    s = stream(stall_high=1, stall_low=0)
    for token in (65, 66):
        s.handle(output(token))
    assert s.handle(Read())[-1] == Drop(StallOver(7))
    s.handle(output(67))
    assert s.handle(output(68))[-1] == After(300.0, StallOver(7))
    assert s.handle(StallOver(7))


def test_reading_some_of_it_is_reading():
    s = stream(2, stall_high=1, stall_low=0)
    s.handle(output(65))
    s.handle(output(66, choice=1))
    effects = s.handle(Read())
    assert After(300.0, StallOver(7)) in effects  # the one before is gone by that
    assert Drop(StallOver(7)) not in effects
    assert s.state is StreamState.STALLED


def logprob(chance: random.Random, num_top: int) -> TokenLogprob:
    """As the scheduler makes them: the bytes are the vocabulary's, all else is new."""
    top = [(chance.randrange(1 << 17), b"", -chance.random()) for _ in range(num_top)]
    return TokenLogprob(chance.randrange(1 << 17), b"", -chance.random(), top)


@pytest.mark.parametrize(("num_top", "num_choices"), [(None, 1), (0, 1), (20, 1), (20, 8)])
def test_a_stalled_stream_holds_little_also_with_all_log_probabilities(num_top, num_choices):
    chance = random.Random(1)
    s = stream(num_choices)
    tracemalloc.start()
    try:
        steps_after = 2  # a step was on the device, and one was planned, when the pause came
        num_tokens = 0
        while steps_after >= 0:
            for choice in range(num_choices):
                logprobs = None if num_top is None else [logprob(chance, num_top)]
                s.handle(output(chance.randrange(0x7F), choice=choice, logprobs=logprobs))
            num_tokens += num_choices
            steps_after -= s.state is StreamState.STALLED
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 80 <= num_tokens <= STALL_TOKENS_HIGH + 3
    assert held < MIB / 2
    while read(s) is not None:
        pass
    assert s.state is StreamState.OPEN


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
