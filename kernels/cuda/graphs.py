"""Decode steps as CUDA graphs: one launch a step instead of some two hundred, for batches of a few sizes.

A graph holds addresses, so whatever a step brings must lie where it lay when the graph was captured: the step's arrays
do (`StepBuffers`, padded to a bucket), and the embeddings are copied to a buffer of their own. Rows that pad a batch
change nothing: they have no slot to write to, and no context to look at.

All graphs share one memory pool, and the largest is captured first: the others then fit into what it has left. What
one graph gives is read before another one is replayed, since all of it is work of one stream.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from novainfer.kernels.cuda.attention import TritonAttention
from novainfer.kernels.cuda.forward import TritonBiasForward, TritonForward
from novainfer.kernels.errors import LoadError
from novainfer.kernels.memory import is_out_of_memory
from novainfer.kernels.ops.forward import DecoderKind, DecoderParts
from novainfer.kernels.ops.selftest.numbers import deviation
from novainfer.kernels.step import StepTensors

__all__ = ["CudaGraphs", "GraphBiasForward", "GraphForward", "Graphs", "buckets_for"]

logger = logging.getLogger(__name__)


def buckets_for(max_num_seqs: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, then each multiple of 8 up to 256, of 16 up to 512, and the largest."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    largest = min(max_num_seqs, sizes[-1])
    return [*(size for size in sizes if size < largest), largest]


class Graphs(Protocol):
    """What captures: CUDA, or a test's stand-in."""

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record what `compute` launches; gives what launches all of it again, and the tensor that it then fills."""


class CudaGraphs:
    """torch's CUDA graphs, in one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """On the stream that torch captures on: cuBLAS keeps a workspace for each stream that was ever current.

        Other threads may go on with CUDA meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        # Of our own around torch's: where a capture cannot be ended, torch leaves its stream the current one.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            out = compute()
        return graph.replay, out


@dataclass(frozen=True, slots=True)
class _Captured:
    replay: Callable[[], None]
    out: Tensor  # [bucket, hidden_size]


class GraphForward:
    """`TritonForward`, which replays what it has captured: `capture` comes when the KV cache is there."""

    name: ClassVar[str] = "triton-graphs"
    row_invariant: ClassVar[bool] = TritonForward.row_invariant
    inner: ClassVar[type[TritonForward]] = TritonForward  # what is captured

    def __init__(self, parts: DecoderParts) -> None:
        self._inner = self.inner.over(parts)
        self._parts = parts
        self._hidden: Tensor | None = None  # [largest bucket, hidden_size]
        self._captured: dict[int, _Captured] = {}
        self.buckets: list[int] = []  # ascending

    @classmethod
    def refuses(cls, kind: DecoderKind) -> str | None:
        """As what is captured; and attention must be Triton's: others read on the host what a step brings."""
        if not issubclass(kind.attention, TritonAttention):
            return f"attention by {kind.attention.name} cannot be captured"
        if any(layer.has_experts for layer in kind.layers):
            return "which experts rows are given to is read on the host"
        return cls.inner.refuses(kind)

    @classmethod
    def over(cls, parts: DecoderParts) -> Self:
        """Over parts of a kind that was not refused; there are no graphs yet."""
        return cls(parts)

    def bucket(self, num_rows: int) -> int:
        """The rows that a decode batch of `num_rows` is to be padded to; 0 where it is too large for any graph."""
        at = bisect_left(self.buckets, num_rows)
        return self.buckets[at] if at < len(self.buckets) else 0

    def make_graphs(self) -> Graphs:
        """What captures."""
        return CudaGraphs()

    def capture(self, max_num_rows: int, blank: Callable[[int], StepTensors]) -> None:
        """As `GraphedForward.capture`; the graphs are proved to give what they were captured from."""
        began_s = time.monotonic()
        self.forget()
        try:
            self._capture(buckets_for(max_num_rows), blank, self.make_graphs())
        except BaseException as error:
            self.forget()
            if is_out_of_memory(error) or not isinstance(error, Exception):
                raise
            raise LoadError(
                f"decode steps cannot be captured as CUDA graphs: {error}; --enforce-eager does without"
            ) from error
        logger.info("captured %d CUDA graphs in %.1f s", len(self.buckets), time.monotonic() - began_s)

    def forget(self) -> None:
        """Let all graphs and their memory go."""
        self.buckets = []
        self._captured.clear()
        self._hidden = None

    def _capture(self, buckets: list[int], blank: Callable[[int], StepTensors], graphs: Graphs) -> None:
        like = self._parts.final_norm
        # Not the device's own generator: a capture that fails leaves that one waiting for its end.
        chance = torch.Generator(like.device).manual_seed(0)
        hidden = self._hidden = torch.zeros(buckets[-1], len(like), dtype=like.dtype, device=like.device)
        for bucket in reversed(buckets):
            # Each row is sampled; and of any context, so that nothing is captured for short ones only.
            step, rows = dataclasses.replace(blank(bucket), num_samples=bucket), hidden[:bucket]

            def compute(step: StepTensors = step, rows: Tensor = rows) -> Tensor:
                out = self._inner(rows, step)
                assert out is not None, "a decode step samples every row"
                return out

            kept = rows.normal_(generator=chance).clone()
            expected = compute().clone()  # and what is compiled or chosen at first use is, before the capture
            rows.copy_(kept)
            replay, out = graphs.capture(compute)
            self._captured[bucket] = _Captured(replay, out)
            rows.copy_(kept)
            replay()
            wrong = deviation(out, expected)
            if wrong is not None:
                raise RuntimeError(f"the CUDA graph of {bucket} rows is not what was captured: {wrong}")
        self.buckets = buckets

    def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        """[num_tokens, hidden_size] (overwritten) -> [num_samples, hidden_size], or None without samples.

        What a graph gives is overwritten by the next step.
        """
        captured = self._captured.get(step.bucket)
        if captured is None or self._hidden is None or step.num_samples == 0:
            return self._inner(hidden, step)
        self._hidden[: len(hidden)].copy_(hidden)
        captured.replay()
        if step.logit_rows is None:
            return captured.out[: step.num_samples]
        return captured.out.index_select(0, step.logit_rows)


class GraphBiasForward(GraphForward):
    """The same of `TritonBiasForward`."""

    name: ClassVar[str] = "triton-graphs-bias"
    row_invariant: ClassVar[bool] = TritonBiasForward.row_invariant
    inner: ClassVar[type[TritonForward]] = TritonBiasForward
