"""What a device must be able to do, and the one that runs a model.

Everything here is called from the device's thread, but for `Flight`. A device knows plans, not requests;
`novainfer.kernels` knows tensors. This is the only file of the actors that touches the kernels, and it loads what of
them needs torch (and torch) on first use.
"""

from __future__ import annotations

import gc
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from novainfer.actors.device.location import ModelLocation
from novainfer.actors.device.pooling_defaults import pooling_defaults
from novainfer.actors.device.sampling_defaults import sampling_defaults
from novainfer.fsm.messages.errors import NovaInferError
from novainfer.fsm.messages.mode import AUTO, CHECKPOINT, Mode
from novainfer.fsm.messages.step import StepDone, StepMasks, StepPlan
from novainfer.kernels.heap import keep_for_steps, keep_little, release_freed_pages

if TYPE_CHECKING:
    from novainfer.kernels.runtime.flight import Flight as KernelFlight
    from novainfer.kernels.runtime.runner import ModelRunner

logger = logging.getLogger(__name__)


class Flight(Protocol):
    """A step that the device computes beside its host; called from the thread that waits for steps, in this order."""

    def wait(self) -> None:
        """Block until it has ended; raises what `Device.run` raises, and perhaps for the step behind it."""

    def done(self) -> StepDone:
        """What it gave, in memory that is its own until then."""


class Device(Protocol):
    """One device with one model; calls come one at a time, from one thread."""

    def load(self, precision: str | None = None) -> dict[str, Any]:
        """Read the weights; gives at least `max_model_len`, `vocab_size` and `eos_token_ids`.

        In this precision, if it is given, and then the first of the `modes` that it gives is in it. May be called
        again: what was loaded before goes first, and with it the KV cache and what the host holds of it.
        """

    def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
        """Allocate the KV cache, of `num_blocks` if that is given; gives `num_blocks` and `num_host_blocks`.

        May be called again: what the host holds stays. `is_new`: there was none of this size before, and it is refused
        where there is no room for it; otherwise one was in use a moment ago, and memory is short for that reason only.
        """

    def warm(self, *, measures: bool = True) -> dict[str, Any] | None:
        """Run the kernels once, so that the first request finds them ready; may give `step_costs`, if it `measures`.

        And `num_blocks`, where there was no memory for that beside as many as `fit` has given.
        """

    def run(self, plan: StepPlan) -> StepDone | Flight:
        """Compute one step, or have it computed: beside a `Flight` the next step may be begun, and nothing else.

        Raises MemoryError when memory was short, anything else when it failed.
        """

    def give(self, masks: StepMasks) -> None:
        """Masks for a step that is computed, or will be; from any thread, and at any time."""

    def switch(self, mode: Mode) -> None:
        """Compute in `mode` from the next step on; raises when it cannot, and then computes as before."""

    def reclaim(self) -> None:
        """Give back what a step left behind that ran out of memory."""

    def close(self) -> None:
        """Free everything."""

    def is_usable(self) -> bool:
        """False when nothing can be computed any more, whatever is asked: only a new process helps then.

        Waits for the device; the thread that waits for steps may ask as well.
        """


