"""The device side of a worker: one loaded model that computes one step at a time.

All calls come from one thread. Nothing here knows of requests: a `StepPlan` says which slots compute which
tokens.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from novainfer.fsm.messages.mode import ATTENTION_BACKENDS, AUTO, KV_CACHE_DTYPES, Mode
from novainfer.fsm.messages.step import Logprobs, SeqParams, StepDone, StepPlan
from novainfer.kernels.errors import LoadError
from novainfer.kernels.memory import free_bytes, in_words, is_out_of_memory
from novainfer.kernels.models.decoder import Decoder
from novainfer.kernels.models.registry import read_config
from novainfer.kernels.ops.forward import GraphedForward
from novainfer.kernels.ops.linear import sum_in_fp32
from novainfer.kernels.ops.precision import quantization_of
from novainfer.kernels.ops.registry import AttentionBackend, BlockMover, Registry, Sampler
from novainfer.kernels.ops.selection import GRAPHS, Selection, build_registry
from novainfer.kernels.runtime.capacity import GpuMemory, MemoryUse, graph_bytes, largest_steps
from novainfer.kernels.runtime.copies import copy_blocks
from novainfer.kernels.runtime.modes import Modes, selections_by_mode
from novainfer.kernels.runtime.pooling import Pooled
from novainfer.kernels.runtime.proposer import Proposer, load_proposer
from novainfer.kernels.runtime.step_costs import measure_step_costs
from novainfer.kernels.runtime.swap import STAGING_BYTES, HostPool
from novainfer.kernels.sampling.banned import BannedSequences
from novainfer.kernels.sampling.drawn import Draw, joined
from novainfer.kernels.sampling.sampler import LOGIT_ROWS_MAX
from novainfer.kernels.sampling.scores import scores
from novainfer.kernels.sampling.verify import Positions, accept, sampled_positions
from novainfer.kernels.step import StepBuffers, StepTensors
from novainfer.kernels.threads import use_threads
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.header import tensor_shapes
from novainfer.kernels.weights.loader import GIB, choose_dtype
from novainfer.kernels.weights.sharing import Weights, load_weights

__all__ = ["Flight", "ModelInfo", "ModelRunner"]

logger = logging.getLogger(__name__)

DRAFT_FAILURES_MAX = 3  # after as many without a success between them a draft model is of no use any more
GIVEN_UP = "there is no draft model any more"

WARM_TOKENS = 8  # of the prompt that is run once
WARM_TOKENS_AHEAD = 32  # on CUDA, where fewer are computed as drafts are, by other kernels


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is, for those who plan its steps and for people."""

    architecture: str
    dtype: str  # "float32", "bfloat16", "float16"
    precision: str  # of the weights of products, and what they were quantised by: "bfloat16", "int8", "int4 (gptq)"
    device: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int  # tokens
    block_size: int  # tokens
    eos_token_ids: tuple[int, ...]  # config.json and generation_config.json together
    kv_bytes_per_block: int
    weight_bytes: int
    num_parameters: int
    kernels: dict[str, str]  # operation -> names of the implementations in use
    failed_kernels: dict[str, str]  # operation and name -> why its self-test failed; others compute in their place
    row_invariant: bool
    modes: tuple[Mode, ...]  # what `switch` can be asked for, best first (kernels/runtime/modes.py)
    weights: Weights  # in this process's own memory, or shared: packed by this process, or mapped as found


class Flight:
    """A step that the device was told to compute; `wait` and `done` may be called by another thread, in this order.

    Neither touches what later steps use. Nothing is left to wait for where `is_through`.
    """

    def __init__(self, done: Callable[[], StepDone], ended: torch.cuda.Event | None = None) -> None:
        """`ended` comes behind the step on the device; `done` reads what the step has copied to the host by then."""
        self._done = done
        self._ended = ended

    @property
    def is_through(self) -> bool:
        """Whether the step had ended when it was handed out."""
        return self._ended is None

    def wait(self) -> None:
        """Block until the step has ended; raises what the device raises, which may be for a step beside it."""
        if self._ended is not None:
            self._ended.synchronize()

    def done(self) -> StepDone:
        """What it gives, once it has ended."""
        return self._done()


