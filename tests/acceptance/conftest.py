"""The demo model and tiny random checkpoints, each beside transformers; no thread may be left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from tqdm import tqdm

from novainfer import LLM, EngineConfig
from tests.acceptance.reference import Reference
from tests.kernels.checkpoints import GRID, save_checkpoint
from tests.leftovers import nothing_left

__all__ = ["nothing_left"]

tqdm.monitor_interval = 0  # transformers' progress bars would start a thread that outlives them
DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"


@pytest.fixture(scope="module", autouse=True, params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Everything here with one step in flight, and with two (`async_scheduling`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineConfig, "plans_ahead", property(lambda config: request.param))
        yield request.param


@pytest.fixture(scope="session")
def demo() -> Reference:
    """The demo model in transformers."""
    return Reference(DEMO)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Random checkpoints of the kernels' grid, by name, in transformers."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            (shape,) = [shape for shape in GRID if shape.name == name]
            made[name] = Reference(save_checkpoint(shape, tmp_path_factory.mktemp(name)))
        return made[name]

    return get


@pytest.fixture(scope="module")
def llm(is_async: bool) -> Iterator[LLM]:
    """The demo model, blocking."""
    with LLM(max_num_seqs=32, dtype="float32") as model:
        yield model
