"""The device side of a worker: one loaded model that computes one step at a time.

All calls come from one thread. Nothing here knows of requests: a `StepPlan` says which slots compute which
tokens.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from novainfer.fsm.messages.mode import ATTENTION_BACKENDS, AUTO, KV_CACHE_DTYPES, Mode
from novainfer.fsm.messages.step import Logprobs, SeqParams, StepDone, StepMasks, StepPlan
from novainfer.kernels.errors import LoadError
from novainfer.kernels.memory import in_words, is_out_of_memory
from novainfer.kernels.models.decoder import Decoder
from novainfer.kernels.models.registry import read_config
from novainfer.kernels.ops.forward import GraphedForward
from novainfer.kernels.ops.linear import sum_in_fp32
from novainfer.kernels.ops.precision import quantization_of
from novainfer.kernels.ops.registry import Registry, Sampler
from novainfer.kernels.ops.selection import Selection, build_registry
from novainfer.kernels.runtime.cache import FittedCache
from novainfer.kernels.runtime.capacity import MemoryUse
from novainfer.kernels.runtime.flight import Flight
from novainfer.kernels.runtime.model_info import ModelInfo
from novainfer.kernels.runtime.modes import Modes, selections_by_mode
from novainfer.kernels.runtime.pooling import Pooled
from novainfer.kernels.runtime.proposer import Proposer, load_proposer
from novainfer.kernels.runtime.step_costs import measure_step_costs
from novainfer.kernels.sampling.awaited import AwaitedMasks, without
from novainfer.kernels.sampling.banned import BannedSequences
from novainfer.kernels.sampling.drawn import Draw, joined
from novainfer.kernels.sampling.sampler import LOGIT_ROWS_MAX
from novainfer.kernels.sampling.scores import scores
from novainfer.kernels.sampling.verify import Positions, accept, sampled_positions
from novainfer.kernels.step import StepBuffers, StepTensors
from novainfer.kernels.threads import use_threads
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.header import tensor_shapes
from novainfer.kernels.weights.loader import choose_dtype
from novainfer.kernels.weights.sharing import load_weights

__all__ = ["ModelRunner"]

logger = logging.getLogger(__name__)

DRAFT_FAILURES_MAX = 3  # after as many without a success between them a draft model is of no use any more
GIVEN_UP = "there is no draft model any more"

WARM_TOKENS = 8  # of the prompt that is run once
WARM_TOKENS_AHEAD = 32  # on CUDA, where fewer are computed as drafts are, by other kernels


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
        self._decoder = decoder
        self._kernels = kernels
        self._modes = modes
        self._max_num_seqs = max_num_seqs
        self._buffers = StepBuffers(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            device=kernels.device,
        )
        self._cache = FittedCache(decoder, kernels, modes, info, self._buffers, proposer)
        self._sampler: Sampler = kernels.sampler(info.vocab_size).over(
            info.vocab_size, max_num_seqs, info.max_model_len, kernels.device
        )
        self._banned = BannedSequences(info.vocab_size)
        self._masks = AwaitedMasks(info.vocab_size)
        self._is_ahead = kernels.device.type != "cpu"  # it is told of steps, and computes them beside the host
        self._proposer = proposer
        self._draft_failures = 0  # since the draft model did well
        self.sample_s = 0.0  # that the last step has taken to choose tokens; 0 where the host does not wait for that

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
        memory_share: float = 1.0,
        swap_space_bytes: int = 0,
        again: bool = False,
    ) -> int:
        """Allocate the KV cache, in the place of one that is there, and give its number of blocks.

        "auto" takes on the CPU what `max_num_seqs` sequences of `max_model_len` tokens can use, within
        `memory_utilization` of the free memory; on CUDA all that is left of `memory_utilization` of the device's memory
        (`kernels.runtime.capacity`; `memory` says what is used for what). "fixed" takes `num_blocks`. Raises
        `LoadError` when one sequence of `max_model_len` tokens would not fit: the message says how many tokens would.
        Weights and cache together have `memory_share` of all memory of a CPU, or of `memory_utilization` of a GPU's:
        the rest is for other models, whose caches may not be written yet.

        `swap_space_bytes` of the host's memory hold blocks that are swapped out: `num_host_blocks` says how many. What
        they hold stays, if as many were there before. `again`: a cache of this size was in use a moment ago, and free
        memory may be short for that very reason.

        What is asked for and can never be is refused before the old cache is touched; it goes before the new one is
        made, since there may be no room for both, and is gone when that turns out to be too large.
        """
        return self._cache.fit(
            mode=mode,
            num_blocks=num_blocks,
            memory_utilization=memory_utilization,
            memory_share=memory_share,
            swap_space_bytes=swap_space_bytes,
            again=again,
            run=self.execute,
            sampler_bytes=self._sampler.scratch_bytes,
        )

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
    def num_blocks(self) -> int:
        """Of the KV cache; none before `fit`."""
        return self._cache.num_blocks

    @property
    def num_host_blocks(self) -> int:
        """Of the host's memory, for what is swapped out."""
        return self._cache.num_host_blocks

    @property
    def memory(self) -> MemoryUse | None:
        """Of a GPU, when the KV cache was fitted to it."""
        return self._cache.memory

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

    def give(self, masks: StepMasks) -> None:
        """Masks of a step that is launched, or will be; from any thread."""
        self._masks.give(masks)

    def _launch(self, plan: StepPlan) -> Flight:
        self._masks.begin(plan)
        self.sample_s = 0.0
        step = self._lay_out(plan)
        hidden = None if step is None else self._decoder.forward(step)
        at = sampled_positions(plan)
        draw, late = (None, list[int]()) if hidden is None else self._draw(plan, hidden[: len(at.slots)], at)
        num_known = len(at.slots) + len(plan.score_rows)
        pooled = Pooled(hidden[num_known:], plan.pool_lens) if plan.pool_seqs and hidden is not None else None
        needs_host = plan.num_drafts or plan.num_drafts_wanted or plan.score_rows
        if self._is_ahead and self._proposer is None and not needs_host:
            if step is not None and draw is not None and plan.sample_seqs:
                self._buffers.keep_on_device(plan, step, draw.token_ids)
            return Flight(partial(_outcome, plan, at, draw, late, pooled), _recorded(self._kernels.device))
        if self._is_ahead:
            self._wait()
        done = _outcome(plan, at, draw, late, pooled)
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
                self._proposer = self._cache.proposer = None
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
        self._cache.move(plan)
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

    def _draw(self, plan: StepPlan, hidden: Tensor, at: Positions) -> tuple[Draw, list[int]]:
        """Tokens at these positions; and those of them whose masks have not come, by the time the logits are there."""
        if not at.slots:
            return joined([]), []
        size = self._sampler.rows_max
        first = self._decoder.head(hidden[:size])
        at, late = self._masks.complete(plan, at)
        at = self._banned.masked(plan, at, self._buffers.last_token)
        draws = []
        for rows, part in at.parts(size):
            logits = self._decoder.head(hidden[rows]) if rows.start else first
            began_s = time.perf_counter()
            draws.append(self._sampler.draw(logits, part))
            if not self._is_ahead:
                self.sample_s += time.perf_counter() - began_s
        return joined(draws), late

    def _score(self, hidden: Tensor, plan: StepPlan) -> list[Logprobs]:
        found: list[Logprobs] = []
        for begin in range(0, len(plan.score_rows), LOGIT_ROWS_MAX):
            rows = slice(begin, begin + LOGIT_ROWS_MAX)
            found += scores(self._decoder.head(hidden[rows]), plan.score_ids[rows], plan.score_tops[rows])
        return found

    def close(self) -> None:
        """Let weights and cache go; the runner cannot be used afterwards."""
        self._cache.close()
        self._decoder.layers.clear()
        if self._proposer is not None:
            self._proposer.close()
            self._proposer = None
        del self._decoder, self._modes, self._sampler, self._buffers, self._kernels


def _outcome(plan: StepPlan, at: Positions, draw: Draw | None, late: Sequence[int], pooled: Pooled | None) -> StepDone:
    """What a step that has ended gives, but for what a draft model makes of it."""
    if draw is None:
        return StepDone(plan.step_id, plan.epoch)
    sampled, counts = without(draw.read(), late), list[int]()
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
