"""Blocks are copied in all layers before anything is computed, and sequences go on in the copies with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import BACKENDS, Driver, make_runner

from novainfer.fsm.messages.step import SeqParams, StepPlan
from novainfer.kernels.runtime.copies import copy_blocks

SHAPE = Shape("copied", 4, 2, 24, 64, 160)
PROMPT = [(7 * i + 3) % 160 for i in range(37)]  # three blocks of 16, the last one partly filled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("copied"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 10])
def test_a_sequence_that_goes_on_in_a_copy_gets_the_bits_of_the_original(
    folder: Path, backend: str, dtype: str, block_size: int
) -> None:
    driver = Driver(make_runner(folder, backend, dtype=dtype, block_size=block_size), capture=True)
    first = driver.add(0, PROMPT)
    driver.generate([first], 3)
    at = (len(PROMPT) - 1) // block_size
    copy = driver.free.pop()
    blocks = [*first.blocks[:at], copy]
    row = StepPlan([1], [1], [len(PROMPT)], [PROMPT[-1]], [1] * len(blocks), list(range(len(blocks))), blocks, [0])
    row.admissions = [SeqParams(slot=1)]
    row.copy_from_blocks, row.copy_to_blocks = [first.blocks[at]], [copy]
    driver.runner.execute(row)
    tokens = list(first.tokens)
    for count in range(2):
        end = len(PROMPT) + count + 1
        driver.runner.execute(StepPlan([1], [1], [end], [tokens[end - 1]], sample_seqs=[0]))
    logits = driver.capturing.logits
    if driver.runner.info.row_invariant:
        assert all(torch.equal(got, wanted) for got, wanted in zip(logits[3:], logits[:3], strict=True))
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for got, wanted in zip(logits[3:], logits[:3], strict=True):
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_that_share_the_block_of_a_step_get_equal_bits(folder: Path, backend: str) -> None:
    """Both write the prompt's last token into the same cell, and the same into it."""
    runner = make_runner(folder, backend, block_size=16)
    driver = Driver(runner, capture=True)
    blocks, count = [5, 9, 2], len(PROMPT)
    plan = StepPlan([0, 1], [count, 1], [count] * 2, [*PROMPT, PROMPT[-1]], sample_seqs=[0, 1])
    plan.admissions = [SeqParams(slot=0), SeqParams(slot=1)]
    plan.table_slots, plan.table_indexes, plan.table_blocks = [0] * 3 + [1] * 3, [0, 1, 2] * 2, blocks * 2
    runner.execute(plan)
    first, second = driver.capturing.logits
    if runner.info.row_invariant:
        assert torch.equal(first, second)
    torch.testing.assert_close(first, second, atol=1e-4, rtol=0.0)


def test_a_step_swaps_out_then_in_then_copies(folder: Path) -> None:
    """What leaves is read before a copy takes its block, and what comes can be copied at once; no row is needed."""
    runner = make_runner(folder, num_blocks=16, max_model_len=64)
    runner.fit(mode="fixed", num_blocks=16, swap_space_bytes=2 * runner.info.kv_bytes_per_block)
    parts = runner._cache.parts
    for part in parts:
        part.copy_(torch.arange(part.numel()).remainder(251).view(part.shape))
    before = [part.clone() for part in parts]
    runner.execute(StepPlan(swap_out_blocks=[4], swap_out_hosts=[1], copy_from_blocks=[2], copy_to_blocks=[4]))
    runner.execute(StepPlan(swap_in_hosts=[1], swap_in_blocks=[9], copy_from_blocks=[9], copy_to_blocks=[7]))
    for part, was in zip(parts, before, strict=True):
        assert torch.equal(part[:, [4, 9, 7]], was[:, [2, 4, 4]])
        rest = [block for block in range(16) if block not in (4, 9, 7)]
        assert torch.equal(part[:, rest], was[:, rest])


def test_all_layers_are_copied_and_no_other_block(folder: Path) -> None:
    parts = [torch.randn(3, 8, 4, 2), torch.randn(3, 8, 5)]
    wanted = [part.clone() for part in parts]
    for part in wanted:
        part[:, 6], part[:, 0] = part[:, 1], part[:, 5]
    copy_blocks(parts, [1, 5], [6, 0])
    assert all(torch.equal(got, expected) for got, expected in zip(parts, wanted, strict=True))


@pytest.mark.parametrize(
    ("sources", "blocks", "said"),
    [
        ([1], [], "1 blocks cannot be copied to 0"),
        ([8], [1], "copy_from_blocks of a step must be 0 to 7, not 8"),
        ([1], [-1], "copy_to_blocks of a step must be 0 to 7, not -1"),
        ([1, 2], [3, 3], "copied to twice, or copied from as well"),
        ([1, 2], [2, 3], "copied to twice, or copied from as well"),
    ],
)
def test_copies_that_are_none_are_refused_and_nothing_is_copied(
    sources: list[int], blocks: list[int], said: str
) -> None:
    parts = [torch.randn(2, 8, 4)]
    before = parts[0].clone()
    with pytest.raises(ValueError, match=said):
        copy_blocks(parts, sources, blocks)
    assert torch.equal(parts[0], before)
