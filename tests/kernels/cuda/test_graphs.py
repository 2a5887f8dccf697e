"""Decode steps that are replayed: which sizes, that padding changes nothing, and what happens when capture fails.

A stand-in takes the place of CUDA's graphs: it computes anew at each replay, from the tensors that it was captured with
and nothing else, so that a step whose arrays lie elsewhere gives what the step before did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import Driver, make_runner
from test_flight import beside_the_host
from torch import Tensor

from novainfer.fsm.messages.mode import EAGER, FAST, SDPA, Mode
from novainfer.fsm.messages.step import SeqParams
from novainfer.kernels.cuda.forward import TritonForward
from novainfer.kernels.cuda.graphs import CudaGraphs, GraphForward, buckets_for
from novainfer.kernels.cuda.kernels import implementations
from novainfer.kernels.cuda.language import INTERPRETED
from novainfer.kernels.errors import LoadError
from novainfer.kernels.ops.registry import Registry
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a stand-in for CUDA graphs computes on the CPU")

SHAPE = Shape("plain", 4, 2, 16, 64, 160, num_layers=1)
PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLINGS = [SeqParams(slot=0), SeqParams(slot=0, temperature=1.0, seed=3), SeqParams(slot=0)]


class StandIn:
    """Graphs that compute when they are replayed; the `failing`-th capture finds no memory."""

    made: ClassVar[list[StandIn]] = []

    def __init__(self, failing: int = -1) -> None:
        self.failing = failing
        self.num_captured = self.num_replayed = 0
        self.made.append(self)

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if self.num_captured == self.failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.num_captured += 1
        out = compute().clone()

        def replay() -> None:
            self.num_replayed += 1
            out.copy_(compute())

        return replay, out


class ReplayingForward(GraphForward):
    stand_in: ClassVar[Callable[[], StandIn]] = StandIn

    def make_graphs(self) -> StandIn:
        return type(self).stand_in()


class Proved(dict[Any, None]):
    """Says of every kernel that its self-test was passed."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> None:
        return None


@pytest.fixture(scope="module")
def registry() -> Registry:
    """Triton's kernels, interpreted, with what they lack from torch; proved elsewhere, since that takes a while."""
    found = Registry(_proved=Proved())
    found.register("forward", ReplayingForward)
    for operation, kernel in implementations():
        if not issubclass(kernel, GraphForward):
            found.register(operation, kernel)
    for operation in ("linear", "attention", "ops", "sampler", "forward"):
        for kernel in build_registry(torch.device("meta")).implementations(operation):
            found.register(operation, kernel)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain"))


@pytest.fixture
def runner(folder: Path, registry: Registry) -> ModelRunner:
    StandIn.made.clear()
    made = ModelRunner.load(folder, max_num_seqs=3, max_num_batched_tokens=256, max_model_len=None, registry=registry)
    assert made.info.kernels["forward"] == "triton-graphs"
    made.fit(mode="fixed", num_blocks=64)
    return beside_the_host(made)


def tokens(driver: Driver) -> list[list[int]]:
    """Prompts, decodes of one to three rows in any order, a chunk among them, and a row that is left out."""
    rows = [driver.add(slot, PROMPT[slot:], SAMPLINGS[slot]) for slot in range(3)]
    first, second, third = rows
    work = [(first, second), (second, first), (first, (third, 3)), (second, third), (third, second, first), (third,)]
    return [driver.step(*items) for items in work]


def expected_tokens(folder: Path) -> list[list[int]]:
    return tokens(Driver(make_runner(folder, "reference"), seed=1))


