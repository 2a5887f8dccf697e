"""The worker's device side: what a device must be able to do, and the one that runs a model.

Everything here is called from the device's thread. A device knows plans, not requests; `novainfer.kernels` knows
tensors. This is the only file of the actors that touches the kernels, and it loads them (and torch) on first use.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from novainfer.actors.device.location import ModelLocation
from novainfer.actors.device.sampling_defaults import sampling_defaults
from novainfer.fsm.messages.errors import NovaInferError
from novainfer.fsm.messages.events import (
    Close,
    Fault,
    Fit,
    JobDone,
    JobFailed,
    Load,
    Reclaim,
    Run,
    Spawn,
    StepFailed,
    Switch,
    Warm,
)
from novainfer.fsm.messages.mode import CHECKPOINT, Mode
from novainfer.fsm.messages.step import StepDone, StepPlan

if TYPE_CHECKING:
    from novainfer.kernels.runtime.runner import ModelRunner


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

    def warm(self) -> dict[str, Any] | None:
        """Run the kernels once, so that the first request finds them ready; may give `step_costs`."""

    def run(self, plan: StepPlan) -> StepDone:
        """Compute one step; raises MemoryError when memory was short, anything else when it failed."""

    def switch(self, mode: Mode) -> None:
        """Compute in `mode` from the next step on; raises when it cannot, and then computes as before."""

    def reclaim(self) -> None:
        """Give back what a step left behind that ran out of memory."""

    def close(self) -> None:
        """Free everything."""

    def is_usable(self) -> bool:
        """False when nothing can be computed any more, whatever is asked: only a new process helps then."""


class Jobs:
    """The device's work, one job after the other; the thread that calls `do` is the device's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last_step = 0  # its id, if it has ended well; 0 where none has
        self._ended_s = 0.0  # and when

    def do(self, job: Any) -> Any:
        """One job, and the event that says how it went; a step is begun if the one that it follows has ended well."""
        if type(job) is Run:
            answer = self._run(job.plan)
            self._last_step = job.plan.step_id if type(answer) is StepDone else 0
            return answer
        name = type(job).__name__
        try:
            return JobDone(name, _OTHER_JOBS[type(job)](self._device, job), job.epoch)
        except Exception as error:
            return JobFailed(name, sentence_of(error), job.epoch)

    def forget(self) -> None:
        """The last step has not ended well after all: the worker was told that it failed."""
        self._last_step = 0

    def _run(self, plan: StepPlan) -> StepDone | StepFailed:
        if plan.after not in (0, self._last_step):
            why = f"step {plan.after}, which it follows, did not end well just before it"
            return StepFailed(plan.step_id, plan.epoch, Fault.EXCEPTION, why, launched=False)
        began_s = time.monotonic()
        try:
            done = self._device.run(plan)
            before_s, self._ended_s = self._ended_s, time.monotonic()
            cycle_s = self._ended_s - before_s if self._last_step else 0.0
            return msgspec.structs.replace(done, took_s=self._ended_s - began_s, cycle_s=cycle_s)
        except MemoryError as error:
            return StepFailed(plan.step_id, plan.epoch, Fault.OOM, sentence_of(error))
        except Exception as error:
            return StepFailed(plan.step_id, plan.epoch, Fault.EXCEPTION, sentence_of(error))


_OTHER_JOBS: dict[type, Callable[[Device, Any], Any]] = {
    Spawn: lambda device, job: None,  # the device is here already
    Load: lambda device, job: device.load(job.precision),
    Fit: lambda device, job: device.fit(job.num_blocks, is_new=job.is_new),
    Warm: lambda device, job: device.warm(),
    Switch: lambda device, job: device.switch(job.mode),
    Reclaim: lambda device, job: device.reclaim(),
    Close: lambda device, job: device.close(),
}


