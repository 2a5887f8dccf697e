"""The matrix unit of a CPU: what it computes, to the bit, and what happens where a process may not use it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forced import EMULATED, use_level
from torch import Tensor

from novainfer.kernels.cpu import build, native
from novainfer.kernels.cpu.levels import levels
from novainfer.kernels.cpu.linear import NativeLinear

SMALL_ROW = 5


def operands(k: int) -> tuple[Tensor, Tensor]:
    """A weight [64, 2 k] and rows [45, 2 k] whose products are zero, but for the order in which they are added."""
    generator = torch.Generator().manual_seed(k)
    weight, x = (torch.randn(n, k, generator=generator) for n in (64, 45))
    weight[7] *= 2.0**-30
    x[SMALL_ROW] *= 2.0**-100  # products with row 7 of the weight are too small to be normal
    return torch.cat((weight, weight), 1).to(torch.bfloat16), torch.cat((x, -x), 1).to(torch.bfloat16)


def noise_of_sums(level: str, k: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the order of additions leaves of sums that are zero: [45, 64], which BF16 holds nearly as it is."""
    use_level(level, monkeypatch)
    weight, x = operands(k)
    return NativeLinear.pack(weight, None)(x)


@pytest.mark.parametrize("k", [32, 448, 1056])
def test_the_unit_computes_the_bits_that_stand_for_it_elsewhere(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of_unit = noise_of_sums("amx", k, monkeypatch)  # skipped where there is none
    assert torch.equal(of_unit, noise_of_sums(EMULATED.name, k, monkeypatch))


def test_its_sums_are_two_chains_of_32_features_added_to_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    k = 448
    noise = noise_of_sums(EMULATED.name, k, monkeypatch)
    weight, x = operands(k)
    totals = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], 32):
        chains = torch.zeros(2, len(x), len(weight))
        for at in range(
            first, first + 32
        ):  # a product of two BF16 is exact in double precision, and here its sum is too
            product = x[:, at : at + 1].double() * weight[:, at].double()
            chains[at % 2] = (chains[at % 2].double() + product).float()
        totals = totals + (chains[0] + chains[1])
    normal = [row for row in range(len(x)) if row != SMALL_ROW]
    assert totals[normal].count_nonzero() > 2000
    assert torch.equal(noise[normal], totals[normal].to(torch.bfloat16))


class Refused:
    """A library whose functions all answer 1."""

    def __init__(self, path: str) -> None:
        self._name = path

    def __getattr__(self, name: str) -> Callable[[], int]:
        return lambda: 1


def test_a_process_that_may_not_use_it_takes_the_next_instruction_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if len(levels()) < 2:
        pytest.skip("there is no second instruction set here")
    best, second = levels()[:2]

    def bind(path: Path) -> ctypes.CDLL:
        with monkeypatch.context() as context:
            if path.name.startswith(f"{best.name}-"):
                context.setattr(native.ctypes, "CDLL", Refused)
            return native.bind(path)

    with caplog.at_level(logging.WARNING):
        library = build.best_library(bind)
    assert Path(library._name).name.startswith(f"{second.name}-")
    assert f"native kernels for {best.name} cannot be used (the system does not let this process" in caplog.text
    assert "is made again" not in caplog.text