def test_all_captures_are_on_the_stream_that_torch_captures_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuBLAS keeps a workspace for each stream: a new one for each switch of modes would cost one each time."""
    captured: list[dict[str, Any]] = []

    @contextmanager
    def graph(of: Any, **options: Any) -> Iterator[None]:
        captured.append(options)
        yield

    current = ["the computation's"]

    @contextmanager
    def stream(of: str) -> Iterator[None]:
        yield
        current[:] = [of]

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    for _ in range(2):
        graphs = CudaGraphs()
        for _ in range(2):
            _, out = graphs.capture(lambda: torch.ones(1))
            assert out.item() == 1
    assert [options.get("stream") for options in captured] == [None] * 4
    pools = [options["pool"] for options in captured]
    assert pools[0] is pools[1] is not pools[2] is pools[3]
    assert {options["capture_error_mode"] for options in captured} == {"thread_local"}
    assert current == ["the computation's"]


def test_sizes_are_close_where_batches_are_small() -> None:
    assert buckets_for(1) == [1]
    assert buckets_for(6) == [1, 2, 4, 6]
    assert buckets_for(256)[:6] == [1, 2, 4, 8, 16, 24]
    assert buckets_for(256)[-2:] == [248, 256]
    assert buckets_for(300)[-3:] == [272, 288, 300]
    assert buckets_for(2000)[-2:] == [496, 512]


@pytest.mark.parametrize("ahead", [False, True])
def test_replayed_steps_give_the_tokens_of_the_reference(folder: Path, runner: ModelRunner, ahead: bool) -> None:
    runner.warm()
    assert StandIn.made[-1].num_captured == 3
    before = StandIn.made[-1].num_replayed
    assert tokens(Driver(runner, seed=1, ahead=ahead)) == expected_tokens(folder)
    assert StandIn.made[-1].num_replayed == before + 4, "all but the two steps with prompts"


def test_a_row_that_is_not_sampled_may_stand_before_one_that_is(folder: Path, runner: ModelRunner) -> None:
    """A prompt that goes on by one token, in the middle of it."""

    def found(driver: Driver) -> list[list[int]]:
        first, second = driver.add(0, PROMPT[:2]), driver.add(1, PROMPT)
        driver.step(first)
        return [driver.step((second, 1), first), driver.step((second, 1), first)]

    runner.warm()
    before = StandIn.made[-1].num_replayed
    assert found(Driver(runner, seed=1)) == found(Driver(make_runner(folder, "reference"), seed=1))
    assert StandIn.made[-1].num_replayed == before + 2


def test_a_prompt_is_computed_as_it_is(runner: ModelRunner) -> None:
    runner.warm()
    forward = runner._decoder.compute
    assert isinstance(forward, GraphForward)
    assert [forward.bucket(n) for n in range(1, 5)] == [1, 2, 3, 0]
    graphs = StandIn.made[-1]
    driver = Driver(runner)
    rows = [driver.add(slot, [5, 6, 7]) for slot in range(2)]
    before = graphs.num_replayed
    driver.step(*rows)
    assert graphs.num_replayed == before, "prompts are computed as they are"
    driver.step(*rows)
    assert graphs.num_replayed == before + 1


def test_without_room_for_a_graph_there_is_none_and_the_steps_go_on(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplayingForward, "stand_in", partial(StandIn, failing=2))
    with pytest.raises(torch.OutOfMemoryError):
        runner.warm()
    forward = runner._decoder.compute
    assert isinstance(forward, GraphForward)
    assert forward.buckets == []
    assert forward.bucket(1) == 0
    assert tokens(Driver(runner, seed=1)) == expected_tokens(folder)


def test_a_graph_that_gives_something_else_is_refused(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(StandIn):
        def capture(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            replay, out = super().capture(compute)

            def wrong() -> None:
                replay()
                out[-1] += 1

            return wrong, out

    monkeypatch.setattr(ReplayingForward, "stand_in", Wrong)
    with pytest.raises(LoadError, match=r"the CUDA graph of 3 rows is not what was captured: off by.* --enforce-eager"):
        runner.warm()


def test_another_cache_is_captured_anew(folder: Path, runner: ModelRunner) -> None:
    runner.warm()
    runner.fit(mode="fixed", num_blocks=48)
    forward = runner._decoder.compute
    assert isinstance(forward, GraphForward)
    assert forward.buckets == []
    runner.warm()
    assert tokens(Driver(runner, seed=1)) == expected_tokens(folder)


def test_a_switch_to_single_launches_lets_the_graphs_go_and_the_way_back_captures_them(
    folder: Path, runner: ModelRunner
) -> None:
    runner.warm()
    assert runner.info.modes[:3] == tuple(Mode(kernels) for kernels in (FAST, EAGER, SDPA))
    runner.switch(Mode(EAGER))
    assert isinstance(runner._decoder.compute, TritonForward)
    assert tokens(Driver(runner, seed=1)) == expected_tokens(folder)
    runner.switch(Mode(FAST))
    assert isinstance(runner._decoder.compute, GraphForward)
    assert runner._decoder.compute.buckets == [1, 2, 3]
    before = StandIn.made[-1].num_replayed
    assert tokens(Driver(runner, seed=1)) == expected_tokens(folder)
    assert StandIn.made[-1].num_replayed > before


def test_without_room_for_its_graphs_a_mode_is_not_switched_to(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.warm()
    runner.switch(Mode(EAGER))
    monkeypatch.setattr(ReplayingForward, "stand_in", partial(StandIn, failing=0))
    with pytest.raises(MemoryError, match="there is no room for the CUDA graphs of fast kernels"):
        runner.switch(Mode(FAST))
    assert runner.mode == Mode(EAGER)
    assert tokens(Driver(runner, seed=1)) == expected_tokens(folder)
