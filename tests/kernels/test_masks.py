"""Masks of a step: each sampler draws as if the model had never offered what they forbid, in that step and row only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import Driver, make_runner
from torch import Tensor

from novainfer.actors.device.wire import TO_DEVICE, FrameReader, FrameWriter
from novainfer.fsm.messages.events import Run
from novainfer.fsm.messages.step import NO_TOKEN, NONE_ALLOWED, SeqParams, StepPlan
from novainfer.fsm.recording.log import hash_of_plan
from novainfer.kernels.cpu.sampling import NativeSampler
from novainfer.kernels.masks import Masks, check_masks, masks_of, packed_mask
from novainfer.kernels.ops.selftest.sampler import check_sampler
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.sampling.sampler import RowSampler, TorchSampler
from novainfer.kernels.sampling.verify import Positions, Sampled, sampled_positions
from novainfer.kernels.step import StepBuffers

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
VOCAB = 1103  # of 35 words, the last of them with bits that no token has
POSITION = 6
TOKENS = [7, 900, 7, 31, 64, 900]
SAMPLERS = [TorchSampler, RowSampler, NativeSampler]
WAYS = [
    SeqParams(slot=0),
    SeqParams(slot=0, temperature=1.0),
    SeqParams(slot=0, temperature=1.3, top_k=1),
    SeqParams(slot=0, temperature=1.3, top_k=20, top_p=0.8),
    SeqParams(slot=0, temperature=1.0, top_p=0.7),
    SeqParams(slot=0, temperature=1.0, min_p=0.05),
    SeqParams(slot=0, logprobs=5),
    SeqParams(slot=0, temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=20),
    SeqParams(slot=0, logit_bias={3: 9.0}, banned_token_ids=[5, 6]),
    SeqParams(slot=0, temperature=1.0, allowed_token_ids=list(range(0, VOCAB, 2))),
    SeqParams(slot=0, stop_token_ids=[0, 1], min_position=POSITION + 9),
]


def logits_of(seed: int, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def over(kernel: Any, rows: Sequence[SeqParams]) -> Any:
    sampler = kernel.over(VOCAB, len(rows), 64, CPU)
    for slot, row in enumerate(rows):
        sampler.admit(msgspec.structs.replace(row, slot=slot, seed=slot, token_ids=TOKENS, num_prompt_tokens=2))
    return sampler


def masks_at(rows: Sequence[int], allowed: Sequence[Sequence[int]]) -> Masks:
    return Masks(rows, np.stack([packed_mask(ids, VOCAB) for ids in allowed]))


def drawn(sampler: Any, logits: Tensor, masks: Masks | None = None, drafts: Sequence[int] = ()) -> Sampled:
    """Of row i from slot i; logits may be overwritten."""
    at = Positions(range(len(logits)), [POSITION] * len(logits), drafts, masks)
    found: Sampled = sampler.draw(logits.clone(), at).read()
    return found


# ---- samplers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", SAMPLERS)
def test_a_masked_row_is_drawn_as_if_the_model_had_not_offered_the_rest(kernel: Any, dtype: torch.dtype) -> None:
    """Rows with masks beside rows without; and nothing of a mask is left for the step behind it."""
    count = len(WAYS)
    logits, rng = logits_of(1, count, dtype), np.random.default_rng(2)
    masked = [i for i in range(count) if i % 4 != 3]
    # Few tokens and many, seldom the likeliest one; and about as many as native kernels draw from apart.
    sizes = [3, 40, 700, 1024, 1025, 1100]
    allowed = [sorted(rng.permutation(VOCAB)[: sizes[row % len(sizes)]].tolist()) for row in masked]
    restricted = logits.clone()
    for row, ids in zip(masked, allowed, strict=True):
        restricted[row] = -INF
        restricted[row, ids] = logits[row, ids]
    # The oracle is told of no mask. (Where stop ids alone are left they stay, which is tested by itself.)
    ways = [msgspec.structs.replace(way, seed=i) for i, way in enumerate(WAYS)]
    sampler, oracle = over(kernel, ways), over(kernel, ways)
    masks = masks_at(masked, allowed)
    for _ in range(2):
        assert drawn(sampler, logits, masks) == drawn(oracle, restricted)
        assert drawn(sampler, logits) == drawn(oracle, logits)
    found = drawn(sampler, logits, masks)
    for row, ids in zip(masked, allowed, strict=True):
        assert found.token_ids[row] in ids
    assert found.token_ids != drawn(sampler, logits).token_ids


@pytest.mark.parametrize("count", [5, 300, 1000])
@pytest.mark.parametrize("kernel", SAMPLERS)
def test_a_top_k_of_all_that_a_mask_allows_filters_nothing(kernel: Any, count: int) -> None:
    rows = 60
    logits, rng = logits_of(7, rows), np.random.default_rng(count)
    masks = masks_at(range(rows), [sorted(rng.permutation(VOCAB)[:count].tolist()) for _ in range(rows)])
    expected = drawn(over(kernel, [SeqParams(slot=0, temperature=1.0)] * rows), logits, masks)
    for top_k in (count, count + 1, count + 3, 4 * count):
        sampler = over(kernel, [SeqParams(slot=0, temperature=1.0, top_k=top_k)] * rows)
        assert drawn(sampler, logits, masks) == expected, top_k


@pytest.mark.parametrize("kernel", SAMPLERS)
def test_bits_beyond_the_vocabulary_say_nothing(kernel: Any) -> None:
    """Behind each masked row lies one of larger logits, which are not its own."""
    masked = range(0, len(WAYS) - 1, 2)
    logits = logits_of(8, len(WAYS))
    logits[1::2] += 50
    masks = masks_at(masked, [[3, 40, 700, VOCAB - 1]] * len(masked))
    expected = drawn(over(kernel, WAYS), logits, masks)
    masks.words[:, -1] |= np.int32(-1 << VOCAB % 32)
    assert drawn(over(kernel, WAYS), logits, masks) == expected


@pytest.mark.parametrize("kernel", SAMPLERS)
def test_log_probabilities_are_of_what_the_mask_has_left(kernel: Any) -> None:
    """Of the tokens that are allowed alone: their probabilities sum to 1, and no other is among the likely ones."""
    logits, allowed = logits_of(3, 1), [4, 40, 1102]
    _, (logprobs,) = drawn(over(kernel, [SeqParams(slot=0, logprobs=5)]), logits, masks_at([0], [allowed]))
    assert logprobs is not None
    expected = logits[0, allowed].double().log_softmax(0)
    ids = [allowed[i] for i in expected.argsort(descending=True).tolist()]
    assert logprobs[1] == ids
    assert logprobs[2] == pytest.approx(expected.sort(descending=True).values.tolist(), abs=1e-5)
    assert logprobs[0] == logprobs[2][0]


@pytest.mark.parametrize("kernel", SAMPLERS)
def test_a_row_whose_mask_leaves_nothing_says_so_and_no_other_row_is_harmed(kernel: Any) -> None:
    ways = [
        SeqParams(slot=0),
        SeqParams(slot=0, temperature=1.0),
        SeqParams(slot=0, logprobs=2),
        SeqParams(slot=0, temperature=1.0, top_p=0.9, repetition_penalty=1.2),
        SeqParams(slot=0, banned_token_ids=[8]),
        SeqParams(slot=0, temperature=1.0, allowed_token_ids=[9, 10], logprobs=1),
        SeqParams(slot=0),
    ]
    logits = logits_of(4, len(ways))
    masks = masks_at(range(6), [[], [], [], [], [8], [8, 11]])
    found = drawn(over(kernel, ways), logits, masks)
    assert found.token_ids == [NONE_ALLOWED] * 6 + [int(logits[6].argmax())]
    assert not any(found.logprobs)


@pytest.mark.parametrize("kernel", SAMPLERS)
def test_what_is_not_a_number_counts_where_it_is_allowed(kernel: Any) -> None:
    ways = [SeqParams(slot=0), SeqParams(slot=0, temperature=1.0), SeqParams(slot=0, logprobs=1)] * 2
    logits = logits_of(5, 6)
    logits[:, 50] = NAN
    masks = masks_at(range(6), [[50, 51]] * 3 + [[51]] * 3)
    assert drawn(over(kernel, ways), logits, masks).token_ids == [NO_TOKEN] * 3 + [51] * 3


@pytest.mark.parametrize("kernel", SAMPLERS)
def test_what_is_not_a_number_and_banned_counts_for_log_probabilities_alone(kernel: Any) -> None:
    ways = [SeqParams(slot=0, banned_token_ids=[50, 51], temperature=t, logprobs=n) for n in (None, 1) for t in (0, 1)]
    for bad in (NAN, INF):
        logits = logits_of(5, 5)
        logits[:4, 50] = bad
        found = drawn(over(kernel, [*ways, ways[-1]]), logits, masks_at(range(5), [[50, 51]] * 5))
        assert found.token_ids == [NONE_ALLOWED] * 2 + [NO_TOKEN] * 2 + [NONE_ALLOWED]


@pytest.mark.parametrize("kernel", SAMPLERS)
def test_stop_tokens_that_are_all_a_mask_allows_may_come_too_early(kernel: Any) -> None:
    ways = [SeqParams(slot=0, stop_token_ids=[9, 11], min_position=POSITION + 5)] * 2
    masks = masks_at([0, 1], [[9], [9, 12]])
    assert drawn(over(kernel, ways), logits_of(6, 2), masks).token_ids == [9, 12]


def test_masks_go_with_their_rows_into_the_parts_in_which_logits_are_computed() -> None:
    masks = masks_at([0, 3, 4, 9], [[0], [3], [4], [9]])
    parts = [part for _, part in Positions(range(10), [POSITION] * 10, (), masks).parts(4)]
    found = [part.masks and (part.masks.rows, part.masks.words.tolist()) for part in parts]
    words = masks.words.tolist()
    assert found == [([0, 3], words[:2]), ([0], words[2:3]), ([1], words[3:])]
    last = Positions(range(6), [POSITION] * 6, (), masks_at([5], [[1]]))
    assert [part.masks is None for _, part in last.parts(3)] == [True, False]


class Forgetful(RowSampler):
    """A sampler with the fault that it is made for; the self-test must see each."""

    def draw(self, logits: Tensor, at: Positions) -> Any:
        return super().draw(logits, at._replace(masks=self.spoiled(at.masks)))

    def spoiled(self, masks: Masks | None) -> Masks | None:
        return None


class ByRow(Forgetful):
    def spoiled(self, masks: Masks | None) -> Masks | None:
        return masks and Masks(masks.rows, np.roll(masks.words, 1, axis=0))


class ByWord(Forgetful):
    def spoiled(self, masks: Masks | None) -> Masks | None:
        return masks and Masks(masks.rows, np.roll(masks.words, 1, axis=1))


class Stale(Forgetful):
    last: Masks | None = None

    def spoiled(self, masks: Masks | None) -> Masks | None:
        self.last = masks or self.last
        return self.last


@pytest.mark.parametrize("kernel", [Forgetful, ByRow, ByWord, Stale])
def test_the_self_test_sees_masks_that_are_ignored_shifted_or_of_the_step_before(kernel: Any) -> None:
    assert "masked" in (check_sampler(kernel, torch.float32, CPU) or "")


# ---- the record of a step --------------------------------------------------------------------------------------------

PLAN = StepPlan([0, 1], [2, 1], [2, 9], [1, 2, 3], [0], [0], [5], sample_seqs=[0, 1], num_drafts=[1, 0])


def masked_plan(positions: list[int], allowed: Sequence[Sequence[int]]) -> StepPlan:
    masks = b"".join(packed_mask(ids, VOCAB).astype("<i4").tobytes() for ids in allowed)
    return msgspec.structs.replace(PLAN, mask_positions=positions, masks=masks)


def test_a_step_without_masks_says_nothing_of_them() -> None:
    assert masks_of(PLAN) is None
    assert b"mask" not in FrameWriter().frame(0, Run(PLAN))
    assert b"mask" not in msgspec.json.encode(PLAN)


def test_masks_come_out_of_a_frame_as_they_went_in_and_count_for_the_replay() -> None:
    plan = masked_plan([0, 2], [[1, 33], [VOCAB - 1]])
    ((_, run),) = FrameReader(TO_DEVICE).feed(FrameWriter().frame(0, Run(plan)))
    at = sampled_positions(run.plan)
    assert at.masks is not None
    assert list(at.masks.rows) == [0, 2]
    assert at.masks.words.flags.writeable, "torch warns of memory that is not"
    assert [np.flatnonzero(row).tolist() for row in at.masks.allowed(VOCAB)] == [[1, 33], [VOCAB - 1]]
    others = [PLAN, masked_plan([0, 1], [[1, 33], [VOCAB - 1]]), masked_plan([0, 2], [[1, 34], [VOCAB - 1]])]
    assert len({hash_of_plan(one, 0) for one in (plan, *others)}) == 4


def test_masks_to_come_are_not_in_the_plan_and_the_others_keep_their_positions() -> None:
    plan = msgspec.structs.replace(masked_plan([0, 1, 2], [[5]]), masks_to_come=[0, 2])
    check_masks(plan, VOCAB)
    at = sampled_positions(plan)
    assert at.masks is not None
    assert list(at.masks.rows) == [1]
    assert np.flatnonzero(at.masks.allowed(VOCAB)[0]).tolist() == [5]
    all_come = msgspec.structs.replace(masked_plan([0, 2], []), masks_to_come=[0, 1])
    check_masks(all_come, VOCAB)
    assert sampled_positions(all_come).masks is None
    with pytest.raises(ValueError, match="masks of a step at 0 positions must be 0 bytes"):
        check_masks(msgspec.structs.replace(plan, masks_to_come=[0, 1, 2]), VOCAB)


@pytest.mark.parametrize(
    ("positions", "num_masks", "sentence"),
    [
        ([0], 2, "masks of a step at 1 positions must be 140 bytes for a vocabulary of 1103, not 280"),
        ([], 1, "masks of a step at 0 positions must be 0 bytes for a vocabulary of 1103, not 140"),
        ([3], 1, "mask_positions of a step must ascend from 0 to 2 at most, not [3]"),
        ([-1], 1, "mask_positions of a step must ascend from 0 to 2 at most, not [-1]"),
        ([1, 1], 2, "mask_positions of a step must ascend from 0 to 2 at most, not [1, 1]"),
    ],
)
def test_masks_that_cannot_be_are_refused(positions: list[int], num_masks: int, sentence: str) -> None:
    buffers = StepBuffers(
        max_num_seqs=6, max_num_batched_tokens=16, max_model_len=40, block_size=4, vocab_size=VOCAB, device=CPU
    )
    buffers.begin(6)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        buffers.fill(masked_plan(positions, [[1]] * num_masks))


# ---- a model ---------------------------------------------------------------------------------------------------------

SHAPE = Shape("plain", 4, 2, 16, 64, 160, eos_token_id=3)
PROMPTS = [[9, 4, 2], [7] * 5, [1, 2, 3, 4]]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain")), "native")


def follows(tokens: Sequence[int]) -> list[int] | None:
    """A grammar: what may follow depends on the last token and the place; every fifth place is free."""
    if len(tokens) % 5 == 0:
        return None
    return [token for token in range(SHAPE.vocab_size) if (token + tokens[-1] + len(tokens)) % 7 == 0]


def test_each_position_among_drafts_has_its_own_mask(runner: ModelRunner) -> None:
    """The tokens of single steps, whatever was guessed; and guesses that a mask forbids are wrong."""
    ways = [SeqParams(slot=0), SeqParams(slot=1, temperature=1.0, top_p=0.9), SeqParams(slot=2, logprobs=2)]
    plain = Driver(runner, allowed=follows)
    rows = [plain.add(way.slot, prompt, way) for way, prompt in zip(ways, PROMPTS, strict=True)]
    plain.generate(rows, 20)
    wanted = [row.tokens for row in rows]
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        for at in range(len(prompt), len(tokens)):
            allowed = follows(tokens[:at])
            assert allowed is None or tokens[at] in allowed
    driver = Driver(runner, seed=1, allowed=follows)
    rows = [driver.add(way.slot, prompt, way) for way, prompt in zip(ways, PROMPTS, strict=True)]
    driver.step(*rows)
    steps = 0
    while any(len(row.tokens) < 15 for row in rows):
        steps += 1
        guesses = [wanted[row.slot][len(row.tokens) : len(row.tokens) + 1 + steps % 4] for row in rows]
        if steps % 3 == 0:
            guesses[0][-1] = (guesses[0][-1] + 1) % SHAPE.vocab_size
        driver.verify(rows, guesses)
    for row, right in zip(rows, wanted, strict=True):
        assert row.tokens == right[: len(row.tokens)]


def test_a_mask_that_allows_nothing_ends_a_row_and_the_step_is_good(runner: ModelRunner) -> None:
    driver = Driver(runner, allowed=lambda tokens: [] if tokens == PROMPTS[0] else None)
    rows = [driver.add(slot, prompt) for slot, prompt in enumerate(PROMPTS[:2])]
    token_ids = driver.step(*rows)
    assert token_ids[0] == NONE_ALLOWED
    assert token_ids[1] >= 0
