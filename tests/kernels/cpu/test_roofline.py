"""The measured ceilings are of a real machine, and torch's thread number is put back."""

from __future__ import annotations

import pytest
import torch

from novainfer.kernels import roofline


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch alone"])
def test_ceilings_are_positive_with_and_without_native_kernels(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "READ_BYTES", 8 << 20)
    monkeypatch.setattr(roofline, "GEMM_SHAPE", (32, 64, 64))
    monkeypatch.setattr(roofline, "SECONDS_PER_MEASUREMENT", 0.0)
    if not native:
        monkeypatch.setattr(roofline, "_library", lambda: None)
    threads = torch.get_num_threads()
    found = roofline.measure_roofline(num_threads=1)
    assert found.num_threads == 1
    assert min(found.read_gb_s, found.bfloat16_gflop_s, found.float32_gflop_s) > 0
    assert torch.get_num_threads() == threads