def sentence_of(error: BaseException) -> str:
    """What to tell of `error`: its own words, after its kind where they do not stand alone."""
    text = str(error).strip().split("\n")[0]
    if isinstance(error, NovaInferError) or type(error).__module__.startswith("novainfer."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# What a start says that has run out of memory: the words of Python, of C++ and of the loader of libraries; and of a
# process that died, which cannot always say why (the loader ends it with 127, C++ with SIGABRT).
OF_MEMORY = ("memory", "map segment", "bad_alloc", "device's process")


def with_limit(message: str) -> str:
    """`message` of a start that failed; and, where it may be to blame, that the address space is limited."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or not any(word in message.lower() for word in OF_MEMORY):
        return message
    mib = limit // 2**20
    return f"{message}; this is likely for want of memory: the address space is limited to {mib:,} MiB (ulimit -v)"


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
    generation_config: Literal["auto", "none"] = "auto"
    measures_step_costs: bool = False
    quantization: str | None = None
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
        self._step_costs: list[tuple[int, float]] | None = None  # of what is loaded, where they were measured

    def load(self, precision: str | None = None) -> dict[str, Any]:
        """Import torch and the kernels, and read the weights."""
        from novainfer.kernels.memory import release_freed_pages
        from novainfer.kernels.runtime.runner import ModelRunner
        from novainfer.kernels.threads import threads_in_use

        s = self._settings
        if self._runner is not None:
            self.close()
            self.reclaim()
            release_freed_pages()
        quantization = {None: s.quantization, CHECKPOINT: None}.get(precision, precision)
        folder = s.location.path()
        defaults = sampling_defaults(folder) if s.generation_config == "auto" else {}
        self._runner = ModelRunner.load(
            folder,
            device=s.device,
            dtype=s.dtype,
            quantization=quantization,
            draft_dir=s.draft.path() if s.draft is not None else None,
            num_speculative_tokens=s.num_speculative_tokens,
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.max_num_batched_tokens,
            max_model_len=s.max_model_len,
            block_size=s.block_size,
            num_threads=s.num_threads,
            native=s.native,
            batch_invariant=s.batch_invariant,
            weights_fd=self._weights_fd,
            on_progress=self._on_progress,
        )
        info = self._runner.info
        return {
            "architecture": info.architecture,
            "dtype": str(info.dtype).removeprefix("torch."),
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "eos_token_ids": list(info.eos_token_ids),
            "weight_bytes": info.weight_bytes,
            "kv_bytes_per_block": info.kv_bytes_per_block,
            "row_invariant": info.row_invariant,
            "sampling_defaults": defaults,
            "kernels": info.kernels,
            "modes": [msgspec.structs.asdict(mode) for mode in info.modes],
            "weights": info.weights,
            "num_threads": threads_in_use() if s.device == "cpu" else 0,
            "kv_is_lazy": s.device == "cpu",  # its memory is taken when it is first written
        }

    def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
        """Allocate the KV cache."""
        s = self._settings
        num_blocks = self._model.fit(
            again=num_blocks is not None and not is_new,
            mode="fixed" if num_blocks is not None else s.kv_cache_capacity_mode,
            num_blocks=num_blocks if num_blocks is not None else s.num_kv_blocks,
            memory_utilization=s.kv_cache_memory_utilization,
            swap_space_bytes=int(s.swap_space_gib * 1024**3),
        )
        return {"num_blocks": num_blocks, "num_host_blocks": self._model.num_host_blocks}

    def warm(self) -> dict[str, Any]:
        """A small prefill and a decode step; and what steps cost by their tokens, if that was asked for."""
        self._model.warm()
        if self._settings.measures_step_costs and self._step_costs is None:  # they do not depend on the KV cache
            self._step_costs = self._model.measure_step_costs()
        return {"step_costs": self._step_costs} if self._step_costs is not None else {}

    def run(self, plan: StepPlan) -> StepDone:
        """One step; the allocators' out-of-memory errors become MemoryError."""
        from novainfer.kernels.memory import is_out_of_memory

        try:
            return self._model.execute(plan)
        except Exception as error:
            if is_out_of_memory(error) and not isinstance(error, MemoryError):
                raise MemoryError(str(error)) from error
            raise

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
            self._runner = self._step_costs = None

    def is_usable(self) -> bool:
        """False once a CUDA context is poisoned: after an illegal access every call fails, to the process's end."""
        if self._settings.device != "cuda":
            return True
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return True  # there is no context; where none can be had, the load says so
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    @property
    def _model(self) -> ModelRunner:
        assert self._runner is not None, "load comes first"
        return self._runner
