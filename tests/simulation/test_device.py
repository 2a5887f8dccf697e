"""The scripted device verifies drafts as a real one does: what a run alone gives, in fewer steps."""

from __future__ import annotations

import random

import msgspec
import pytest

from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import NO_TOKEN, SeqParams, StepPlan
from novainfer.fsm.simulation.checks.oracle import device_params, expected_run
from novainfer.fsm.simulation.world.device import NAN_TOKEN, VOCAB_SIZE, ScriptedDevice, expected_logprob

SIZE = 4


def verify(device: ScriptedDevice, tokens: list[int], drafts: list[int], admission: SeqParams | None) -> StepPlan:
    """A step over all of `tokens` (the first one), or the last of them, and `drafts`."""
    start = 0 if admission is not None else len(tokens) - 1
    ids = [*tokens[start:], *drafts]
    blocks = range(-(-(start + len(ids)) // SIZE))
    return StepPlan(
        slots=[0],
        query_lens=[len(ids)],
        context_lens=[start + len(ids)],
        input_ids=ids,
        table_slots=[0 for _ in blocks],
        table_indexes=list(blocks),
        table_blocks=list(blocks),
        sample_seqs=[0],
        admissions=[] if admission is None else [admission],
        num_drafts=[len(drafts)],
    )


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PARAMS = [
    GREEDY,
    msgspec.structs.replace(GREEDY, temperature=0.5, repetition_penalty=1.2, logprobs=2),
    msgspec.structs.replace(GREEDY, frequency_penalty=0.5, min_tokens=9, stop_token_ids=[3]),
]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "repetition", "frequency"])
@pytest.mark.parametrize("seed", range(5))
def test_drafts_change_no_token(params: SamplingParams, seed: int) -> None:
    chance = random.Random(seed)
    prompt = [chance.randrange(VOCAB_SIZE) for _ in range(5)]
    expected = expected_run(prompt, params, seed, 0, 64).token_ids
    device = ScriptedDevice(16, SIZE, 1)
    admission: SeqParams | None = device_params(prompt, params, seed, set(params.stop_token_ids))
    assert admission is not None
    admission.slot, admission.token_ids = 0, list(prompt)
    tokens, steps = list(prompt), 0
    while len(tokens) < len(prompt) + len(expected):
        right = expected[len(tokens) - len(prompt) :][: chance.randint(0, 4)]
        drafts = [token if chance.random() < 0.8 else chance.randrange(VOCAB_SIZE) for token in right]
        done = device.run(verify(device, tokens, drafts, admission))
        admission = None
        assert done.num_tokens == [len(done.token_ids)]
        if params.logprobs is not None:
            assert done.logprobs == [expected_logprob(token, params.logprobs) for token in done.token_ids]
        tokens += done.token_ids
        steps += 1
    assert tokens[len(prompt) :][: len(expected)] == expected
    assert steps < len(expected)


def test_a_draft_that_gives_no_number_ends_nothing_before_it() -> None:
    prompt = [5, 6, 7]
    expected = expected_run(prompt, GREEDY, 1, 0, 64).token_ids
    device = ScriptedDevice(16, SIZE, 1)
    admission = device_params(prompt, GREEDY, 1, set())
    admission.slot = 0
    done = device.run(verify(device, prompt, [expected[0], NAN_TOKEN, 9], admission))
    assert done.token_ids == expected[:2]
    done = device.run(verify(device, [*prompt, NAN_TOKEN], [], None))  # committed, it leaves no number behind it
    assert (done.token_ids, done.num_tokens) == ([NO_TOKEN], [1])
