"""Proves one kernel against the torch reference on this machine: numbers, rows given back, row invariance.

Each function gives None, or one phrase that says what was wrong. They run at load, so they are small: a few
milliseconds each.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from novainfer.fsm.messages.step import NO_TOKEN, SeqParams
from novainfer.kernels.masks import Masks, packed_mask
from novainfer.kernels.ops.forward import (
    EXPERT_PRODUCTS,
    SHAPES,
    DecoderKind,
    DecoderParts,
    Layer,
    LayerKind,
    OpByOpForward,
)
from novainfer.kernels.ops.grouped import GroupedWeight
from novainfer.kernels.ops.grouped_linear import ReferenceGroupedActivationsLinear, ReferenceGroupedLinear
from novainfer.kernels.ops.quantised import (
    PART_ROWS,
    ReferenceFp8ActivationsLinear,
    ReferenceFp8Linear,
    ReferenceInt8ActivationsLinear,
    ReferenceInt8Linear,
)
from novainfer.kernels.ops.reference import ReferenceAttention, ReferenceLinear, ReferenceRowOps
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.sampling.sampler import TorchSampler
from novainfer.kernels.sampling.verify import Positions, Sampled
from novainfer.kernels.step import StepTensors

__all__ = [
    "check_attention",
    "check_forward",
    "check_grouped_linear",
    "check_linear",
    "check_quantised_linear",
    "check_row_ops",
    "check_sampler",
    "deviation",
]

# Largest error over the largest value. bf16 rounds to 2**-9 and may round twice on the way.
TOLERANCE: dict[torch.dtype, float] = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
LINEAR_SHAPES = ((64, 96), (160, 64), (33, 48))  # (N, K); those that the kernel refuses are left out
ROWS = (1, 2, 7, 33)
EPS = 1e-6
ORACLES: dict[tuple[str, bool], Any] = {
    (oracle.precision, oracle.rounds_activations): oracle
    for oracle in (
        ReferenceInt8Linear,
        ReferenceInt8ActivationsLinear,
        ReferenceFp8Linear,
        ReferenceFp8ActivationsLinear,
        ReferenceGroupedLinear,
        ReferenceGroupedActivationsLinear,
    )
}
# (bits, group size, shifts): what files hold (GGUF: 32 and 16, GPTQ and AWQ: 32 to 128), and a group of a whole row.
GROUPED_FORMS = ((4, 32, True), (4, 96, True), (4, 128, False), (8, 32, False), (8, 16, True), (8, 192, False))
GROUPED_SHAPES = ((64, 192), (33, 384))  # (N, K); of each form the first that its groups divide
LAYERS = 2  # of the decoder that a forward is proved on, at least: one error on the other
HIDDEN_SIZE = 64  # of the decoder that a forward is proved on
VOCAB_SIZE = 1300  # of the logits that a sampler is proved on
INTERMEDIATE_SIZES = (40, 64)  # halves of a product that share a panel, and halves that do not


def deviation(got: Tensor, expected: Tensor, factor: float = 1) -> str | None:
    """How far the numbers lie from those expected, if that is more than rounding (`factor` times as much)."""
    scale = expected.float().abs().max().clamp_min(1e-30)
    error = ((got.float() - expected.float()).abs().max() / scale).item()
    if error <= factor * TOLERANCE.get(expected.dtype, 1e-9):  # nan is not
        return None
    return f"off by {error:.1e} of the largest value"


def _wrong(what: str, got: Tensor, expected: Tensor, factor: float = 1) -> str | None:
    wrong = deviation(got, expected, factor)
    return None if wrong is None else f"{what} is {wrong}"


def _normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def check_linear(linear: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Products with and without bias, rows that lie apart, gathered rows, and rows alone against rows together."""
    return _check_linear(linear, ReferenceLinear, dtype, device)


