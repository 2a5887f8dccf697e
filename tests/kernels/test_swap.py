"""Blocks go to the host and come back bit for bit, in steps that may do nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import BACKENDS, Driver, Sequence, make_runner

from novainfer.fsm.messages.step import StepPlan
from novainfer.kernels.errors import LoadError
from novainfer.kernels.runtime import swap
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.runtime.swap import HostPool

SHAPE = Shape("swapped", 4, 2, 24, 64, 160)
PROMPT = [(7 * i + 3) % 160 for i in range(37)]  # three blocks of 16, the last one partly filled
OTHER = [(11 * i + 5) % 160 for i in range(45)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("swapped"))


def swapping(folder: Path, backend: str = "torch", num_host_blocks: int = 5, **options: object) -> ModelRunner:
    runner = make_runner(folder, backend, num_blocks=24, max_model_len=160, **options)
    swap_space = num_host_blocks * runner.info.kv_bytes_per_block
    runner.fit(mode="fixed", num_blocks=24, swap_space_bytes=swap_space + runner.info.kv_bytes_per_block - 1)
    assert runner.num_host_blocks == num_host_blocks
    return runner


def copies(**lists: list[int]) -> StepPlan:
    """A step of no rows."""
    return StepPlan(**lists)


def move_to(sequence: Sequence, blocks: list[int]) -> None:
    """From the next step on the sequence's blocks are these."""
    sequence.blocks = blocks
    sequence.num_sent_blocks = 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 10])
def test_a_sequence_that_was_swapped_out_goes_on_with_the_same_bits(
    folder: Path, backend: str, dtype: str, block_size: int
) -> None:
    runner = swapping(folder, backend, dtype=dtype, block_size=block_size)
    undisturbed = Driver(runner, capture=True)
    undisturbed.generate([undisturbed.add(0, PROMPT)], 8)

    driver = Driver(swapping(folder, backend, dtype=dtype, block_size=block_size), capture=True)
    runner = driver.runner
    sequence = driver.add(0, PROMPT)
    driver.generate([sequence], 3)
    old = list(sequence.blocks)
    hosts = [4, 2, 0, 3][: len(old)]
    runner.execute(copies(swap_out_blocks=old, swap_out_hosts=hosts))
    for part in runner._decoder.attention.parts:  # type: ignore[union-attr]
        part[:, old] = 1  # of another request by now
    new = [driver.free.pop() for _ in old]
    runner.execute(copies(swap_in_hosts=hosts, swap_in_blocks=new))
    move_to(sequence, new)
    driver.generate([sequence], 5)
    assert sequence.tokens[:-1] == PROMPT + [int(row.argmax()) for row in undisturbed.capturing.logits[:-1]]
    for got, expected in zip(driver.capturing.logits, undisturbed.capturing.logits, strict=True):
        assert torch.equal(got, expected)


def test_one_step_swaps_out_then_in_then_computes(folder: Path) -> None:
    """Two sequences take turns in the same blocks: what leaves is read before what comes is written."""
    alone = Driver(swapping(folder), capture=True)
    for slot, prompt in enumerate((PROMPT, OTHER)):
        alone.generate([alone.add(slot, prompt)], 2)
    expected, expected_other = alone.capturing.logits[:2], alone.capturing.logits[2:]

    driver = Driver(swapping(folder, num_host_blocks=6), capture=True)
    logits = driver.capturing.logits
    first, second = driver.add(0, PROMPT), driver.add(1, OTHER)
    driver.step(first)
    blocks = list(first.blocks)
    driver.runner.execute(copies(swap_out_blocks=blocks, swap_out_hosts=[0, 1, 2]))
    move_to(second, list(blocks))
    driver.step(second)
    batch = StepPlan(
        [0], [1], [len(PROMPT) + 1], [first.tokens[-1]], [], [], [], [0], [],
        swap_out_blocks=blocks, swap_out_hosts=[3, 4, 5], swap_in_hosts=[0, 1, 2], swap_in_blocks=blocks,
    )  # fmt: skip
    driver.runner.execute(batch)
    driver.runner.execute(copies(swap_in_hosts=[3, 4, 5], swap_in_blocks=blocks))
    driver.step(second)
    for got, wanted in zip(logits, [expected[0], expected_other[0], expected[1], expected_other[1]], strict=True):
        assert torch.equal(got, wanted)


