"""A model is looked for once, however many threads ask where it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from novainfer.actors.device.location import DEMO_DRAFT, DEMO_MODEL, ModelLocation
from novainfer.fsm.messages.errors import ModelLoadError
from novainfer.kernels.errors import LoadError
from novainfer.kernels.weights import hub


def test_the_demo_model_and_its_draft_lie_in_the_package() -> None:
    paths = [ModelLocation(name).path() for name in (DEMO_MODEL, DEMO_DRAFT)]
    assert all((path / "config.json").is_file() for path in paths)
    assert paths[0] != paths[1]


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert ModelLocation(tmp_path).path() == tmp_path
    assert ModelLocation(str(tmp_path)).path() == tmp_path


@pytest.mark.parametrize("is_there", [True, False])
def test_the_hub_is_asked_once_by_all_who_want_to_know(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    def resolve(name: object, what: str) -> Path:
        asked.append(name)
        if not is_there:
            raise LoadError("the hub does not know it")
        return tmp_path

    monkeypatch.setattr(hub, "resolve_model", resolve)
    location = ModelLocation("some/model")

    def look(_: int) -> object:
        try:
            return location.path()
        except ModelLoadError as error:
            return (error.message, error.param)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(look, range(8)))
    assert asked == ["some/model"]
    assert found == [tmp_path if is_there else ("the hub does not know it", "model")] * 8
