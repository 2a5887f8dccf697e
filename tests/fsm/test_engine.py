import pytest

from novainfer.fsm.core.machine import Send
from novainfer.fsm.engine import Engine, EngineState
from novainfer.fsm.messages.events import (
    Arrive,
    Batch,
    Cancel,
    CancelAll,
    CancelRequest,
    Cause,
    Departed,
    Encode,
    Encoded,
    EncodeFailed,
    End,
    Fault,
    Launch,
    MakeBatch,
    Output,
    Outputs,
    Pause,
    PauseRequest,
    Resume,
    Settled,
    StepFailed,
    Stop,
    Submit,
    WorkerFailed,
    WorkerReady,
)
from novainfer.fsm.messages.outputs import FinishReason
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone, StepPlan

READY = WorkerReady(0, 8, 64, 100, [0])
PLAN = StepPlan(
    step_id=1,
    epoch=0,
    slots=[0],
    query_lens=[1],
    context_lens=[1],
    input_ids=[1],
    table_slots=[],
    table_indexes=[],
    table_blocks=[],
    sample_seqs=[0],
    admissions=[],
)


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.handle(READY)
    return engine


def arrive(stream_id: int, prompt="hello", **params) -> Arrive:
    return Arrive(stream_id=stream_id, prompt=prompt, params=SamplingParams(**params), seed=1, num_tokens=1)


def sent(effects, to: str) -> list:
    return [e.event for e in effects if isinstance(e, Send) and e.to == to]


def ended(output_of: Send | object) -> End:
    (output,) = output_of.outputs
    return output.end


def test_a_prompt_of_text_goes_to_the_tokenizer_and_one_of_ids_straight_to_the_scheduler(engine):
    assert sent(engine.handle(arrive(0)), "tokenizer") == [Encode(0, "hello")]
    assert engine.state is EngineState.IDLE
    submit, wake = sent(engine.handle(arrive(1, [1, 2])), "scheduler")
    assert isinstance(submit, Submit)
    assert wake == MakeBatch()
    assert engine.state is EngineState.SCHEDULING


def test_each_choice_of_a_stream_is_a_request_of_its_own(engine):
    submits = [e for e in sent(engine.handle(arrive(0, [1], n=3)), "scheduler") if isinstance(e, Submit)]
    assert [(s.request_id, s.choice) for s in submits] == [(0, 0), (1, 1), (2, 2)]


def test_a_step_is_launched_before_the_outputs_of_the_last_one_are_handed_on(engine):
    engine.handle(arrive(0, [1]))
    effects = engine.handle(Batch(PLAN, [Output(0, 0, 0, [5], "x")], [0], 1))
    assert [(e.to, type(e.event)) for e in effects] == [("worker", Launch), ("streams", Outputs), ("gate", Departed)]
    assert engine.state is EngineState.WAITING_WORKER


def test_work_that_came_while_the_scheduler_planned_wakes_it_again(engine):
    engine.handle(arrive(0, [1]))
    engine.handle(arrive(1, [1]))
    assert sent(engine.handle(Batch(None, [], [], 1)), "scheduler") == [MakeBatch()]
    assert engine.state is EngineState.SCHEDULING
    assert engine.handle(Batch(None, [], [], 2)) == []
    assert engine.state is EngineState.IDLE


@pytest.mark.parametrize("late", [StepDone(0, 0, []), StepDone(1, 1, []), StepFailed(0, 0, Fault.OOM, "")])
def test_a_completion_of_another_step_or_epoch_is_dropped(engine, late):
    engine.handle(arrive(0, [1]))
    engine.handle(Batch(PLAN, [], [], 1))
    assert engine.handle(late) == []
    assert engine.state is EngineState.WAITING_WORKER


def test_every_completion_is_followed_by_a_plan_so_that_nothing_stays_uncommitted(engine):
    engine.handle(arrive(0, [1]))
    for outcome, state in (
        (StepDone(1, 0, [7]), EngineState.SCHEDULING),
        (StepFailed(1, 0, Fault.OOM, "no memory"), EngineState.ROLLBACK),
    ):
        engine.handle(Batch(PLAN, [], [], 1))
        assert sent(engine.handle(outcome), "scheduler") == [MakeBatch(outcome)]
        assert engine.state is state


def test_a_cancel_goes_to_every_choice_on_the_control_lane(engine):
    engine.handle(arrive(0, [1], n=2))
    effects = engine.handle(Cancel(0, Cause.CLIENT))
    assert effects == [Send("scheduler", CancelRequest(i, Cause.CLIENT), urgent=True) for i in (0, 1)]


def test_a_cancel_that_overtakes_its_arrive_meets_it(engine):
    assert engine.handle(Cancel(1, Cause.DISCONNECT, arrived=2)) == []
    engine.handle(arrive(0))
    effects = engine.handle(arrive(1, [1]))
    assert ended(sent(effects, "streams")[0]).cause is Cause.DISCONNECT
    assert sent(effects, "gate") == [Departed([1])]
    assert sent(effects, "scheduler") == []
    assert not engine._tombstones


def test_streams_may_arrive_in_another_order_than_they_were_asked_for(engine):
    engine.handle(arrive(3))  # it had room at once, and 2 had to wait
    engine.handle(Cancel(2, Cause.CLIENT, arrived=2))
    assert ended(sent(engine.handle(arrive(2)), "streams")[0]).cause is Cause.CLIENT


