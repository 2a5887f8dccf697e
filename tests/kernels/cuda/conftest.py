"""These tests run on a GPU where there is one, and in Triton's interpreter elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not there")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Infinities and NaNs are numbers that kernels must bear; numpy, which interprets them, warns of each."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture
def device() -> torch.device:
    """Where Triton's functions compute in this process."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
