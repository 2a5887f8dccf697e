"""Which implementation of an operation runs here: fastest first, each proved against the torch reference
before use.

There are five operations. Each is a small class, so that an implementation may keep packed weights or
buffers:

- `linear`: one weight matrix, packed at load, applied to rows of activations (`Linear`); each implementation keeps
  weights in one precision (kernels/ops/precision.py), and below the checkpoint's is filled part by part
  (`QuantisedLinear`)
- `attention`: the paged KV cache and attention over it (`AttentionBackend`)
- `ops`: the small row-wise operations between them (`RowOps`)
- `forward`: all of these over all layers of a decoder (`Forward`, kernels/ops/forward.py), proved against one by one
- `sampler`: how each slot samples, and the draw from logits (`Sampler`)

An implementation declares what it can do with `refuses(...)`: None, or the reason why not.
`Registry.select` takes the first one that does not refuse and passes its self-test (kernels/ops/selftest);
one that fails is skipped with one log line. `row_invariant` promises that a row's result has the same bits
whatever other rows are computed beside it, and whether it is a row of a prefill, of a chunk or of a decode
step: the order of every reduction depends on the row alone.

A family of native kernels is one module with `implementations() -> list[tuple[Operation, type]]`, fastest
first, which builds or loads its library and raises `KernelUnavailableError` with the reason when it cannot
(`novainfer.kernels.cpu.native`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self, get_args, runtime_checkable

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import AUTO
from novainfer.fsm.messages.step import SeqParams
from novainfer.kernels.errors import LoadError
from novainfer.kernels.sampling.drawn import Draw
from novainfer.kernels.sampling.verify import Positions
from novainfer.kernels.step import StepTensors

__all__ = [
    "AttentionBackend",
    "AttentionShape",
    "Linear",
    "Operation",
    "QuantisedLinear",
    "Registry",
    "RowOps",
    "Sampler",
    "SharedLinear",
]

logger = logging.getLogger(__name__)

Operation = Literal["linear", "attention", "ops", "forward", "sampler"]


class Linear(Protocol):
    """`y = x @ weight.T + bias` with the weight in whatever layout is fastest to read."""

    name: ClassVar[str]
    precision: ClassVar[str]  # in which its weight is kept: one of `fsm.messages.mode.PRECISIONS`
    row_invariant: ClassVar[bool]
    gathers_rows: ClassVar[bool]  # whether `rows` costs what it gives: an embedding tied to the output head needs it
    out_features: int  # N
    in_features: int  # K
    weight_bytes: int  # bytes this object keeps, padding and bias included
    bias: Tensor | None  # [N], as it was given or in fp32

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when a weight [out_features, in_features] can be packed; else the reason."""

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Take weight [N, K] and bias [N] (contiguous, one dtype) into the packed layout.

        The caller gives both up: what is packed into a layout of its own holds no reference to `weight`
        afterwards.
        """

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N], same dtype, M >= 1. Rows of `x` may lie apart (`stride(0) >= K`)."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as it is kept: int64 [n] -> [n, K]; in the checkpoint's precision bit for bit as given.

        Where the kernel does not gather rows, the whole weight is unpacked for it.
        """


@runtime_checkable
class SharedLinear(Linear, Protocol):
    """A linear that can work on what another process has packed; those whose layout is opaque lack this."""

    @classmethod
    def shared_layout(cls) -> str:
        """A name for how `tensors` lie in memory, version included: only the same can be taken over."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that it keeps."""

    @classmethod
    def over(cls, out_features: int, in_features: int, dtype: torch.dtype, tensors: list[Tensor]) -> Self:
        """On the tensors of another one, which are not written to."""