def test_a_cancel_that_comes_after_the_end_leaves_nothing_behind(engine):
    engine.handle(arrive(0))
    engine.handle(Cancel(0, Cause.CLIENT, arrived=1))
    assert engine.handle(Cancel(0, Cause.CLIENT, arrived=1)) == []
    assert not engine._tombstones
    engine.handle(Cancel(0, Cause.TIMEOUT, arrived=2))  # 1 is on its way, and might have been the one
    assert engine._tombstones
    assert sent(engine.handle(arrive(1)), "tokenizer") == [Encode(1, "hello")]
    assert not engine._tombstones


def test_cancel_all_meets_those_that_were_on_their_way_and_nobody_else(engine):
    engine.handle(CancelAll(Cause.DRAIN, arrived=2))
    causes = [[ended(o).cause for o in sent(engine.handle(arrive(i)), "streams")] for i in range(3)]
    assert causes == [[Cause.DRAIN], [Cause.DRAIN], []]


def test_the_gate_is_told_how_long_a_prompt_really_is(engine):
    engine.handle(arrive(0))
    assert sent(engine.handle(Encoded(0, [1, 2, 3])), "gate") == [Settled(0, 3)]


def test_credits_of_tokens_that_a_prompt_loses_are_given_back(engine):
    engine.handle(arrive(0, truncate_prompt_tokens=2))
    effects = engine.handle(Encoded(0, [1, 2, 3]))
    assert sent(effects, "gate") == [Settled(0, 2)]
    assert sent(effects, "scheduler")[0].token_ids == [2, 3]


def test_bad_words_take_any_prompt_to_the_tokenizer_and_are_banned(engine):
    params = {"bad_words": ["no", "never"], "banned_token_ids": [9], "banned_sequences": [[7, 8]]}
    assert sent(engine.handle(arrive(0, [1, 2], **params)), "tokenizer") == [Encode(0, [1, 2], ["no", "never"])]
    effects = engine.handle(Encoded(0, [1, 2], [[5], [4, 5], [3]]))
    (submit, _) = sent(effects, "scheduler")
    assert submit.token_ids == [1, 2]
    assert submit.params.banned_token_ids == [3, 5, 9]
    assert submit.params.banned_sequences == [[7, 8], [4, 5]]


def test_a_stream_cancelled_at_the_tokenizer_ends_at_once_and_its_tokens_are_dropped(engine):
    engine.handle(arrive(0))
    assert ended(sent(engine.handle(Cancel(0, Cause.CLIENT)), "streams")[0]).cause is Cause.CLIENT
    assert engine.handle(Encoded(0, [1, 2])) == []
    assert engine.handle(EncodeFailed(0, "too late")) == []
    assert engine.num_streams == 0


def test_a_prompt_that_cannot_be_tokenised_ends_its_stream_with_the_field(engine):
    engine.handle(arrive(0))
    effects = engine.handle(EncodeFailed(0, "no such role", "messages[0].role"))
    end = ended(sent(effects, "streams")[0])
    assert (end.error, end.code, end.param) == ("no such role", "invalid_value", "messages[0].role")


def test_cancel_all_ends_streams_at_the_tokenizer_and_at_the_scheduler(engine):
    engine.handle(arrive(0))
    engine.handle(arrive(1, [1]))
    effects = engine.handle(CancelAll(Cause.DRAIN))
    assert ended(sent(effects, "streams")[0]).cause is Cause.DRAIN
    assert sent(effects, "scheduler") == [CancelRequest(0, Cause.DRAIN)]


def test_a_choice_that_fails_takes_its_siblings_along_and_the_stream_departs(engine):
    engine.handle(arrive(0, [1], n=3))
    failed = Output(0, 0, 0, [], "", end=End(error="broken"))
    effects = engine.handle(Outputs([failed]))
    assert sent(effects, "scheduler") == [CancelRequest(i, Cause.SIBLING) for i in (1, 2)]
    assert sent(effects, "gate") == [Departed([0])]


def test_a_stream_departs_when_its_last_choice_has_ended(engine):
    engine.handle(arrive(0, [1], n=2))
    well = End(finish_reason=FinishReason.STOP)
    assert sent(engine.handle(Outputs([Output(0, 0, 0, [], "", end=well)])), "gate") == []
    assert sent(engine.handle(Outputs([Output(1, 0, 1, [], "", end=well)])), "gate") == [Departed([0])]
    assert engine.num_streams == 0


def test_pause_and_resume_go_to_every_choice_or_the_one_that_is_named_and_resume_wakes_an_idle_engine(engine):
    engine.handle(arrive(0, [1], n=2))
    engine.handle(Batch(None, [], [], 2))
    assert sent(engine.handle(Pause(0)), "scheduler") == [PauseRequest(0), PauseRequest(1)]
    assert sent(engine.handle(Pause(0, 1)), "scheduler") == [PauseRequest(1)]
    assert engine.state is EngineState.IDLE
    assert sent(engine.handle(Resume(0)), "scheduler")[-1] == MakeBatch()


def test_a_worker_that_will_not_come_up_stops_everything_with_its_message():
    engine = Engine()
    effects = engine.handle(WorkerFailed("no such file"))
    assert [(e.to, e.event) for e in effects] == [
        ("client", WorkerFailed("no such file")),
        ("gate", Stop("no such file")),
        ("streams", Stop("no such file")),
        ("worker", Stop("no such file")),
    ]
    assert engine.state is EngineState.STOPPED


def test_a_stopped_engine_tells_whoever_arrives_too_late(engine):
    engine.handle(Stop())
    assert ended(sent(engine.handle(arrive(0, [1])), "streams")[0]).cause is Cause.DRAIN
    assert engine.handle(READY) == []
    assert engine.handle(Batch(PLAN, [], [], 0)) == []
