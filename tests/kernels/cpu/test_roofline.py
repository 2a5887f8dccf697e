"""The measured ceilings are of a real machine, and torch's thread number is put back."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from novainfer.bench import roofline
from novainfer.kernels.cpu import linear as linear_module
from novainfer.kernels.cpu.linear import NativeLinear


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


def test_the_packed_weights_of_this_process_are_read_where_they_lie(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = roofline.read_packed_weights()
    linear = NativeLinear.pack(torch.randn(3000, 512), None)
    read: list[tuple[int, int]] = []
    library = linear_module.library()
    monkeypatch.setattr(roofline, "_library", lambda: SimpleNamespace(nova_read=lambda *args: read.append(args[:2])))
    num_bytes, seconds = roofline.read_packed_weights() or (0, 0.0)
    assert num_bytes == linear.weight.nbytes + (before[0] if before else 0)
    assert seconds > 0
    assert (linear.weight.data_ptr(), linear.weight.nbytes) in read
    # Every whole 256 bytes, those behind the last whole piece among them.
    words = torch.arange(1, 1 + (700 << 10) // 8, dtype=torch.int64)
    expected = 0
    for word in words.tolist():
        expected ^= word
    assert library.nova_read(words.data_ptr(), words.nbytes, 2) == expected


def test_where_torch_computes_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_library", lambda: None)
    assert roofline.read_packed_weights() is None
