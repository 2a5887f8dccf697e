"""Where Triton's functions compute, and which Triton will do."""

from __future__ import annotations

import pytest
import torch
import triton

from novainfer.kernels.cuda.language import INTERPRETED, can_compute_on, check_version
from novainfer.kernels.errors import KernelUnavailableError


def test_an_old_triton_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version()
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(KernelUnavailableError, match=r"Triton 3\.5\.1 is too old; 3\.6 or newer"):
        check_version()
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    check_version()


def test_it_computes_on_cuda_and_interpreted_on_the_cpu() -> None:
    assert can_compute_on(torch.device("cuda")) is None
    assert (can_compute_on(torch.device("cpu")) is None) is INTERPRETED
    assert can_compute_on(torch.device("meta")) == "Triton computes on CUDA devices, not on meta"
