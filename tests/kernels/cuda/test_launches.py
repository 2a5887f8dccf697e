"""Launches as Triton sees them: none is compiled anew while requests wait, and none has a grid that CUDA refuses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from novainfer.fsm.messages.mode import AUTO
from novainfer.fsm.messages.step import SeqParams, StepPlan
from novainfer.kernels.cuda import sampler
from novainfer.kernels.cuda.attention import TritonAttention, TritonInvariantAttention
from novainfer.kernels.cuda.jit import attention as attention_jit
from novainfer.kernels.cuda.jit import draws, edits, scans
from novainfer.kernels.cuda.language import INTERPRETED
from novainfer.kernels.masks import Masks
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.sampling.verify import Positions
from novainfer.kernels.step import StepBuffers

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="launches are recorded, not run")

SHAPE = AttentionShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, block_size=16)
CPU = torch.device("cpu")
GRID_MAX = 65535  # of the second dimension and the third; the first has 31 bits


class Recorder:
    """In the place of functions of some modules: which kinds of arguments each was launched with, and its grids."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.kinds: dict[tuple[str, Any], set[Any]] = defaultdict(set)
        self.grids: list[tuple[int, ...]] = []
        for module in modules:
            for name, function in list(vars(module).items()):
                if hasattr(function, "arg_names") and module.__name__ == function.fn.__module__:
                    monkeypatch.setattr(module, name, _Function(name, function, self))


class _Function:
    def __init__(self, name: str, function: Any, recorder: Recorder) -> None:
        self.name, self.function, self.recorder = name, function, recorder
        self.arg_names = function.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(self.arg_names, args, strict=False)) | kwargs
            constants = tuple((name, given[name]) for name in given if name.isupper())
            kinds = tuple((name, self._kind(name, given[name])) for name in self.arg_names if not name.isupper())
            self.recorder.kinds[self.name, constants].add(kinds)
            self.recorder.grids.append(grid)

        return launch

    def _kind(self, name: str, value: Any) -> Any:
        """What Triton compiles a function for; it has no hook for that without a GPU."""
        if isinstance(value, Tensor):
            is_asked = name not in (self.function.kwargs.get("do_not_specialize_on_alignment") or ())
            return value.dtype, is_asked and value.data_ptr() % 16 == 0
        if isinstance(value, int) and name not in (self.function.kwargs.get("do_not_specialize") or ()):
            return value == 1, value % 16 == 0, value >= 2**31
        return type(value)


def steps_of_many_sizes() -> list[tuple[StepBuffers, StepPlan]]:
    """One to nine sequences, of one token and of more than a tile that verifies drafts holds."""
    plans = []
    for num_seqs in range(1, 10):
        for length in (1, 40):
            buffers = StepBuffers(
                max_num_seqs=16, max_num_batched_tokens=512, max_model_len=512, block_size=16, vocab_size=8,
                device=CPU, staged=True,
            )  # fmt: skip
            slots, lengths = list(range(num_seqs)), [length] * num_seqs
            plans.append((buffers, StepPlan(slots, lengths, [300] * num_seqs, [0] * length * num_seqs, [], [], [], [])))
    return plans


@pytest.mark.parametrize("backend", [TritonAttention, TritonInvariantAttention])
@pytest.mark.parametrize("window", [None, 64])
def test_attention_is_compiled_once_for_steps_of_all_sizes(
    backend: type[TritonAttention], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch, attention_jit)
    cache = backend.allocate(SHAPE, 32, torch.bfloat16, CPU)
    for buffers, plan in steps_of_many_sizes():
        step = buffers.fill(plan)
        qkv = torch.zeros(len(plan.input_ids), 8, 16, dtype=torch.bfloat16)
        cache.write(0, qkv[:, 4:6], qkv[:, 6:], step.slot_mapping)
        cache.attend(0, qkv[:, :4], step, 1.0, window)
    assert len(recorder.kinds) >= 3
    assert [(name, kinds) for (name, _), kinds in recorder.kinds.items() if len(kinds) > 1] == []


def test_sampling_is_compiled_before_the_first_request_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, edits, scans, draws)
    drawn = sampler.TritonSampler.over(100, 16, 64, CPU)
    drawn._compile(torch.bfloat16)
    before = {of: set(kinds) for of, kinds in recorder.kinds.items()}
    drawn.admit(SeqParams(slot=0, logit_bias={3: 1.0}))
    drawn.admit(SeqParams(slot=1, temperature=1.0, top_p=0.5, repetition_penalty=1.5, token_ids=[1, 2], logprobs=3))
    drawn.admit(SeqParams(slot=2))
    for slots in ([0], [1], [2], [0, 1, 2], [2, 2, 2]):
        for masks in (None, Masks([0], np.full((1, 4), 5, dtype=np.int32))):
            at = Positions(slots, [5] * len(slots), masks=masks)
            drawn.draw(torch.zeros(len(slots), 100, dtype=torch.bfloat16), at)
    assert recorder.kinds == before


@pytest.mark.parametrize("kv_dtype", [AUTO, "int8"])
def test_a_step_of_more_rows_than_a_grid_is_wide_can_be_written(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, attention_jit)
    shape = AttentionShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, block_size=16, kv_dtype=kv_dtype)
    rows = torch.zeros(GRID_MAX + 2, 1, 16)
    cache = TritonAttention.allocate(shape, 1, torch.float32, CPU)
    cache.write(0, rows, rows, torch.full((len(rows),), -1))
    assert recorder.grids == [(len(rows), 1)]
    assert all(max(grid[1:]) <= GRID_MAX for grid in recorder.grids)