def sentence_of(error: BaseException) -> str:
    """What to tell of `error`: its own words, after its kind where they do not stand alone."""
    text = str(error).strip().split("\n")[0]
    if isinstance(error, NovaInferError) or type(error).__module__.startswith("novainfer."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# What a start says that has run out of memory: the words of Python, of C++ and of the loader of libraries; and of a
# process that died, which cannot always say why (the loader ends it with 127, C++ with SIGABRT).
OF_MEMORY = ("memory", "map segment", "bad_alloc", "importerror", "device's process")


def with_limit(message: str) -> str:
    """`message` of a start that failed; and, where it may be to blame, that the address space is limited."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or not any(word in message.lower() for word in OF_MEMORY):
        return message
    mib = limit // 2**20
    return f"{message}; this is likely for want of memory: the address space is limited to {mib:,} MiB (ulimit -v)"


FEWER_EIGHTHS = (7, 6, 4)  # of the blocks before: each time twice as much is given back


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `ModelDevice` needs to know; see `EngineConfig` for meanings and units."""

    location: ModelLocation
    device: str
    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_capacity_mode: Literal["auto", "fixed"]
    kv_cache_memory_utilization: float
    num_kv_blocks: int | None
    num_threads: int | None
    native: str | None
    batch_invariant: bool
    swap_space_gib: float = 0.0
    gpu_memory_utilization: float = 0.9
    memory_share: float = 1.0
    enforce_eager: bool = False
    generation_config: Literal["auto", "none"] = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = AUTO
    attention_backend: str = AUTO
    weight_cache_dir: str | None = None
    draft: ModelLocation | None = None  # the model that proposes drafts
    num_speculative_tokens: int = 0


class ModelDevice:
    """A model of `novainfer.kernels` on a CPU or a CUDA device."""

    def __init__(
        self,
        settings: ModelSettings,
        on_progress: Callable[[int, int], None] | None = None,
        weights_fd: int | None = None,
    ) -> None:
        """`weights_fd` is a memfd in which processes share their packed weights."""
        self._settings = settings
        self._on_progress = on_progress
        self._weights_fd = weights_fd
        self._runner: ModelRunner | None = None
        self._step_costs: dict[str, list[tuple[int, float]]] = {}  # by precision: measured once for each
        self._may_fit_less = False  # the number of blocks is nobody's wish

    def load(self, precision: str | None = None) -> dict[str, Any]:
        """Import torch and the kernels, and read the weights."""
        from novainfer.kernels.runtime.runner import ModelRunner
        from novainfer.kernels.threads import threads_in_use

        s = self._settings
        if s.device == "cpu":
            keep_little()
        if self._runner is not None:
            self.close()
            self.reclaim()
            release_freed_pages()
        quantization = {None: s.quantization, CHECKPOINT: None}.get(precision, precision)
        folder = s.location.path()
        defaults = sampling_defaults(folder) if s.generation_config == "auto" else {}
        pooling = pooling_defaults(folder)
        self._runner = ModelRunner.load(
            folder,
            device=s.device,
            dtype=s.dtype,
            quantization=quantization,
            kv_cache_dtype=s.kv_cache_dtype,
            attention_backend=s.attention_backend,
            draft_dir=s.draft.path() if s.draft is not None else None,
            num_speculative_tokens=s.num_speculative_tokens,
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.max_num_batched_tokens,
            max_model_len=s.max_model_len,
            block_size=s.block_size,
            num_threads=s.num_threads,
            native=s.native,
            batch_invariant=s.batch_invariant,
            enforce_eager=s.enforce_eager,
            weights_fd=self._weights_fd,
            weight_cache_dir=Path(s.weight_cache_dir) if s.weight_cache_dir is not None else None,
            on_progress=self._on_progress,
        )
        info = self._runner.info
        return {
            "architecture": info.architecture,
            "dtype": str(info.dtype).removeprefix("torch."),
            "precision": info.precision,
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "eos_token_ids": list(info.eos_token_ids),
            "weight_bytes": info.weight_bytes,
            "kv_bytes_per_block": info.kv_bytes_per_block,
            "row_invariant": info.row_invariant,
            "sampling_defaults": defaults,
            "hidden_size": info.hidden_size,
            "pooling": msgspec.structs.asdict(pooling),
            "kernels": info.kernels,
            "failed_kernels": info.failed_kernels,
            "modes": [msgspec.structs.asdict(mode) for mode in info.modes],
            "weights": info.weights,
            "num_threads": threads_in_use() if s.device == "cpu" else 0,
            "kv_is_lazy": s.device == "cpu",  # its memory is taken when it is first written
        }

    def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
        """Allocate the KV cache."""
        s = self._settings
        self._may_fit_less = s.kv_cache_capacity_mode == "auto" and not is_new
        num_blocks = self._model.fit(
            again=num_blocks is not None and not is_new,
            mode="fixed" if num_blocks is not None else s.kv_cache_capacity_mode,
            num_blocks=num_blocks if num_blocks is not None else s.num_kv_blocks,
            memory_utilization=s.gpu_memory_utilization if s.device == "cuda" else s.kv_cache_memory_utilization,
            memory_share=s.memory_share,
            swap_space_bytes=int(s.swap_space_gib * 1024**3),
        )
        return self._fitted(num_blocks)

    def _fitted(self, num_blocks: int) -> dict[str, Any]:
        found = {"num_blocks": num_blocks, "num_host_blocks": self._model.num_host_blocks}
        return found if self._model.memory is None else found | {"memory": asdict(self._model.memory)}

    def warm(self, *, measures: bool = True) -> dict[str, Any]:
        """A small prefill and a decode step; and what steps cost by their tokens, if it `measures` them.

        On the CPU what the start alone needed is given back to the system.

        Where they, or CUDA graphs, find no memory beside a cache that was fitted to what is there, it is fitted again
        with less, three times at most: then the answer gives the number of blocks, too.
        """
        from novainfer.kernels.memory import release_library_pages

        found: dict[str, Any] = {}
        for eighths in FEWER_EIGHTHS:
            try:
                self._model.warm()
                break
            except Exception as error:
                found = self._fit_less(eighths, error)
        else:
            self._model.warm()
        if measures:
            found |= self._measured()
        if self._settings.device == "cpu":
            release_freed_pages()
            release_library_pages()
            keep_for_steps()
        return found

    def _fit_less(self, eighths: int, error: Exception) -> dict[str, Any]:
        from novainfer.kernels.memory import is_out_of_memory

        if not (self._may_fit_less and is_out_of_memory(error)):
            raise error
        before = self._model.num_blocks
        error.__traceback__ = None  # it would keep what the step had allocated
        self.reclaim()
        num_blocks = self._model.fit(
            again=True,
            mode="fixed",
            num_blocks=before * eighths // 8,
            swap_space_bytes=int(self._settings.swap_space_gib * 1024**3),
        )
        logger.warning("%d KV blocks left no memory for a step (%s); %d are there now", before, error, num_blocks)
        return self._fitted(num_blocks)

    def _measured(self) -> dict[str, Any]:
        precision = self._model.info.precision  # that is all they depend on: not on the KV cache
        if precision not in self._step_costs:
            self._step_costs[precision] = self._model.measure_step_costs()
        return {"step_costs": self._step_costs[precision]}

    def run(self, plan: StepPlan) -> StepDone | Flight:
        """One step; the allocators' out-of-memory errors become MemoryError."""
        with _memory_errors():
            flight = self._model.launch(plan)
            if not flight.is_through:
                return _ModelFlight(flight)
            return msgspec.structs.replace(flight.done(), sample_s=self._model.sample_s)

    def give(self, masks: StepMasks) -> None:
        """What is given before the model is there, or when it goes, is for no step."""
        if (runner := self._runner) is not None:
            runner.give(masks)

    def switch(self, mode: Mode) -> None:
        """Other kernels, or weights in another precision (kernels/runtime/modes.py)."""
        self._model.switch(mode)

    def reclaim(self) -> None:
        """Collect garbage, and on CUDA return cached segments to the driver."""
        import torch

        gc.collect(1)  # what the step left is young; all generations take a third of a second, with torch loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free weights and KV cache."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def is_usable(self) -> bool:
        """False once a CUDA context is poisoned: after an illegal access every call fails, to the process's end.

        And where the capture of a graph was broken off so that torch could not end it (before torch 2.12): its
        allocator then gives nothing back any more, and asserts whenever it is asked to.
        """
        if self._settings.device != "cuda":
            return True
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return True  # there is no context; where none can be had, the load says so
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True

    @property
    def _model(self) -> ModelRunner:
        assert self._runner is not None, "load comes first"
        return self._runner


class _ModelFlight:
    def __init__(self, flight: KernelFlight) -> None:
        self._flight = flight

    def wait(self) -> None:
        with _memory_errors():
            self._flight.wait()

    def done(self) -> StepDone:
        return self._flight.done()


@contextmanager
def _memory_errors() -> Iterator[None]:
    """What the allocators raise becomes MemoryError."""
    try:
        yield
    except Exception as error:
        from novainfer.kernels.memory import is_out_of_memory

        if is_out_of_memory(error) and not isinstance(error, MemoryError):
            raise MemoryError(str(error)) from error
        raise