def check_quantised_linear(linear: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """The same against the reference's own weights of this precision; and a weight put in parts."""
    n, k = LINEAR_SHAPES[1]
    weight = _normal((n, k), 9, dtype, device)
    in_parts = linear.empty(n, k, None, dtype, device)
    for first in range(0, n, PART_ROWS):
        in_parts.put(first, weight[first : first + PART_ROWS])
    x = _normal((3, k), 10, dtype, device)
    if not torch.equal(in_parts(x), linear.pack(weight, None)(x)):
        return "a weight put in parts is not the weight put at once"
    return _check_linear(linear, ORACLES[linear.precision, linear.rounds_activations], dtype, device)


def check_grouped_linear(linear: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """The same as for rows that are rounded here, and weights as files hold them, in all forms it takes."""
    wrong = check_quantised_linear(linear, dtype, device)
    oracle = ORACLES[linear.precision, linear.rounds_activations]
    for bits, group_size, has_shift in GROUPED_FORMS:
        n, k = next((n, k) for n, k in GROUPED_SHAPES if k % group_size == 0)
        weight = grouped_weight(n, k, bits, group_size, has_shift=has_shift)
        if wrong is not None or linear.refuses_form(k, weight.form) is not None:
            continue
        bias = _normal((n,), 1, dtype, device)
        packed, reference = (kind.pack_grouped(weight, bias, dtype, device) for kind in (linear, oracle))
        x = _normal((max(ROWS), k), 3, dtype, device)
        together, ids = packed(x), torch.tensor([n - 1, 0, n // 2, 0], device=device)
        what = f"a weight of {bits} bits in groups of {group_size}"
        wrong = _wrong(what, together, reference(x))
        if wrong is None and linear.row_invariant and not torch.equal(packed(x[2:5]), together[2:5]):
            wrong = f"rows of {what} differ from the same rows in a larger batch"
        if wrong is None and not torch.equal(packed.rows(ids), reference.rows(ids)):
            wrong = f"gathered rows of {what} are not those packed"
    return wrong


def grouped_weight(n: int, k: int, bits: int, group_size: int, *, has_shift: bool) -> GroupedWeight:
    """Codes of all values with scales of several sizes, and shifts if wanted: [n, k]."""
    generator = torch.Generator().manual_seed(n + k + bits)
    least, most = (0, 15) if bits == 4 else (-128, 127)
    codes = torch.randint(least, most + 1, (n, k), generator=generator, dtype=torch.int8)
    scale = torch.rand(n, k // group_size, generator=generator) + 0.01
    zero = torch.randint(least, most + 1, scale.shape, generator=generator)
    return GroupedWeight(bits, group_size, codes, scale, -zero * scale if has_shift else None)


def _check_linear(linear: Any, oracle: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    for n, k in LINEAR_SHAPES:
        if linear.refuses(n, k, dtype, device) is not None:
            continue
        for bias in (None, _normal((n,), 1, dtype, device)):
            weight = _normal((n, k), 2, dtype, device)
            packed = linear.pack(weight.clone(), bias)
            reference = oracle.pack(weight, bias)
            x = _normal((max(ROWS), k + 16), 3, dtype, device)[:, :k]
            together = packed(x)
            for rows in ROWS:
                got = packed(x[:rows])
                wrong = _wrong(f"[{rows}, {k}] @ [{k}, {n}]", got, reference(x[:rows]))
                if wrong is not None:
                    return wrong
                if linear.row_invariant and not torch.equal(got, together[:rows]):
                    return f"{rows} rows of [{k}, {n}] differ from the same rows in a larger batch"
            ids = torch.tensor([n - 1, 0, n // 2, 0], device=device)
            if not torch.equal(packed.rows(ids), reference.rows(ids)):
                return f"gathered rows of a [{n}, {k}] weight are not those packed"
    return None


def check_row_ops(ops: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Each operation on rows of two widths."""
    for width in (32, 72):
        for rows in ROWS:
            x = _normal((rows, width), 4, dtype, device)
            weight = 1 + _normal((width,), 5, dtype, device) / 4
            residual = _normal((rows, width), 6, dtype, device)
            expected_residual = residual.clone()
            expected = ReferenceRowOps.add_rms_norm(x, expected_residual, weight, EPS)
            wrong = (
                _wrong("rms_norm", ops.rms_norm(x, weight, EPS), ReferenceRowOps.rms_norm(x, weight, EPS))
                or _wrong("add_rms_norm", ops.add_rms_norm(x, residual, weight, EPS), expected)
                or _wrong("the sum of add_rms_norm", residual, expected_residual)
                or _wrong("silu_mul", ops.silu_mul(x), ReferenceRowOps.silu_mul(x))
                or _check_embed(ops, rows, width, dtype, device)
                or _check_qk_norm(ops, rows, width, dtype, device)
                or _check_rope(ops, rows, width, dtype, device)
                or _check_experts(ops, rows, width, dtype, device)
            )
            if wrong is not None:
                return wrong
            if ops.row_invariant and not torch.equal(
                ops.rms_norm(x[-1:].clone(), weight, EPS)[0], ops.rms_norm(x, weight, EPS)[-1]
            ):
                return "a row's rms_norm differs from the same row in a larger batch"
    return None


def _check_embed(ops: Any, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Tokens as they are, and tokens that slots were given last, one of which was given none."""
    weight = _normal((9, width), 12, dtype, device)
    pool = torch.tensor([8, -1, 3], device=device)
    for ids, token_pool in ((torch.arange(rows) % 9, None), (torch.arange(rows) * 5 % 12 - 3, pool)):
        if not torch.equal(
            ops.embed(weight, ids.to(device), token_pool), ReferenceRowOps.embed(weight, ids.to(device), token_pool)
        ):
            return "embed gives other rows than were asked for"
    return None


def _check_qk_norm(ops: Any, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Four query heads and one key head of six, so that the values behind them must stay."""
    q_norm, k_norm = (1 + _normal((head_dim,), seed, dtype, device) / 4 for seed in (9, 10))
    qkv = _normal((rows, 6 * head_dim), 11, dtype, device)
    expected = qkv.clone()
    ReferenceRowOps.qk_norm(expected, q_norm, k_norm, 4, 1, EPS)
    ops.qk_norm(qkv, q_norm, k_norm, 4, 1, EPS)
    if not torch.equal(qkv[:, 5 * head_dim :], expected[:, 5 * head_dim :]):
        return "qk_norm changed what it must not norm"
    return _wrong("qk_norm", qkv, expected)


def _check_rope(ops: Any, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Five rotated heads of seven, so that the values behind them must stay."""
    cos_sin = _normal((64, head_dim), 7, torch.float32, device)
    positions = torch.arange(rows, device=device) * 5 % 64
    qkv = _normal((rows, 7 * head_dim), 8, dtype, device)
    expected = qkv.clone()
    ReferenceRowOps.rope(expected, cos_sin, positions, 5, head_dim)
    ops.rope(qkv, cos_sin, positions, 5, head_dim)
    if not torch.equal(qkv[:, 5 * head_dim :], expected[:, 5 * head_dim :]):
        return "rope changed what it must not rotate"
    return _wrong("rope", qkv, expected)


def _check_experts(ops: Any, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Of `width` experts three a row, with likely ones that are equal; all of five; and a row of NaN."""
    for num_experts, num_active, normalises in ((width, 3, True), (5, 5, False)):
        logits = _normal((rows, num_experts), 13, dtype, device)
        logits[:, 1] = logits[:, 4]
        logits[0, 0] = logits[0, 1] = logits[0, 4] = 5
        chosen, weights = ops.choose_experts(logits, num_active, normalises=normalises)
        expected, right = ReferenceRowOps.choose_experts(logits, num_active, normalises=normalises)
        if not torch.equal(chosen, expected):
            return "choose_experts gives others than the likeliest"
        outputs = _normal((rows * num_active, width), 14, dtype, device)
        places = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(15)).view(rows, -1).to(device)
        shared, gate = (_normal((rows, size), 16, dtype, device) for size in (width, 1))
        wrong = _wrong("the weight of an expert", weights, right)
        for beside in ((None, None), (shared, gate)):
            mixed = ops.mix_experts(outputs, places, right, *beside)
            wrong = wrong or _wrong("mix_experts", mixed, ReferenceRowOps.mix_experts(outputs, places, right, *beside))
            alone = ops.mix_experts(outputs, places[-1:], right[-1:], *(x if x is None else x[-1:] for x in beside))
            if wrong is None and ops.row_invariant and not torch.equal(alone[0], mixed[-1]):
                wrong = "a row's mix_experts differs from the same row in a larger batch"
        if wrong is not None:
            return wrong
    chosen, weights = ops.choose_experts(torch.full((2, 4), torch.nan, dtype=dtype, device=device), 2, normalises=True)
    if not (weights.isnan().all() and chosen.min() >= 0 and chosen.max() < 4):
        return "choose_experts gives a row of NaN an expert that is not there, or a weight"
    return None


def check_attention(attention: Any, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """A mixed step over scattered blocks: a prefill, a chunk, decodes, and a block that two sequences share.

    With whole contexts, and with a window that begins within a block.
    """
    small = dataclasses.replace(shape, num_layers=2)
    size = shape.block_size
    more = min(3, size), min(2, size)  # so that two blocks hold them, however small
    contexts = [size + more[0], 2 * size + 1, 3 * size, 1, size + more[1]]
    query_lens = [contexts[0], min(5, contexts[1]), 1, 1, 2]
    tables = torch.full((5, 3), 10**9, dtype=torch.int32)  # what is behind the context must not be read
    tables[0, :2] = torch.tensor([9, 2])
    tables[1] = torch.tensor([4, 7, 0])
    tables[2] = torch.tensor([11, 3, 8])
    tables[3, :1] = torch.tensor([6])
    tables[4, :2] = torch.tensor([9, 5])  # its first block is written by sequence 0 in this very step
    # The same tokens, the last of each sequence computed alone: rows must not know their batch.
    ends = [sum(query_lens[: i + 1]) - 1 for i in range(len(query_lens))]
    for window in (None, size + 2):
        run = functools.partial(
            _run_step, shape=small, contexts=contexts, query_lens=query_lens, dtype=dtype, device=device, window=window
        )
        expected, got = (run(backend, tables=tables) for backend in (ReferenceAttention, attention))
        what = "attention over a mixed step" if window is None else "attention with a window"
        wrong = _wrong(what, got, expected)
        if wrong is not None:
            return wrong
        if window is None and not torch.equal(run(attention, tables=tables, move=True), got):
            return "a block that was copied elsewhere does not hold what it held"
        if attention.row_invariant and not torch.equal(run(attention, tables=tables, alone=ends), got[ends]):
            return f"a row's {what} differs between a chunk and a decode"
    return None


def _run_step(
    backend: Any,
    shape: AttentionShape,
    contexts: list[int],
    query_lens: list[int],
    tables: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
    alone: list[int] | None = None,
    move: bool = False,
) -> Tensor:
    """Fill the cache with every context and attend over layer 1 -> [T, heads * head_dim].

    With `alone`, each sequence's last query row (those rows of the step) attends as a decode of its own. With
    `move`, block 9 is copied to block 1 and wiped before.
    """
    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.block_size
    cache = backend.allocate(shape, 12, dtype, device)
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    for seq, context in enumerate(contexts):
        tokens = torch.arange(size if seq == 4 else 0, context)  # sequence 4 finds its first block written
        slots = (tables[seq, tokens // size].long() * size + tokens % size).to(device)
        qkv = _normal((len(tokens), heads + 2 * kv_heads, shape.head_dim), 20 + seq, dtype, device)
        for layer in (0, 1):
            key, value = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
            cache.write(layer, key if layer else value, value if layer else key, slots)
    if move:
        for part in cache.parts:
            part[:, 1] = part[:, 9]
            part[:, 9] = 0
        tables = torch.where(tables == 9, 1, tables)
    query = _normal((starts[-1], heads + 2 * kv_heads, shape.head_dim), 30, dtype, device)[:, :heads]
    scale = shape.head_dim**-0.5

    def attend(layer: int, rows: Tensor, *args: Any) -> Tensor:
        out: Tensor = cache.attend(layer, rows, *args)
        return out

    if alone is None:
        step = _step(query_lens, contexts, tables, size, None, device)
        attend(0, query, step, scale, window)
        return attend(1, query, step, scale, window)
    rows = []
    for seq, row in enumerate(alone):
        step = _step([1], contexts[seq : seq + 1], tables[seq : seq + 1], size, None, device)
        attend(0, query[row : row + 1], step, scale, window)
        rows.append(attend(1, query[row : row + 1], step, scale, window))
    return torch.cat(rows)


def check_forward(forward: Any, kind: DecoderKind, dtype: torch.dtype, device: torch.device) -> str | None:
    """Steps of every sort through a small decoder of this kind, against its kernels one by one.

    Hidden states and what is written to the KV cache have the same bits where the forward promises it.
    """
    if forward is OpByOpForward:
        return None  # it is what the others are compared with, and its kernels are proved one by one
    for intermediate_size in INTERMEDIATE_SIZES:
        layers = _small_layers(kind, intermediate_size, dtype, device)
        expected, got = (_run_forward(operation, kind, layers, dtype, device) for operation in (OpByOpForward, forward))
        if got.keys() != expected.keys():
            return f"gives {', '.join(got)} where one kernel after the other gives {', '.join(expected)}"
        for name, tensor in expected.items():
            wrong = _wrong(name, got[name], tensor)
            if wrong is not None:
                return wrong
            if forward.row_invariant and not torch.equal(got[name], tensor):
                return f"{name} has other bits than one kernel after the other gives"
    return None


def _small_layers(kind: DecoderKind, intermediate_size: int, dtype: torch.dtype, device: torch.device) -> list[Layer]:
    """One layer of each kind, two at least."""
    kinds = sorted(kind.layers, key=repr)
    shape = kind.attention_shape
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        "head_dim": shape.head_dim,
        "hidden_size": HIDDEN_SIZE,
        "q_size": q_size,
        "qkv_size": q_size + 2 * kv_size,
        "intermediate_size": intermediate_size,
        "gate_up_size": 2 * intermediate_size,
        "moe_intermediate_size": intermediate_size,
        "moe_gate_up_size": 2 * intermediate_size,
        "shared_expert_intermediate_size": intermediate_size + 8,
        "shared_gate_up_size": 2 * (intermediate_size + 8),
        "1": 1,
    }

    def layer(kind: LayerKind, seed: int) -> Layer:
        parts: dict[str, Any] = {}
        num_experts = kind.num_active_experts + 3
        for number, (name, named) in enumerate(SHAPES.items(), seed):
            size = tuple(num_experts if of == "num_experts" else sizes[of] for of in named)
            kernels = [kernel for part, kernel in kind.products if part == name]
            if name in kind.norms:
                parts[name] = 1 + _normal(size, number, dtype, device) / 8
            elif name in EXPERT_PRODUCTS and kernels:
                parts[name] = [
                    kernels[expert % len(kernels)].pack(
                        _normal(size, 1000 * expert + number, dtype, device) / size[1] ** 0.5, None
                    )
                    for expert in range(num_experts)
                ]
            elif kernels:
                bias = _normal(size[:1], number, dtype, device) if name in kind.biased else None
                parts[name] = kernels[0].pack(_normal(size, number, dtype, device) / size[1] ** 0.5, bias)
        return Layer(
            **parts,
            sliding_window=shape.block_size + 3 if kind.is_sliding else None,
            num_active_experts=kind.num_active_experts,
            normalises_experts=kind.normalises_experts,
        )

    return [layer(kinds[index % len(kinds)], 100 * index) for index in range(max(2, len(kinds)))]


def _run_forward(
    operation: Any, kind: DecoderKind, layers: list[Layer], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """What the steps give and leave in the cache, by names for people."""
    size = kind.attention_shape.block_size
    num_positions = 3 * size + 7
    tables = torch.randperm(3 * -(-num_positions // size), generator=torch.Generator().manual_seed(50)).int()
    shape = dataclasses.replace(kind.attention_shape, num_layers=len(layers))
    attention = kind.attention.allocate(shape, len(tables), dtype, device)
    run = operation.over(
        DecoderParts(
            layers=layers,
            final_norm=1 + _normal((HIDDEN_SIZE,), 51, dtype, device) / 8,
            cos_sin=_normal((num_positions, shape.head_dim), 52, torch.float32, device),
            ops=kind.ops,
            attention=attention,
            rms_norm_eps=EPS,
        )
    )
    found: dict[str, Tensor] = {}
    contexts = [0, 0, 0]
    for name, query_lens, sampled in (
        ("a prefill", [size + 1, 2 * size, 3 * size], []),
        ("a mixed step", [1, 5, 1], [0, 5, 6]),
        ("a decode", [1, 1, 1], None),
        ("a step sampled in its middle", [2, 1, 3], [1, 0, 4]),
    ):
        contexts = [context + new for context, new in zip(contexts, query_lens, strict=True)]
        step = _step(query_lens, contexts, tables.view(3, -1), size, sampled, device)
        hidden = run(_normal((sum(query_lens), HIDDEN_SIZE), 53, dtype, device), step)
        if hidden is not None:
            found[f"{name} through a decoder"] = hidden
    return found | {f"part {i} of the KV cache": part for i, part in enumerate(attention.parts)}


def _step(
    query_lens: list[int],
    contexts: list[int],
    tables: Tensor,
    block_size: int,
    sampled: list[int] | None,
    device: torch.device,
) -> StepTensors:
    """A step of sequences whose last `query_lens` tokens are computed; `sampled` as `StepTensors.logit_rows`."""
    of_seq = [torch.arange(end - new, end) for new, end in zip(query_lens, contexts, strict=True)]
    slots = [
        table[at // block_size].long() * block_size + at % block_size for table, at in zip(tables, of_seq, strict=True)
    ]
    positions = torch.cat(of_seq).to(device)
    return StepTensors(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=torch.cat(slots).to(device),
        block_tables=tables.to(device),
        query_start=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        logit_rows=None if sampled is None else torch.tensor(sampled, dtype=torch.int64, device=device),
        num_samples=sum(query_lens) if sampled is None else len(sampled),
        max_context_len=max(contexts),
        min_query_len=min(query_lens),
        max_query_len=max(query_lens),
    )


def check_sampler(sampler: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Each way of sampling, three steps of each: apart, as drafts that are right, and a step computed again.

    With masks of some rows, and without any.
    """
    if sampler is TorchSampler:
        return None  # it is what the others are compared with
    prompt = [5, 9, 5, 700]
    ways = [
        SeqParams(slot=0),
        SeqParams(slot=0, logprobs=3),
        SeqParams(slot=0, temperature=1.0),
        SeqParams(slot=0, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, logprobs=0),
        SeqParams(slot=0, temperature=1.0, top_p=0.95),
        SeqParams(slot=0, temperature=1.3, top_k=300, min_p=0.01),
        SeqParams(slot=0, temperature=0.2, presence_penalty=0.5, frequency_penalty=5.0, num_prompt_tokens=2),
        SeqParams(slot=0, min_position=6, stop_token_ids=[17, 40], banned_token_ids=[3], logit_bias={40: 50.0}),
        SeqParams(slot=0, temperature=1.0, allowed_token_ids=list(range(0, VOCAB_SIZE, 3))),
    ]
    rows = [msgspec.structs.replace(row, slot=slot, token_ids=prompt) for slot, row in enumerate(ways)]
    # A row's logits stay, so that penalties decide what is next.
    logits = _normal((len(rows), VOCAB_SIZE), 60, dtype, device).repeat_interleave(3, dim=0) * 3
    logits[4 * 3 + 2, 800] = torch.nan
    slots = [row.slot for row in rows for _ in range(3)]
    positions = [len(prompt) + step for _ in rows for step in range(3)]
    every = list(range(len(slots)))
    first, second, third = every[::3], every[1::3], every[2::3]

    def run(
        kernel: Any, *steps: list[int], drafts: list[int] | None = None, masks: dict[int, Any]
    ) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = [(NO_TOKEN, None)] * len(every)
        drawing = kernel.over(VOCAB_SIZE, len(rows), 16, device)
        for row in rows:
            drawing.admit(row)
        for step in steps:
            masked = [number for number, i in enumerate(step) if i in masks]
            own = Masks(masked, np.stack([masks[step[number]] for number in masked])) if masked else None
            at = Positions([slots[i] for i in step], [positions[i] for i in step], drafts or [], own)
            sampled: Sampled = drawing.draw(logits[step], at).read()
            for number, i in enumerate(step):
                found[i] = sampled.token_ids[number], sampled.logprobs[number] if sampled.logprobs else None
        return found

    # Allowed are multiples of odd numbers, so that a mask of another row, or shifted by a word, is another.
    masks = {i: packed_mask(range(i % 3, VOCAB_SIZE, 3 + 2 * (i % 5)), VOCAB_SIZE) for i in (*first, *third)}
    masks[third[1]] = packed_mask([], VOCAB_SIZE)
    wrong = None
    for own, how in (({}, "drawn"), (masks, "masked")):
        expected = run(TorchSampler, first, second, third, masks=own)
        drafts = [NO_TOKEN if i % 3 == 2 else expected[i][0] for i in every]
        for steps, given, more in (
            ((first, second, third), None, ""),
            ((first, second, second, third), None, " again"),
            ((every,), drafts, " behind drafts"),
        ):
            wrong = wrong or _other_draws(run(sampler, *steps, drafts=given, masks=own), expected, how + more)
    return wrong


def _other_draws(got: list[tuple[int, Any]], expected: list[tuple[int, Any]], how: str) -> str | None:
    for i, ((token_id, logprobs), (right, right_logprobs)) in enumerate(zip(got, expected, strict=True)):
        what = f"step {i % 3} of way {i // 3} of sampling, {how},"
        if token_id != right:
            return f"{what} gives token {token_id} in the place of {right}"
        if (logprobs is None) != (right_logprobs is None):
            return f"{what} gives log probabilities where there are none, or none where there are"
        if logprobs is not None:
            if logprobs[1] != right_logprobs[1]:
                return f"{what} finds other tokens most likely"
            values, right_values = ([own[0], *own[2]] for own in (logprobs, right_logprobs))
            if not torch.allclose(torch.tensor(values), torch.tensor(right_values), rtol=0, atol=1e-4):
                return f"{what} gives other log probabilities"
    return None