def test_a_step_without_rows_applies_its_block_table(folder: Path) -> None:
    driver = Driver(swapping(folder), capture=True)
    sequence = driver.add(2, PROMPT)
    driver.step(sequence)
    driver.runner._buffers.block_table[2] = 23
    empty = StepPlan(
        table_slots=[2, 2, 2], table_indexes=[0, 2, 1], table_blocks=[sequence.blocks[at] for at in (0, 2, 1)]
    )
    assert driver.runner.execute(empty).token_ids == []
    again = StepPlan([2], [1], [len(PROMPT)], [PROMPT[-1]], [], [], [], [0])
    driver.runner.execute(again)
    torch.testing.assert_close(driver.capturing.logits[1], driver.capturing.logits[0])
    wrong = StepPlan(table_slots=[2], table_indexes=[0], table_blocks=[24])
    with pytest.raises(ValueError, match="table_blocks of a step must be 0 to 23, not 24"):
        driver.runner.execute(wrong)


class Cudart:
    """Locks what it is told, and knows what is mapped; `status` is what it says."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.locked: dict[int, int] = {}
        self.was_mapped: list[bool] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if self.status == 0:
            self.locked[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        num_bytes = self.locked.pop(address)
        maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        ends = [(int(begin, 16), int(end, 16)) for begin, end in maps]
        self.was_mapped.append(any(begin <= address and address + num_bytes <= end for begin, end in ends))
        return 0


def test_beside_cuda_a_pool_locks_what_was_asked_for_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own allocator would lock 32 MiB for 17; and what is locked is given up before it is unmapped."""
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    pool = swap._allocate((17, 1024 * 1024), torch.uint8, torch.device("cuda"))
    assert cudart.locked == {pool.data_ptr(): 17 * 1024 * 1024}
    pool[3] = 5
    view = pool[2:4]
    del pool, view
    assert cudart.locked == {}
    assert cudart.was_mapped == [True]
    cudart.status = 2
    with pytest.raises(MemoryError, match="100 bytes cannot be page-locked: CUDA error 2"):
        swap._allocate((100,), torch.uint8, torch.device("cuda"))


def test_a_copy_of_a_block_that_is_not_there_is_a_programmers_error(folder: Path) -> None:
    runner = swapping(folder)
    for batch in (
        copies(swap_out_blocks=[24], swap_out_hosts=[0]),
        copies(swap_out_blocks=[0], swap_out_hosts=[5]),
        copies(swap_out_blocks=[0, 1], swap_out_hosts=[0]),
        copies(swap_in_hosts=[-1], swap_in_blocks=[0]),
        copies(swap_in_hosts=[0], swap_in_blocks=[-1]),
    ):
        with pytest.raises(ValueError, match="block"):
            runner.execute(batch)
    without = make_runner(folder)
    assert without.num_host_blocks == 0
    with pytest.raises(ValueError, match="no swap space"):
        without.execute(copies(swap_out_blocks=[0], swap_out_hosts=[0]))


def test_swap_space_must_fit_beside_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder)
    per_block = runner.info.kv_bytes_per_block
    monkeypatch.setattr("novainfer.kernels.runtime.cache.free_bytes", lambda device: 40 * per_block)
    with pytest.raises(LoadError, match=r"swap space of .* GiB was asked for, but only"):
        runner.fit(mode="fixed", num_blocks=30, swap_space_bytes=11 * per_block)
    assert runner.fit(mode="fixed", num_blocks=30, swap_space_bytes=10 * per_block) == 30
    assert runner.num_host_blocks == 10


def test_copies_go_layer_by_layer_where_the_device_is_another(folder: Path) -> None:
    """The way of CUDA, on the CPU: every copy is contiguous on both sides."""
    parts = (torch.arange(2 * 5 * 12.0).view(2, 5, 3, 4), -torch.arange(2 * 5 * 6.0).view(2, 5, 6))
    before = [part.clone() for part in parts]
    pool = HostPool(parts, 3)
    pool._by_layer = True
    pool.swap_out([4, 1], [0, 2])
    for part in parts:
        part.zero_()
    pool.swap_in([2, 0], [3, 0])
    for part, was in zip(parts, before, strict=True):
        assert torch.equal(part[:, 3], was[:, 1])
        assert torch.equal(part[:, 0], was[:, 4])
        assert not part[:, [1, 2, 4]].any()