class QuantisedLinear(Linear, Protocol):
    """A linear whose weight is rounded as its precision says; `rows` gives what is left of it.

    It is filled part by part, so that the full weight need not lie beside it in one piece.
    """

    rounds_activations: ClassVar[bool]  # whether it rounds each row it is given as a row of its weight

    @classmethod
    def empty(
        cls, out_features: int, in_features: int, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Room for a weight [out_features, in_features]."""

    def put(self, first: int, rows: Tensor) -> None:
        """Quantise rows [n, K] as rows `first` on; `first` is a multiple of `kernels.ops.quantised.PART_ROWS`."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The geometry of one model's attention, the same in all layers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per block
    kv_dtype: str = AUTO  # how keys and values lie in it: one of `KV_CACHE_DTYPES` (kernels/ops/kv_cache.py)


class AttentionBackend(Protocol):
    """The KV cache of all layers in blocks of `block_size` tokens, and causal attention over block tables.

    Token t of a sequence lives in block `block_tables[seq, t // block_size]` at offset `t % block_size`;
    its slot is `block * block_size + offset`. In each layer `write` is called for all rows of the step
    before `attend`: sequences of one step may share blocks, and one may read what another wrote in this
    very step.
    """

    name: ClassVar[str]
    row_invariant: ClassVar[bool]
    layout: ClassVar[str]  # how a block lies in memory: backends of one layout can compute on each other's caches
    shape: AttentionShape
    parts: tuple[Tensor, ...]  # the cache's memory, each part [num_layers, num_blocks, ...]: to copy blocks whole

    @classmethod
    def refuses(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when this geometry can be served; else the reason."""

    @classmethod
    def bytes_per_block(cls, shape: AttentionShape, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values, padding included."""

    @classmethod
    def allocate(cls, shape: AttentionShape, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Allocate the cache once, block ids 0 to `num_blocks - 1`; raises what the allocator raises."""

    @classmethod
    def over(cls, shape: AttentionShape, parts: tuple[Tensor, ...]) -> Self:
        """Compute on the cache that another backend of the same layout has allocated."""

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store key and value [T, num_kv_heads, head_dim] at slot_mapping (int64 [T], distinct slots).

        The inner two dimensions are contiguous; rows may lie apart (they are parts of a fused QKV row).
        """

    def attend(self, layer: int, query: Tensor, step: StepTensors, scale: float, window: int | None = None) -> Tensor:
        """Causal attention of each sequence's last tokens over its whole context -> [T, num_heads * head_dim].

        query [T, num_heads, head_dim]: rows may lie apart. Of `step`: block_tables int32 [S, max_blocks], only the
        blocks of a sequence's context are valid, the rest is arbitrary; rows may lie apart. query_start int32
        [S + 1]: sequence s owns query rows `query_start[s]:query_start[s + 1]`, at least one. context_lens int32
        [S]: tokens in the cache including those rows, so row i of a sequence of q rows sees positions
        `<= context_len - q + i`, with a `window` the last so many of them only. max_context_len bounds them, and
        min_query_len and max_query_len their rows, so that no device value need be read on the host. Query head h
        reads key head `h // (num_heads // num_kv_heads)`. Layers come in order in each step: what depends on the step
        alone, or on the step and a window, may be prepared once and kept until layer 0 comes again.
        """


class RowOps(Protocol):
    """The small operations between matrix products; each row is computed by itself."""

    name: ClassVar[str]
    row_invariant: ClassVar[bool]

    @classmethod
    def refuses(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when rows of this dtype can be computed on this device; else the reason."""

    @staticmethod
    def embed(weight: Tensor, ids: Tensor, token_pool: Tensor | None) -> Tensor:
        """Rows of weight [V, K] by ids int64 [T] -> new [T, K].

        An id `-1 - slot` is the token that `token_pool` int64 [max_num_seqs] holds for the slot, and 0 where that is
        `NO_TOKEN`; without a pool there are none such.
        """

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[M, K], [K] -> new [M, K]: `x / sqrt(mean(x**2) + eps) * weight`, the mean in fp32."""

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place (rounded to the dtype), then `rms_norm(residual)` -> new [M, K]."""

    @staticmethod
    def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        """`rms_norm` of each query head with `q_norm` and of each key head with `k_norm` [head_dim], in place.

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, then values, which stay. Each head is
        rounded to the dtype as `rms_norm` rounds a row.
        """

    @staticmethod
    def rope(qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_rotated: int, head_dim: int) -> None:
        """Rotate the first `num_rotated` heads (queries, then keys) of each row of qkv [T, heads *
        head_dim] in place.

        cos_sin fp32 [max_positions, head_dim]: cosines of the head_dim / 2 angles, then their sines.
        positions int64 [T]. The two halves of a head are paired ("rotate_half", not interleaved): `lo' = lo
        * cos - hi * sin; hi' = hi * cos + lo * sin`.
        """

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        """[M, 2 * I] (gate, then up) -> new [M, I]: `silu(gate) * up`."""

    @staticmethod
    def choose_experts(logits: Tensor, num_active: int, *, normalises: bool) -> tuple[Tensor, Tensor]:
        """What a router's product [M, E] says: each row's experts int64 [M, num_active], and their weights likewise.

        Weights are probabilities (softmax in fp32) of the likeliest, in falling order, of equals the lower number
        first; they are divided by their sum if it `normalises`, and then rounded to the dtype. A row that holds a NaN
        has experts that are there, and weights that are NaN.
        """

    @staticmethod
    def mix_experts(
        outputs: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """The sum of what experts gave for each row -> new [M, K].

        outputs [M * A, K]; `places` int64 [M, A] says which of them are a row's, `weights` [M, A] how much of each is
        added. A shared expert's [M, K] is added times the sigmoid of `gate` [M, 1]; both are there or neither. Added
        in fp32 in this order, and rounded once.
        """


class BlockMover(Protocol):
    """Moves blocks of one cache of parts [num_layers, num_blocks, ...] (`AttentionBackend.parts`), bit for bit.

    A block of all parts and layers is a record: `record_bytes` that lie together. What is asked for is done in order
    with all else on the stream, and nothing is allocated for it.
    """

    record_bytes: int
    blocks_max: int  # that `gather` and `scatter` move at once

    def gather(self, blocks: Sequence[int], records: Tensor) -> None:
        """Block `blocks[i]` of all parts to `records[i]`, uint8 [at most `blocks_max`, record_bytes] on the device."""

    def scatter(self, records: Tensor, blocks: Sequence[int]) -> None:
        """`records[i]` to block `blocks[i]` of all parts; the blocks are distinct."""

    def copy(self, sources: Sequence[int], blocks: Sequence[int]) -> None:
        """Block `sources[i]` to block `blocks[i]`; none is in both, nor twice among `blocks`."""


class Sampler(Protocol):
    """How the sequence in each slot samples, and one token a row of logits (kernels/sampling/sampler.py says how).

    What is drawn depends on a row's logits, its sequence's parameters, its tokens so far and its position alone, so a
    position that is drawn from again, with the same logits, gives the same token. A slot to which nothing was admitted
    is greedy.
    """

    name: ClassVar[str]
    row_invariant: ClassVar[bool]
    rows_max: int  # rows of logits that should exist at once, for their memory
    scratch_bytes: int  # of the device's memory that draws may take over time, beside the logits

    @classmethod
    def refuses(cls, vocab_size: int, device: torch.device) -> str | None:
        """None when tokens of such a vocabulary can be drawn on this device; else the reason."""

    @classmethod
    def over(cls, vocab_size: int, max_num_seqs: int, max_model_len: int, device: torch.device) -> Self:
        """A sampler of slots 0 to `max_num_seqs - 1`, each for a sequence of at most `max_model_len` tokens."""

    def admit(self, row: SeqParams) -> None:
        """A sequence takes a slot: how it samples and, where penalties need them, its tokens so far.

        Steps that were drawn before are not disturbed, also where the device has not come to them yet. Raises
        ValueError for a slot or a token that is not there.
        """

    def draw(self, logits: Tensor, at: Positions) -> Draw:
        """Have one token a row drawn; `NO_TOKEN` where the logits hold a NaN or an infinity above all others.

        A row with a mask (`at.masks`) is drawn, and its log probabilities are, as if the logits of all tokens that it
        forbids were minus infinity; `NONE_ALLOWED` where no token is left that its sequence may be given. What is
        banned counts for log probabilities: where they are asked for, a NaN there makes the row `NO_TOKEN`.

        logits [n, vocab_size] in the model's dtype, rows contiguous (may be overwritten); `at` [n]: whose rows they are
        and where the drawn tokens will stand. Where there are drafts, the row behind one is the sequence's next
        position, drawn as if the draft were its token; behind a draft that was not drawn itself it is of no use, and
        may be left out, as `NO_TOKEN`. On a device that runs beside the host nothing is waited for.
        """


@dataclass(slots=True)
class Registry:
    """Implementations in order of preference; `select` proves one before it is used.

    `require` names an implementation prefix that must be taken wherever it is registered
    (`NOVAINFER_NATIVE=require`).
    """

    batch_invariant: bool = False
    require: str | None = None
    _entries: dict[Operation, list[type[Any]]] = field(
        default_factory=lambda: {operation: [] for operation in get_args(Operation)}
    )
    _proved: dict[tuple[type[Any], object], str | None] = field(default_factory=dict)
    # Operation and name of the kernels that failed their self-test -> why: they can run here, and must not.
    failed: dict[str, str] = field(default_factory=dict)

    def register(self, operation: Operation, implementation: type[Any]) -> None:
        """Add an implementation behind those that are there; register the fastest first. One that is there stays."""
        if implementation not in self._entries[operation]:
            self._entries[operation].append(implementation)

    def has(self, prefix: str) -> bool:
        """Whether there is an implementation whose name begins so."""
        return any(kernel.name.startswith(prefix) for kernels in self._entries.values() for kernel in kernels)

    def without(self, prefix: str, only: Operation | None = None) -> Registry:
        """The same without the implementations (of the operation `only`) whose names begin so, nor `require`."""
        entries = {
            operation: [k for k in kernels if not k.name.startswith(prefix) or only not in (None, operation)]
            for operation, kernels in self._entries.items()
        }
        return Registry(self.batch_invariant, None, entries, self._proved, self.failed)

    def implementations(self, operation: Operation, precision: str | None = None) -> tuple[type[Any], ...]:
        """All implementations of an operation, fastest first, proved or not; of linears, those of one precision."""
        found = self._entries[operation]
        return tuple(kernel for kernel in found if precision is None or kernel.precision == precision)

    def select(
        self,
        operation: Operation,
        refuses: Callable[[Any], str | None],
        selftest: Callable[[Any], str | None],
        key: object,
        precision: str | None = None,
    ) -> Any:
        """The first implementation (of linears, in `precision`) that can do it here; raises `LoadError` without one.

        `refuses(implementation)` is asked first, then `selftest(implementation)`: both give None or a
        reason. A self-test runs once per (implementation, key).
        """
        reasons: list[str] = []
        required: str | None = None  # why the first of those that are required cannot be used
        for implementation in self.implementations(operation, precision):
            name = implementation.name
            is_required = self.require is not None and name.startswith(self.require)
            if required is not None and not is_required:
                continue
            reason = refuses(implementation)
            if reason is None and self.batch_invariant and not implementation.row_invariant:
                reason = "not row-invariant"
            if reason is None:
                reason = self._prove(implementation, selftest, key)
                if reason is not None:
                    self.failed[f"{operation} {name}"] = reason
            if reason is None:
                return implementation
            if is_required:
                required = required or f"{name} cannot be used: {reason}"
            reasons.append(f"{name}: {reason}")
        if required is not None:
            raise LoadError(f"the required {operation} kernel {required}")
        wanted = "row-invariant " if self.batch_invariant else ""
        raise LoadError(f"no {wanted}{operation} kernel can be used here ({'; '.join(reasons) or 'none registered'})")

    def _prove(self, implementation: type[Any], selftest: Callable[[Any], str | None], key: object) -> str | None:
        proof = (implementation, key)
        if proof not in self._proved:
            try:
                self._proved[proof] = selftest(implementation)
            except Exception as error:  # a kernel that raises is as unusable as one that is wrong
                self._proved[proof] = f"{type(error).__name__}: {error}"
            if self._proved[proof] is not None:
                logger.warning("kernel %s skipped: self-test failed: %s", implementation.name, self._proved[proof])
        return self._proved[proof]
