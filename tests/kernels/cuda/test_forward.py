"""A whole step by Triton: the bits of its parts, in at most nine launches a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from novainfer.kernels.cuda.attention import TritonAttention
from novainfer.kernels.cuda.forward import TritonBiasForward, TritonForward
from novainfer.kernels.cuda.graphs import GraphForward
from novainfer.kernels.cuda.row_ops import TritonRowOps
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.forward import DecoderKind, DecoderParts, Layer, LayerKind, OpByOpForward
from novainfer.kernels.ops.linear import TorchLinear
from novainfer.kernels.ops.reference import ReferenceAttention, ReferenceRowOps
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.ops.selftest import forward as proofs
from novainfer.kernels.ops.selftest.forward import check_forward
from novainfer.kernels.step import StepTensors

NORMS = frozenset({"input_norm", "post_norm"})
QWEN2 = (frozenset({"qkv"}), NORMS)
QWEN3 = (frozenset(), NORMS | {"q_norm", "k_norm"})
BOTH = (frozenset({"qkv", "o"}), NORMS | {"q_norm", "k_norm"})


def kind(biased: frozenset[str], norms: frozenset[str], shape: AttentionShape, **more: Any) -> DecoderKind:
    layer = LayerKind(
        tuple((name, TorchLinear) for name in ("qkv", "o", "gate_up", "down")), biased, norms, is_sliding=True
    )
    return replace(DecoderKind(frozenset({layer}), TritonRowOps, TorchAttention, shape), **more)


def test_experts_are_computed_without_graphs_and_it_is_said_why() -> None:
    plain = kind(frozenset(), NORMS, AttentionShape(2, 4, 2, 16, 4), attention=TritonAttention)
    (layer,) = plain.layers
    routed = replace(plain, layers=frozenset((layer, replace(layer, num_active_experts=2))))
    assert (GraphForward.refuses(plain), TritonForward.refuses(routed)) == (None, None)
    assert GraphForward.refuses(routed) == "which experts rows are given to is read on the host"


@pytest.fixture(autouse=True)
def one_size(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time: here one size behind attention is as good as two."""
    if device.type == "cpu":
        monkeypatch.setattr(proofs, "INTERMEDIATE_SIZES", proofs.INTERMEDIATE_SIZES[:1])


@pytest.mark.parametrize(("family", "dtype"), [(QWEN2, torch.float16), (QWEN3, torch.float32), (BOTH, torch.bfloat16)])
def test_a_step_has_the_bits_of_its_parts(
    family: tuple[frozenset[str], frozenset[str]], dtype: torch.dtype, device: torch.device
) -> None:
    of = kind(*family, AttentionShape(2, 6, 2, 20, 2))
    assert TritonForward.refuses(of) is None
    assert check_forward(TritonForward, of, dtype, device) is None


@pytest.mark.parametrize(("family", "dtype"), [(BOTH, torch.float32), (QWEN2, torch.bfloat16)])
def test_with_the_bias_behind_the_product_numbers_are_the_same(
    family: tuple[frozenset[str], frozenset[str]], dtype: torch.dtype, device: torch.device
) -> None:
    of = kind(*family, AttentionShape(2, 3, 1, 64, 2))
    assert TritonBiasForward.refuses(of) is None
    assert check_forward(TritonBiasForward, of, dtype, device) is None


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_and_values_are_quantised_as_attention_writes_them(kv_dtype: str, device: torch.device) -> None:
    """Cells and scales bit for bit: `check_forward` compares every part of the cache."""
    of = kind(*QWEN3, AttentionShape(2, 3, 1, 20, 2, kv_dtype))
    assert TritonForward.refuses(of) is None
    assert check_forward(TritonForward, of, torch.bfloat16, device) is None


def test_what_it_cannot_compute_is_refused_with_the_reason() -> None:
    class Elsewhere(TorchAttention):
        layout = "elsewhere"

    of = kind(*QWEN3, AttentionShape(2, 4, 2, 8, 4))
    assert TritonForward.refuses(replace(of, ops=ReferenceRowOps)) == "its row operations are reference"
    assert TritonForward.refuses(replace(of, attention=Elsewhere)) == "its keys and values lie as 'elsewhere'"
    assert TritonBiasForward.refuses(of) == "no product of torch's has a bias to take"


