"""Whatever validation lets through can be sent to a device's process, recorded, and drawn from.

What cannot be sent all the same ends its own request.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.actors.device.fake import EOS, ByteTokenizer
from novainfer.actors.device.process import ProcessLink
from novainfer.actors.device.wire import TO_DEVICE, FrameReader, FrameWriter, UnsendableError
from novainfer.actors.inspection.recorder import RESUME_S, Recorder
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import Arrive, Run, Submit
from novainfer.fsm.messages.params import INTEGER_MAX, STOP_CHARS_MAX, TOKEN_IDS_MAX, SamplingParams
from novainfer.fsm.messages.pooling import KINDS, Pooling
from novainfer.fsm.messages.step import SeqParams, StepPlan
from novainfer.fsm.messages.structured import StructuredOutputsParams, Thoughts
from novainfer.fsm.recording.pack import Kinds, pack, unpack
from novainfer.fsm.schedule.request import Request
from novainfer.kernels.sampling.draw_row import draw_row
from novainfer.kernels.sampling.logits import apply_masks
from tests.actors.devices import spec
from tests.actors.helpers import answer, ask, eventually, expected, params, read_all, running

EXTREMES = [0.0, -0.0, 5e-324, 1e-320, 1e-38, 2**-126, 1e-5, 1e-300, 1.0, 1e38, 1e308, math.inf, -math.inf, math.nan]
WIDE_INT = st.one_of(
    st.integers(-2, 40), st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64, 10**30, -(10**30)])
)
# What the device is told as the client said it.
SAME = set(SamplingParams.__struct_fields__) & set(SeqParams.__struct_fields__)
SAME -= {"seed", "stop_token_ids", "temperature", "top_k"}
TEXT = st.text(st.characters(codec=None), max_size=6)  # with halves of surrogate pairs


def reals(low: float, high: float) -> st.SearchStrategy[float]:
    """Mostly within the limits, and what lies at and beyond them."""
    return st.one_of(st.floats(low, high), st.floats(low, high), st.sampled_from(EXTREMES))


STRUCTURED = {
    "json": st.one_of(TEXT, st.dictionaries(TEXT, st.one_of(TEXT, st.none(), st.floats()), max_size=2)),
    "regex": TEXT,
    "choice": st.lists(TEXT, max_size=3),
    "grammar": TEXT,
    "json_object": st.booleans(),
    "structural_tag": TEXT,
}


def structured() -> st.SearchStrategy[StructuredOutputsParams]:
    """Each of its forms, with and without a pattern for whitespace."""
    return st.one_of(
        *(
            st.builds(
                StructuredOutputsParams,
                **{kind: values},
                disable_any_whitespace=st.booleans(),
                whitespace_pattern=st.one_of(st.none(), TEXT),
            )
            for kind, values in STRUCTURED.items()
        )
    )


def pooling() -> st.SearchStrategy[Pooling]:
    """Both ways, in any number of dimensions."""
    return st.builds(
        Pooling,
        kind=st.sampled_from(KINDS),
        dimensions=st.one_of(st.none(), WIDE_INT),
        normalize=st.booleans(),
    )


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "pooling": st.one_of(st.none(), pooling()),  # first: beside it most of the others are refused
    "n": WIDE_INT,
    "temperature": reals(0, 100),
    "top_p": reals(0, 1),
    "top_k": WIDE_INT,
    "min_p": reals(0, 1),
    "repetition_penalty": reals(0, 100),
    "presence_penalty": reals(-2, 2),
    "frequency_penalty": reals(-2, 2),
    "seed": st.one_of(st.none(), WIDE_INT, st.integers(-(2**63), 2**64 - 1)),
    "max_tokens": st.one_of(st.none(), WIDE_INT),
    "min_tokens": WIDE_INT,
    "stop": st.one_of(st.none(), TEXT, st.lists(TEXT, max_size=3)),
    "stop_token_ids": st.lists(WIDE_INT, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.one_of(st.none(), WIDE_INT),
    "prompt_logprobs": st.one_of(st.none(), WIDE_INT),
    "logit_bias": st.dictionaries(WIDE_INT, reals(-100, 100), max_size=3),
    "allowed_token_ids": st.one_of(st.none(), st.lists(WIDE_INT, max_size=3)),
    "banned_token_ids": st.lists(WIDE_INT, max_size=3),
    "banned_sequences": st.lists(st.lists(WIDE_INT, max_size=3), max_size=3),
    "bad_words": st.lists(TEXT, max_size=3),
    "mark_token_ids": st.lists(WIDE_INT, max_size=3),
    "truncate_prompt_tokens": st.one_of(st.none(), WIDE_INT),
    "structured_outputs": st.one_of(st.none(), structured()),
    "thinking_token_budget": st.one_of(st.none(), WIDE_INT),
    "thoughts": st.one_of(st.none(), st.builds(Thoughts, close_id=WIDE_INT, open_id=WIDE_INT, budget=WIDE_INT)),
    "skip_special_tokens": st.booleans(),
    "timeout_s": st.one_of(st.none(), reals(0, 1e6)),
    "max_queue_s": st.one_of(st.none(), reals(0, 1e6)),
    "priority": WIDE_INT,
    "cache_salt": st.one_of(st.none(), TEXT),
    "session_id": st.one_of(st.none(), st.from_regex("[!-~]{1,128}", fullmatch=True)),
}


@st.composite
def let_through(draw: st.DrawFn) -> SamplingParams:
    """Parameters that validation takes: a field that it refuses is left at its default."""
    found = draw(st.sampled_from([SamplingParams(max_tokens=None), SamplingParams()]))
    for name, strategy in FIELDS.items():
        try:
            found = msgspec.structs.replace(found, **{name: draw(strategy)})
        except InvalidParameter:
            continue
    return found


def plan_of(params: SamplingParams, seed: int = 0) -> StepPlan:
    submit = Submit(request_id=1, stream_id=1, choice=0, token_ids=[65], params=params, seed=seed)
    return StepPlan(admissions=[Request(submit, ByteTokenizer().vocabulary(), [EOS], 64).sampling_spec()])


def test_every_field_has_its_strategy() -> None:
    assert set(FIELDS) == set(SamplingParams.__struct_fields__)


@settings(max_examples=300, deadline=None)
@given(let_through())
def test_what_validation_lets_through_survives_wire_and_pack(params: SamplingParams) -> None:
    plan = plan_of(params)
    ((_, run),) = FrameReader(TO_DEVICE).feed(FrameWriter().frame(0, Run(plan)))
    assert run.plan == plan
    (sent,) = run.plan.admissions
    assert (sent.temperature, sent.top_k) == (0 if params.is_greedy else params.temperature, max(params.top_k, 0))
    assert sent.min_position == 1 + params.min_tokens
    assert set(sent.stop_token_ids) == {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
    for name in SAME:
        assert getattr(sent, name) == getattr(params, name)
    kinds = Kinds()
    arrival = Arrive(stream_id=1, prompt="x", params=params, seed=0, num_tokens=1)
    assert unpack(pack(arrival, kinds), kinds.names) == arrival


@settings(max_examples=300, deadline=None)
@given(
    let_through(), st.floats(0, 1, exclude_max=True), st.lists(st.floats(-1e4, 1e4, width=32), min_size=48, max_size=48)
)
def test_what_validation_lets_through_draws_a_token_in_fp32(
    params: SamplingParams, u: float, logits: list[float]
) -> None:
    """The arithmetic of the sampler: repeated penalties, bias, temperature and filters; warnings are errors."""
    if params.is_greedy:
        return
    x = np.array(logits, dtype=np.float32)
    penalty = np.float32(params.repetition_penalty)
    x = np.where(x > 0, x / penalty, x * penalty) + np.float32(100.0)
    assert np.isfinite(x).all()
    submit = Submit(request_id=0, stream_id=0, choice=0, token_ids=[1], params=params, seed=0)
    request = Request(submit, ByteTokenizer().vocabulary(), (), 2)
    token = draw_row(x, request.sampling_spec(), u)
    assert 0 <= token < len(logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 1e-320),
        ("top_p", 5e-324),
        ("top_k", 2**64),
        ("top_k", -(2**63) - 1),
        ("min_tokens", 10**30),
        ("max_tokens", 10**30),
        ("seed", 10**5000),
        ("stop", ["\ud800"]),
        ("stop", "x" * (STOP_CHARS_MAX + 1)),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", [2**64]),
        ("banned_token_ids", [0] * (TOKEN_IDS_MAX + 1)),
        ("logit_bias", {INTEGER_MAX + 1: 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("timeout_s", 1e300),
        ("max_queue_s", math.inf),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, str | float) else type(value).__name__,
)
def test_a_value_that_something_behind_the_door_could_not_hold_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=field.removesuffix("_s")) as caught:
        SamplingParams(**{"max_tokens": None, field: value})
    assert caught.value.param == field
    assert len(caught.value.message) < 200


def test_a_ban_on_the_whole_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="bans every token"):
        SamplingParams(banned_token_ids=list(range(8))).check_vocabulary(8)


def test_where_all_but_the_stop_tokens_are_banned_a_stop_token_is_drawn_however_early() -> None:
    import torch

    logits = torch.zeros(4)
    apply_masks(logits, SeqParams(slot=0, banned_token_ids=[0, 1, 2], stop_token_ids=[3], min_position=10), 1)
    assert logits.tolist() == [-math.inf, -math.inf, -math.inf, 0.0]


# ---- what cannot be sent, all the same -------------------------------------------------------------------------------


def unsendable(params: SamplingParams) -> SamplingParams:
    """`params` as no validation would let them through."""
    msgspec.structs.force_setattr(params, "top_k", 10**30)
    return params


def test_a_message_that_cannot_be_encoded_leaves_the_link_as_it_was() -> None:
    writer, reader = FrameWriter(), FrameReader(TO_DEVICE)
    with pytest.raises(UnsendableError, match="a Run cannot be sent to the device's process"):
        writer.frame(0, Run(plan_of(unsendable(SamplingParams()))))
    assert list(reader.feed(writer.frame(0, Run(plan_of(SamplingParams())))))


async def test_a_request_that_cannot_be_sent_ends_alone_and_the_process_goes_on() -> None:
    async with running(link=partial(ProcessLink, spec())) as runtime:
        neighbour = ask(runtime, "neighbour", params(400))
        bad = await answer(runtime, "bad", unsendable(params(5)))
        assert "cannot be sent" in (bad.end.error or "")
        assert (await read_all(neighbour)).token_ids == expected("neighbour", 400)
        assert (await answer(runtime, "after", params(5))).token_ids == expected("after", 5)
        statistics = runtime.scheduler_statistics()
        assert statistics is not None
        assert statistics.worker_losses_total == 0


async def test_an_answer_that_cannot_be_sent_is_a_failed_step_and_the_process_goes_on() -> None:
    async with running(link=partial(ProcessLink, spec("beyond"))) as runtime:
        assert "cannot be sent" in ((await answer(runtime, "no!", params(5))).end.error or "")
        assert (await answer(runtime, "after", params(5))).token_ids == expected("after", 5)
        statistics = runtime.scheduler_statistics()
        assert statistics is not None
        assert statistics.worker_losses_total == 0


async def test_a_recorder_that_could_not_write_one_request_records_again_when_it_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("novainfer.actors.inspection.recorder.RESUME_S", RESUME_S / 1e4)
    recorder = Recorder()
    async with running(recorder=recorder) as runtime:
        bad = unsendable(params(5))
        msgspec.structs.force_setattr(bad, "stop", ["\ud800"])  # an integer alone is written as text
        assert (await answer(runtime, "hello", bad)).is_well
        await eventually(lambda: recorder.is_on)
        assert (await answer(runtime, "after", params(5))).is_well
        assert recorder.is_on