class ModelRunner:
    """A model on a device: `load`, `fit`, `warm`, then `execute` step by step, `close` at the end."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: Selection,
        modes: Modes,
        info: ModelInfo,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        proposer: Proposer | None = None,
    ) -> None:
        self.info = info
        self.num_blocks = 0
        self.num_host_blocks = 0
        self._host_pool: HostPool | None = None
        self._gpu = GpuMemory(kernels.device) if kernels.device.type == "cuda" else None
        self.memory: MemoryUse | None = None  # of a GPU, when its KV cache was fitted to it
        self._kv_parts: tuple[Tensor, ...] = ()  # of the KV cache, when it has been fitted
        self._mover: BlockMover | None = None  # of its blocks, where kernels move them
        self._decoder = decoder
        self._kernels = kernels
        self._modes = modes
        self._max_num_seqs = max_num_seqs
        self._max_blocks = -(-info.max_model_len // info.block_size)
        self._buffers = StepBuffers(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            device=kernels.device,
        )
        self._sampler: Sampler = kernels.sampler(info.vocab_size).over(
            info.vocab_size, max_num_seqs, info.max_model_len, kernels.device
        )
        self._banned = BannedSequences(info.vocab_size)
        self._is_ahead = kernels.device.type != "cpu"  # it is told of steps, and computes them beside the host
        self._proposer = proposer
        self._draft_failures = 0  # since the draft model did well

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = AUTO,
        attention_backend: str = AUTO,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int | None,
        block_size: int = 16,
        num_threads: int | None = None,
        native: str | None = None,
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        weights_fd: int | None = None,
        weight_cache_dir: Path | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        registry: Registry | None = None,
        draft_dir: Path | None = None,
        num_speculative_tokens: int = 0,
    ) -> ModelRunner:
        """Read, check and pack a Hugging Face folder; raises `LoadError` with one clear sentence.

        `quantization` is the precision that weights are rounded to as they are read, one product after the other (None:
        as the checkpoint has them), `kv_cache_dtype` one of `KV_CACHE_DTYPES` and `attention_backend` one of
        `ATTENTION_BACKENDS` (those of a draft model are "auto"). `max_model_len` (tokens) defaults to the model's own.
        `native` is "0", "1" or "require" (default: the environment's NOVAINFER_NATIVE, else "1"). `on_progress(tensors
        read, tensors in all)` is called on the way. `weights_fd` is a memfd that processes share
        (kernels/weights/arena.py): the weights are packed into it or found there, and `info.weights` says what
        happened; a runner with shared weights offers no lower precision, which would give no memory back.
        `weight_cache_dir` keeps the packed weights on disk from one start to the next, on a CPU. The model in
        `draft_dir` proposes up to `num_speculative_tokens` drafts where a step wants them; it must have this one's
        tokenizer.
        """
        torch_device = _device(device)
        use_threads(num_threads)
        config = read_config(Path(model_dir))
        limit = config.max_position_embeddings
        if max_model_len is not None and max_model_len > limit:
            raise LoadError(f"max_model_len ({max_model_len}) is more than the {limit} tokens the model was made for")
        context = max_model_len or limit
        checkpoint = Checkpoint(Path(model_dir))
        if registry is None:
            registry = build_registry(
                torch_device, native=native, batch_invariant=batch_invariant, enforce_eager=enforce_eager
            )
        precision = quantization_of(quantization)
        if precision.is_quantised and checkpoint.scheme is not None:
            raise LoadError(
                f"quantization {quantization!r} is for weights that are not quantised, and those of {model_dir} are "
                f"already: {checkpoint.scheme}; leave the setting out"
            )
        for name, value, offered in (
            ("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES),
            ("attention_backend", attention_backend, ATTENTION_BACKENDS),
        ):
            if value not in offered:
                raise LoadError(f"{name} must be one of {', '.join(map(repr, offered))}, not {value!r}")
        kernels = Selection(registry, choose_dtype(dtype, config, checkpoint, torch_device), torch_device, precision)
        kernels.attention_backend = attention_backend
        with torch.inference_mode():
            (decoder, weight_bytes), weights = load_weights(
                config, checkpoint, kernels, context, on_progress, weights_fd, weight_cache_dir
            )
            decoder.kv_dtype = kv_cache_dtype
            shape = decoder.attention_shape(block_size)
            attention = kernels.attention(shape)
            kernels.sampler(config.vocab_size)
            selections = selections_by_mode(kernels, config, checkpoint, shape)
            if weights != "own":
                selections = {mode: found for mode, found in selections.items() if mode.precision == precision.name}
            modes = Modes(decoder, config, checkpoint, selections, keeps_first=weights != "own")
        info = ModelInfo(
            architecture=config.architecture,
            dtype=str(kernels.dtype).removeprefix("torch."),
            precision=checkpoint.scheme
            or (precision.name if precision.is_quantised else str(kernels.dtype).removeprefix("torch.")),
            device=device,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_model_len=context,
            block_size=block_size,
            eos_token_ids=config.eos_token_ids,
            kv_bytes_per_block=attention.bytes_per_block(shape, kernels.dtype),
            weight_bytes=weight_bytes,
            num_parameters=sum(math.prod(shape) for shape in tensor_shapes(config).values()),
            kernels=dict(kernels.names),
            failed_kernels=dict(registry.failed),
            row_invariant=kernels.row_invariant,
            modes=tuple(selections),
            weights=weights,
        )
        logger.info(
            "loaded %s: %s of weights in %s, kernels %s",
            model_dir,
            in_words(weight_bytes),
            info.precision,
            info.kernels,
        )
        proposer = None
        if draft_dir is not None:
            proposer = load_proposer(
                Path(draft_dir),
                Path(model_dir),
                registry=registry,
                dtype=dtype,
                device=torch_device,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=context,
                block_size=block_size,
                num_speculative_tokens=num_speculative_tokens,
            )
        return cls(decoder, kernels, modes, info, max_num_seqs, max_num_batched_tokens, proposer)

    def fit(
        self,
        *,
        mode: Literal["auto", "fixed"],
        num_blocks: int | None = None,
        memory_utilization: float = 0.6,
        swap_space_bytes: int = 0,
        again: bool = False,
    ) -> int:
        """Allocate the KV cache, in the place of one that is there, and give its number of blocks.

        "auto" takes on the CPU what `max_num_seqs` sequences of `max_model_len` tokens can use, within
        `memory_utilization` of the free memory; on CUDA all that is left of `memory_utilization` of the device's memory
        (`kernels.runtime.capacity`; `memory` says what is used for what). "fixed" takes `num_blocks`. Raises
        `LoadError` when one sequence of `max_model_len` tokens would not fit: the message says how many tokens would.

        `swap_space_bytes` of the host's memory hold blocks that are swapped out: `num_host_blocks` says how many. What
        they hold stays, if as many were there before. `again`: a cache of this size was in use a moment ago, and free
        memory may be short for that very reason.

        What is asked for and can never be is refused before the old cache is touched; it goes before the new one is
        made, since there may be no room for both, and is gone when that turns out to be too large.
        """
        if mode == "fixed":
            if num_blocks is None:
                raise LoadError('the KV cache capacity mode "fixed" needs a number of blocks')
            wanted = num_blocks
            self._must_hold_a_sequence(wanted, f"{wanted} KV blocks")
            is_lazy = again and self._kernels.device.type == "cpu"  # pages count when they are written
            if not is_lazy:
                self._check_room(wanted, freed=self._cache_bytes(self.num_blocks) if self._kv_parts else 0)
            self._let_cache_go()
            if not is_lazy:
                self._check_room(wanted)
        elif self._gpu is not None:
            self._let_cache_go()
            self.memory = self._profile(self._gpu)
            wanted = self._blocks_left(self.memory, memory_utilization, STAGING_BYTES if swap_space_bytes else 0)
        else:
            self._let_cache_go()
            budget = int(free_bytes(self._kernels.device) * memory_utilization)
            limit = max(budget - self._cache_bytes(0), 0) // self._bytes_per_block
            self._must_hold_a_sequence(limit, f"{budget / GIB:.2f} GiB ({memory_utilization:g} of the free memory)")
            wanted = min(limit, self._max_num_seqs * self._max_blocks)
        cache = self._put_cache(wanted)
        on_device = self._cache_bytes(wanted) if self._kernels.device.type == "cpu" else 0
        self._fit_host_pool(cache, swap_space_bytes, free_bytes(torch.device("cpu")) - on_device)
        if self._gpu is not None and self.memory is not None:
            self.memory = self.memory.with_cache(self._cache_bytes(wanted), self._gpu.snapshot().free_bytes)
        return wanted

    def _put_cache(self, num_blocks: int) -> AttentionBackend:
        """Allocate a cache of so many blocks and compute on it from now on."""
        shape = self._decoder.attention_shape(self.info.block_size)
        kernel = self._kernels.attention(shape)
        try:
            cache: AttentionBackend = kernel.allocate(shape, num_blocks, self._kernels.dtype, self._kernels.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size = num_blocks * self.info.kv_bytes_per_block
            raise LoadError(f"{num_blocks} KV blocks ({size / GIB:.2f} GiB) cannot be allocated: {error}") from None
        self._modes.attach(cache)
        self._kv_parts = cache.parts
        self._mover = self._kernels.block_mover(cache.parts)
        if self._proposer is not None:
            self._proposer.fit(num_blocks, self.info.max_model_len)
        self.num_blocks = num_blocks
        self._buffers.begin(num_blocks)
        return cache

    def _profile(self, gpu: GpuMemory) -> MemoryUse:
        """Run the largest steps over a small cache, which goes again, and say what they took; there is no cache yet."""
        limits = {"max_num_seqs": self._max_num_seqs, "max_num_batched_tokens": self._buffers.max_num_batched_tokens}
        plans = largest_steps(**limits, max_model_len=self.info.max_model_len, block_size=self.info.block_size)
        peaks, loaded = [], gpu.snapshot().allocated_bytes
        try:
            self._put_cache(1 + max(max(plan.table_blocks) for plan in plans))
            before = gpu.snapshot()
            for plan in plans:
                gpu.begin_peak()
                self.execute(plan)
                peaks.append(gpu.snapshot().peak_bytes - before.allocated_bytes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise LoadError(
                f"the largest step (max_num_batched_tokens {limits['max_num_batched_tokens']}, max_num_seqs "
                f"{limits['max_num_seqs']}) finds no memory beside the weights: make it smaller, or run a smaller model"
            ) from None
        finally:
            self._let_cache_go()
        found = gpu.snapshot()
        has_graphs = self._kernels.names.get("forward", "").startswith(GRAPHS)
        return MemoryUse(
            total_bytes=found.total_bytes,
            model_bytes=loaded + max(self._sampler.scratch_bytes, found.allocated_bytes - loaded),
            activation_bytes=max(peaks),
            graph_bytes=graph_bytes(self._max_num_seqs, peaks[1]) if has_graphs else 0,
            other_bytes=max(found.total_bytes - found.free_bytes - found.reserved_bytes, 0),
        )

    def _blocks_left(self, use: MemoryUse, utilization: float, staging_bytes: int) -> int:
        """How many blocks fit into what is left; raises `LoadError` where one sequence would not fit."""
        besides = self._cache_bytes(0) + staging_bytes
        left = use.left(utilization) - besides
        num_blocks = max(left, 0) // self._bytes_per_block
        if num_blocks < self._max_blocks:
            share = use.utilization_for(self._max_blocks * self._bytes_per_block + besides)
            enough = (
                "no share of it is enough" if share is None else f"gpu_memory_utilization must be at least {share:g}"
            )
            self._must_hold_a_sequence(
                num_blocks,
                f"{max(left, 0) / GIB:.2f} GiB (gpu_memory_utilization {utilization:g} of {use.total_bytes / GIB:.2f} "
                f"GiB, beside {use})",
                f"; for that length {enough}",
            )
        return num_blocks

    @property
    def _bytes_per_block(self) -> int:
        """What one block takes on the device, the draft model's keys and values among it."""
        return self.info.kv_bytes_per_block + (self._proposer.bytes_per_block if self._proposer is not None else 0)

    def _cache_bytes(self, num_blocks: int) -> int:
        """What a cache of so many blocks takes on the device, with the draft model's scratch blocks."""
        scratch_bytes = self._proposer.scratch_bytes if self._proposer is not None else 0
        return num_blocks * self._bytes_per_block + scratch_bytes

    def _must_hold_a_sequence(self, num_blocks: int, where: str, more: str = "") -> None:
        info = self.info
        if num_blocks < self._max_blocks:
            raise LoadError(
                f"one sequence of max_model_len {info.max_model_len} needs {self._max_blocks} KV blocks of "
                f"{info.block_size} tokens, but {where} hold {num_blocks}: max_model_len must be at most "
                f"{num_blocks * info.block_size}{more}"
            )

    def _check_room(self, num_blocks: int, freed: int = 0) -> None:
        """Raise `LoadError` unless there is room for so many blocks; `freed` bytes more will be free at most."""
        device, pool = self._kernels.device, self._host_pool
        promised = pool.unwritten_bytes if pool is not None and device.type == "cpu" else 0
        free = max(free_bytes(device) + freed - self._cache_bytes(0) - promised, 0)
        needed = num_blocks * self._bytes_per_block
        if needed > free:
            raise LoadError(
                f"{num_blocks} KV blocks need {needed / GIB:.2f} GiB, but only {free / GIB:.2f} GiB are free: at "
                f"most {free // self._bytes_per_block} blocks fit"
            )

    def _let_cache_go(self) -> None:
        """Give the memory of the KV cache back, if there is one; nothing can be computed until there is another."""
        self._decoder.detach()
        if self._proposer is not None:
            self._proposer.detach()
        if self._host_pool is not None:
            self._host_pool.detach()
        self._kv_parts, self._mover = (), None
        self.num_blocks = 0
        if self._kernels.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fit_host_pool(self, cache: AttentionBackend, swap_space_bytes: int, free: int) -> None:
        """`free` bytes of the host's memory are left beside the KV cache."""
        num_host_blocks = swap_space_bytes // HostPool.bytes_per_block(cache.parts, self._mover)
        if self._host_pool is not None and num_host_blocks == self.num_host_blocks:
            self._host_pool.attach(cache.parts, self._mover)
            return
        self.num_host_blocks, self._host_pool = num_host_blocks, None
        if num_host_blocks == 0:
            return
        if swap_space_bytes > free:
            raise LoadError(
                f"a swap space of {swap_space_bytes / GIB:.2f} GiB was asked for, but only {max(free, 0) / GIB:.2f} "
                "GiB of the host's memory are free beside the KV cache"
            )
        try:
            self._host_pool = HostPool(cache.parts, self.num_host_blocks, self._mover)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise LoadError(f"{swap_space_bytes / GIB:.2f} GiB of swap space cannot be allocated: {error}") from None

    def warm(self) -> None:
        """Run a small prefill and a decode in block 0, so that the first request meets no first-time cost.

        And capture CUDA graphs, where the kernels replay them; raises what an allocator raises.
        """
        wanted = WARM_TOKENS_AHEAD if self._is_ahead else WARM_TOKENS
        length = max(1, min(wanted, self.info.max_model_len - 1, self._buffers.max_num_batched_tokens))
        self.execute(StepPlan([0], [length], [length], [0] * length, [0], [0], [0], [0]))
        if self.info.max_model_len > length:
            self.execute(StepPlan([0], [1], [length + 1], [0], [0], [length // self.info.block_size], [0], [0]))
        if self._proposer is not None:
            plan = StepPlan([0], [length], [length], [0] * length, [0], [0], [0], [0])
            plan.admissions = [SeqParams(slot=0, token_ids=plan.input_ids)]
            plan.num_drafts_wanted = [self._proposer.num_speculative_tokens]
            if (error := self.execute(plan).draft_error) is not None:
                raise LoadError(f"the draft model proposes nothing: {error}")
        self._capture()

    def _capture(self) -> None:
        forward = self._decoder.compute
        if isinstance(forward, GraphedForward):
            with torch.inference_mode():
                forward.capture(self._max_num_seqs, self._buffers.blank)

    def measure_step_costs(self) -> list[tuple[int, float]]:
        """Milliseconds of a step by its tokens, in ascending order (`step_costs`)."""
        info = self.info
        longest = min(self._buffers.max_num_batched_tokens, info.max_model_len, self.num_blocks * info.block_size)
        return measure_step_costs(self.execute, longest, info.block_size)

    @property
    def mode(self) -> Mode:
        """Which of `info.modes` it computes in."""
        return self._modes.mode

    @property
    def weight_bytes(self) -> int:
        """What the weights of all matrix products take in this mode."""
        return self._modes.weight_bytes

    def switch(self, mode: Mode) -> None:
        """Compute in `mode` from the next step on; KV cache and sampler stay as they are.

        Raises ValueError when the mode is not offered, MemoryError when there is no room for its weights,
        `LoadError` when they cannot be read again; then the runner goes on as before.
        """
        before = self.mode
        with torch.inference_mode():
            self._modes.switch(mode)
            try:
                self._capture()
            except Exception as error:
                logger.warning("back to %s: %s", before, error)
                self._modes.switch(before)
                self._capture()
                if is_out_of_memory(error):
                    raise MemoryError(f"there is no room for the CUDA graphs of {mode}: {error}") from error
                raise

    def execute(self, plan: StepPlan) -> StepDone:
        """Copy blocks, compute one step and sample; what the device raises (out of memory among it) comes through."""
        flight = self.launch(plan)
        flight.wait()
        return flight.done()

    def launch(self, plan: StepPlan) -> Flight:
        """Have the device do all of `execute`, and do not wait for it where it is CUDA: see `Flight`.

        `STEPS_IN_FLIGHT_MAX` steps may have been launched that were not waited for, this one among them. What the
        device raises at once comes through when it is through with what it was told before; the rest `Flight.wait`
        raises. A step with drafts, and one beside a draft model, is waited for here: what comes behind it depends on
        its tokens; and so is one that scores tokens.
        """
        with torch.inference_mode():
            try:
                return self._launch(plan)
            except BaseException:
                with suppress(Exception):  # what it was told goes on to read buffers that are about to be used again
                    self._wait()
                raise

    def _launch(self, plan: StepPlan) -> Flight:
        step = self._lay_out(plan)
        hidden = None if step is None else self._decoder.forward(step)
        at = sampled_positions(plan)
        if hidden is not None:
            at = self._banned.masked(plan, at, self._buffers.last_token)
        draw = None if hidden is None else self._draw(hidden[: len(at.slots)], at)
        num_known = len(at.slots) + len(plan.score_rows)
        pooled = Pooled(hidden[num_known:], plan.pool_lens) if plan.pool_seqs and hidden is not None else None
        needs_host = plan.num_drafts or plan.num_drafts_wanted or plan.score_rows
        if self._is_ahead and self._proposer is None and not needs_host:
            if step is not None and draw is not None and plan.sample_seqs:
                self._buffers.keep_on_device(plan, step, draw.token_ids)
            return Flight(partial(_outcome, plan, at, draw, pooled), _recorded(self._kernels.device))
        if self._is_ahead:
            self._wait()
        done = _outcome(plan, at, draw, pooled)
        if plan.score_rows and hidden is not None:
            done = msgspec.structs.replace(done, scores=self._score(hidden[len(at.slots) : num_known], plan))
        if draw is not None:
            self._buffers.keep(plan, done.token_ids, done.num_tokens)
            if self._proposer is not None:
                done = self._propose(self._proposer, plan, done)
            elif plan.num_drafts_wanted:
                done = msgspec.structs.replace(done, draft_error=GIVEN_UP)
        return Flight(lambda: done)

    def _propose(self, proposer: Proposer, plan: StepPlan, done: StepDone) -> StepDone:
        """`done` with drafts, or with the reason for none: the tokens are there, whatever becomes of guesses."""
        began_s = time.perf_counter()
        try:
            drafts = proposer.propose(plan, done, self._buffers.block_table)
        except Exception as error:
            self._draft_failures += 1
            message = f"{type(error).__name__}: {error}"
            if self._draft_failures == DRAFT_FAILURES_MAX:
                proposer.close()
                self._proposer = None
                message += f"; {DRAFT_FAILURES_MAX} times one after the other, and the draft model is given up"
            logger.warning("the draft model proposes nothing: %s", message)
            return msgspec.structs.replace(done, draft_error=message, draft_s=time.perf_counter() - began_s)
        if not plan.num_drafts_wanted:
            return done
        self._draft_failures = 0
        found = drafts if any(drafts) else []
        return msgspec.structs.replace(done, draft_token_ids=found, draft_s=time.perf_counter() - began_s)

    def _lay_out(self, plan: StepPlan) -> StepTensors | None:
        """All that comes before the computation; None where nothing is computed."""
        if plan.swap_out_blocks or plan.swap_in_blocks:
            if self._host_pool is None:
                raise ValueError("a step swaps blocks, but there is no swap space")
            self._host_pool.swap_out(plan.swap_out_blocks, plan.swap_out_hosts)
            self._host_pool.swap_in(plan.swap_in_hosts, plan.swap_in_blocks)
        if plan.copy_to_blocks or plan.copy_from_blocks:
            copy_blocks(self._kv_parts, plan.copy_from_blocks, plan.copy_to_blocks, self._mover)
        for params in plan.admissions:
            self._sampler.admit(params)
            self._banned.admit(params)
        if not plan.slots:
            self._buffers.update_table(plan)
            if self._proposer is not None:
                self._proposer.follow(plan)
            return None
        step = self._buffers.fill(plan, bucket=self._bucket(plan))
        if self._proposer is not None:
            self._proposer.follow(plan)
        return step

    def _bucket(self, plan: StepPlan) -> int:
        """The rows that the step is padded to, for a CUDA graph; 0: it is not."""
        if not self._is_ahead:  # a CPU; to ask a protocol whether it fits took 50 us between two of its steps
            return 0
        forward = self._decoder.compute
        if not isinstance(forward, GraphedForward) or max(plan.query_lens) > 1:
            return 0
        if plan.num_drafts or plan.score_rows or plan.pool_seqs:
            return 0
        return forward.bucket(len(plan.slots))

    def _wait(self) -> None:
        """Until the device is through with all that it was told."""
        if self._kernels.device.type == "cuda":
            torch.cuda.synchronize(self._kernels.device)

    def _draw(self, hidden: Tensor, at: Positions) -> Draw:
        size = self._sampler.rows_max
        return joined([self._sampler.draw(self._decoder.head(hidden[rows]), part) for rows, part in at.parts(size)])

    def _score(self, hidden: Tensor, plan: StepPlan) -> list[Logprobs]:
        found: list[Logprobs] = []
        for begin in range(0, len(plan.score_rows), LOGIT_ROWS_MAX):
            rows = slice(begin, begin + LOGIT_ROWS_MAX)
            found += scores(self._decoder.head(hidden[rows]), plan.score_ids[rows], plan.score_tops[rows])
        return found

    def close(self) -> None:
        """Let weights and cache go; the runner cannot be used afterwards."""
        self._let_cache_go()
        self._decoder.layers.clear()
        if self._proposer is not None:
            self._proposer.close()
            self._proposer = None
        self._host_pool = None
        del self._decoder, self._modes, self._sampler, self._buffers, self._kernels


def _outcome(plan: StepPlan, at: Positions, draw: Draw | None, pooled: Pooled | None) -> StepDone:
    """What a step that has ended gives, but for what a draft model makes of it."""
    if draw is None:
        return StepDone(plan.step_id, plan.epoch)
    sampled, counts = draw.read(), list[int]()
    if plan.num_drafts:
        sampled, counts = accept(sampled, at.drafts, plan.num_drafts)
    sums = pooled.read() if pooled is not None else []
    return StepDone(plan.step_id, plan.epoch, sampled.token_ids, sampled.logprobs, num_tokens=counts, pooled=sums)


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that the device was told; None where it has done it when it was told."""
    if device.type != "cuda":
        return None
    # Others take a core to be waited for, and torch.Event ignores the flag.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if name in ("cuda", "nvidia"):
        if not torch.cuda.is_available():
            raise LoadError("device cuda was asked for, but torch finds no CUDA device here")
        sum_in_fp32()
        return torch.device("cuda", torch.cuda.current_device())
    raise LoadError(f"device must be cpu or cuda, not {name!r}")