def test_one_that_rotates_wrongly_is_found(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    class Late(TritonForward):
        def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
            return super().__call__(hidden, replace(step, positions=step.positions.flip(0)))

    found = check_forward(Late, kind(*QWEN2, AttentionShape(2, 4, 2, 8, 4)), torch.float32, device)
    assert found is not None
    assert "off by" in found


class OneLaunch(TorchAttention):
    """Attention that gives the queries back, in one launch."""

    def attend(self, layer: int, query: Tensor, step: StepTensors, scale: float, window: int | None = None) -> Tensor:
        return query.clone(memory_format=torch.contiguous_format).flatten(1)


def decoder(num_layers: int, device: torch.device, attention: Any = OneLaunch) -> DecoderParts:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / 4).to(device)

    layers = [
        Layer(
            input_norm=weight(32),
            qkv=TorchLinear(weight(48, 32), weight(48)),
            o=TorchLinear(weight(32, 32), None),
            post_norm=weight(32),
            gate_up=TorchLinear(weight(80, 32), None),
            down=TorchLinear(weight(32, 40), None),
        )
        for _ in range(num_layers)
    ]
    cache = attention.allocate(AttentionShape(num_layers, 4, 1, 8, 4), 8, torch.float32, device)
    return DecoderParts(layers, weight(32), weight(64, 8), TritonRowOps, cache, 1e-6)


def decode(num_rows: int, device: torch.device, slots: list[int] | None = None) -> StepTensors:
    rows = torch.arange(num_rows, device=device)
    return StepTensors(
        input_ids=rows,
        positions=rows,
        slot_mapping=rows * 4 if slots is None else torch.tensor(slots, device=device),
        block_tables=rows[:, None].int(),
        query_start=torch.arange(num_rows + 1, device=device).int(),
        context_lens=torch.ones(num_rows, dtype=torch.int32, device=device),
        logit_rows=None,
        num_samples=num_rows,
        max_context_len=1,
        min_query_len=1,
        max_query_len=1,
    )


class Launches(TorchDispatchMode):
    """Counts what would be a launch each: torch's operations that compute, and Triton's functions."""

    FREE = (
        "empty",
        "view",
        "slice",
        "select",
        "unbind",
        "transpose",
        "t",
        "detach",
        "expand",
        "as_strided",
        "alias",
        "flatten",
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_in_triton = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        if not self.is_in_triton and name.removeprefix("new_").removesuffix("_unsafe") not in self.FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    launch = GridExecutor.__call__
    with Launches() as launches, monkeypatch.context() as patch:

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            launches.counts[self.fn.__name__] += 1
            launches.is_in_triton = True
            try:
                return launch(self, *args, **kwargs)
            finally:
                launches.is_in_triton = False

        patch.setattr(GridExecutor, "__call__", counting)
        yield launches.counts


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter does")
@pytest.mark.parametrize("forward", [TritonForward, TritonBiasForward])
def test_a_layer_is_nine_launches(forward: type[TritonForward], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for num_layers in (1, 3):
        run = forward.over(decoder(num_layers, torch.device("cpu")))
        hidden, step = torch.ones(3, 32), decode(3, torch.device("cpu"))
        with torch.inference_mode(), counted(monkeypatch) as counts:
            run(hidden, step)
        found.append(counts)
    one, three = found
    assert three["place_heads"] == 3
    assert (three["rms_norm"], three["silu_mul"], three["linear"], three["clone"]) == (7, 3, 12, 3)
    assert (three.total() - one.total()) / 2 == 9
    assert one.total() == 10  # and the first norm


def test_rows_that_pad_a_step_write_nothing(device: torch.device) -> None:
    parts = decoder(2, device)
    hidden = torch.ones(3, 32, device=device)
    TritonForward.over(parts)(hidden.clone(), decode(3, device, slots=[5, -1, 9]))
    for part in parts.attention.parts:
        slots = part.flatten(1, 2)
        assert {slot for slot in range(32) if slots[:, slot].any()} == {5, 9}


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_a_number_stays_in_its_row(wrong: float, device: torch.device) -> None:
    hidden = torch.ones(3, 32, device=device)
    hidden[1, 4] = wrong
    run = TritonForward.over(decoder(2, device, ReferenceAttention))
    clean = OpByOpForward.over(decoder(2, device, ReferenceAttention))(
        torch.ones(3, 32, device=device), decode(3, device)
    )
    out = run(hidden, decode(3, device))
    assert out is not None
    assert clean is not None
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert not out[1].isfinite().any()
