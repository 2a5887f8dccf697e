"""A GPU's memory is divided as vLLM divides it, by what the driver and torch say of it; here they are scripted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import Driver, make_runner

from novainfer.fsm.messages.step import StepPlan
from novainfer.kernels.errors import LoadError
from novainfer.kernels.runtime.capacity import BYTES_PER_GRAPH, MemoryUse, Snapshot, graph_bytes, largest_steps
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.runtime.swap import STAGING_BYTES

SHAPE = Shape("on a GPU", 4, 2, 16, 48, 60)
MIB, GIB = 1024**2, 1024**3
TOTAL, MODEL, OTHER = 80 * GIB, 10 * GIB, 2 * GIB
MAX_MODEL_LEN = 50  # four blocks of 16


class ScriptedGpu:
    """80 GiB of which others hold two, and a model ten; steps take what `peaks` say, in turn."""

    def __init__(self, runner: ModelRunner, peaks: list[int], other: int = OTHER) -> None:
        self.runner, self.peaks, self.other = runner, list(peaks), other
        self.began: list[int] = []  # blocks of the cache when a peak was looked for
        self._peak = 0

    def snapshot(self) -> Snapshot:
        cache = self.runner.num_blocks * self.runner.info.kv_bytes_per_block
        allocated = MODEL + cache
        return Snapshot(TOTAL, TOTAL - self.other - allocated - MIB, allocated, allocated + MIB, allocated + self._peak)

    def begin_peak(self) -> None:
        self.began.append(self.runner.num_blocks)
        self._peak = self.peaks.pop(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("on-a-gpu"))


def runner_of(folder: Path, peaks: list[int], **more: Any) -> tuple[ModelRunner, ScriptedGpu]:
    runner = make_runner(folder, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=120)
    runner._sampler.scratch_bytes = 0
    gpu = ScriptedGpu(runner, peaks, **more)
    runner._cache._gpu = gpu  # type: ignore[assignment]
    return runner, gpu


def blocks_for(runner: ModelRunner, utilization: float, peaks: list[int], besides: int = 0) -> int:
    left = int(TOTAL * utilization) - MODEL - max(peaks) - OTHER - besides
    return left // runner.info.kv_bytes_per_block


def fit(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """As `ModelRunner.fit`; a cache that is larger than the one of the profile is not made."""
    put = runner._cache._put_cache

    def put_cache(num_blocks: int) -> Any:
        cache = put(min(num_blocks, 100))
        runner._cache.num_blocks = num_blocks
        return cache

    monkeypatch.setattr(runner._cache, "_put_cache", put_cache)
    return runner.fit(mode="auto", **options)


@pytest.mark.parametrize("utilization", [0.9, 0.5, 1.0])
def test_what_is_left_of_the_share_of_all_memory_is_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, utilization: float
) -> None:
    peaks = [3 * GIB, 2 * GIB]
    runner, gpu = runner_of(folder, peaks)
    wanted = blocks_for(runner, utilization, peaks)
    assert fit(runner, monkeypatch, memory_utilization=utilization) == wanted
    assert gpu.began == [4, 4], "a cache of one sequence, and nothing else, was there when steps were measured"
    use = runner.memory
    assert use is not None
    cache = wanted * runner.info.kv_bytes_per_block
    assert use == MemoryUse(
        TOTAL, MODEL, 3 * GIB, 0, OTHER, kv_cache_bytes=cache, free_bytes=TOTAL - OTHER - MODEL - cache - MIB
    )
    assert TOTAL * utilization - runner.info.kv_bytes_per_block < use.total_bytes_needed + cache <= TOTAL * utilization


def test_what_others_hold_and_a_staging_area_and_graphs_leave_less(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = [2 * GIB, 1 * GIB]
    runner, _ = runner_of(folder, peaks, other=7 * GIB)
    runner._kernels.names["forward"] = "triton-graphs"
    runner._sampler.scratch_bytes = 9 * MIB
    graphs = graph_bytes(6, 1 * GIB)
    assert graphs == 1 * GIB + 4 * BYTES_PER_GRAPH
    monkeypatch.setattr(runner._cache, "_fit_host_pool", lambda cache, swap_space_bytes, free: None)
    expected = blocks_for(runner, 0.9, peaks, 5 * GIB + 9 * MIB + graphs + STAGING_BYTES)
    assert fit(runner, monkeypatch, memory_utilization=0.9, swap_space_bytes=4 * MIB) == expected
    assert runner.memory is not None
    assert (runner.memory.graph_bytes, runner.memory.other_bytes) == (graphs, 7 * GIB)


def test_steps_go_on_as_ever_over_the_cache_behind_the_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 9, 33, 8, 41]
    plain = Driver(make_runner(folder, max_model_len=MAX_MODEL_LEN))
    expected = plain.generate([plain.add(1, prompt)], 8)
    runner, _ = runner_of(folder, [GIB, GIB])
    fit(runner, monkeypatch, memory_utilization=0.9)
    assert not runner._buffers.block_table.any()
    driver = Driver(runner)
    driver.free = list(range(50))
    assert driver.generate([driver.add(1, prompt)], 8) == expected


def test_too_small_a_share_says_how_many_tokens_fit_and_which_share_would_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, gpu = runner_of(folder, [3 * GIB, GIB])
    per_block = runner.info.kv_bytes_per_block
    used = MODEL + 3 * GIB + OTHER
    with pytest.raises(LoadError) as failed:
        fit(runner, monkeypatch, memory_utilization=(used + 2.5 * per_block) / TOTAL)
    said = str(failed.value)
    assert "one sequence of max_model_len 50 needs 4 KV blocks of 16 tokens" in said
    assert (
        "hold 2: max_model_len must be at most 32; for that length gpu_memory_utilization must be at least 0.19" in said
    )
    assert (
        "10.00 GiB of weights and buffers, 3.00 of activations, 0.00 for CUDA graphs and 2.00 that others hold" in said
    )
    gpu.peaks = [3 * GIB, GIB]
    with pytest.raises(LoadError, match=r"hold 0: max_model_len must be at most 0; for that length gpu_memory_util"):
        runner.fit(mode="auto", memory_utilization=0.1)
    gpu.peaks, gpu.other = [3 * GIB, GIB], 67 * GIB
    with pytest.raises(LoadError, match="no share of it is enough"):
        runner.fit(mode="auto", memory_utilization=0.9)


def test_a_largest_step_without_memory_is_a_sentence_and_leaves_no_cache_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = runner_of(folder, [GIB, GIB])

    def execute(plan: StepPlan) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "execute", execute)
    with pytest.raises(
        LoadError, match=r"the largest step \(max_num_batched_tokens 120, max_num_seqs 6\) finds no mem"
    ):
        runner.fit(mode="auto", memory_utilization=0.9)
    assert (runner.num_blocks, runner._cache.parts) == (0, ())


def test_the_largest_steps_fill_a_step_with_tokens_and_with_requests() -> None:
    prefill, decode = largest_steps(max_num_seqs=3, max_num_batched_tokens=120, max_model_len=50, block_size=16)
    assert (prefill.query_lens, prefill.context_lens) == ([50, 50, 20], [50, 50, 20])
    assert (len(prefill.input_ids), prefill.sample_seqs, max(prefill.table_blocks)) == (120, [0, 1, 2], 3)
    assert (decode.query_lens, decode.sample_seqs, len(decode.admissions)) == ([1, 1, 1], [0, 1, 2], 3)
    few, _ = largest_steps(max_num_seqs=1, max_num_batched_tokens=120, max_model_len=50, block_size=16)
    assert few.query_lens == [50]


def test_a_share_is_rounded_up_and_there_may_be_none() -> None:
    use = MemoryUse(100, 10, 5, 0, 5)
    assert (use.left(0.9), use.left(0.1)) == (70, -10)
    assert use.left(0.9, 0.5) == 30  # of 45, beside 15 of its own: what others hold is of their share
    assert use.left(0.9, 0.1) == -6
    assert replace(use, other_bytes=60).left(0.9, 0.5) == 15  # there is no more
    assert use.utilization_for(50) == 0.7
    assert replace(use, total_bytes=1000).utilization_for(101) == 0.13
    assert use.utilization_for(81) is None
