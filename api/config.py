"""Everything an engine can be told, in one immutable record. Names are vLLM's where vLLM has one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from novainfer.actors.device.location import DEMO_MODEL
from novainfer.actors.routers.config import KvEventsConfig
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.mode import QUANTIZATIONS, UNQUANTIZED
from novainfer.fsm.messages.params import DURATION_S_MAX, check_types
from novainfer.fsm.schedule.speculative_config import SpeculativeConfig
from novainfer.setting import says

# The sections of `--help` that settings of an engine stand in.
MODEL = "Model"
MEMORY, BATCHING, QUEUE, READERS = "KV memory", "Batching and kernels", "Queue", "Slow readers"
WORKER, RECORDER = "Worker and recovery", "Flight recorder"

DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}

# Above these a worker dies as it starts (100,000 threads end in SIGSEGV), memory is taken for what will never run, or a
# number does not fit where it is kept. No machine that is served today needs as much.
AT_MOST = {
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 20,
    "prefill_chunk_tokens": 1 << 20,
    "block_size": 1024,
    "num_threads": 1024,
    "max_model_len": 1 << 31,
    "num_kv_blocks": (1 << 31) - 1,
    "max_num_queued_reqs": 1 << 20,
    "max_num_queued_tokens": 1 << 40,
    "max_num_overflow_reqs": 1 << 20,
    "max_sessions": 1 << 20,
    "max_restarts": 1 << 20,
    "swap_space_gib": 1 << 20,
}
# Below these a healthy engine ends its own work, and the first look at a setting is a reader's or a worker's end.
AT_LEAST_S = {
    "step_timeout_s": (1.0, "steps of a healthy worker would count as hung"),
    "heartbeat_timeout_s": (1.0, "a process that waits for its turn on a busy machine would count as lost"),
    "priority_wait_s": (0.1, "every request would have waited for so long, and priorities would mean nothing"),
    "restart_window_s": (1.0, "no losses would come within it, and no number of them would be too many"),
    "ladder_quiet_s": (0.1, "a mode would be left after a step or two"),
    "stall_timeout_s": (0.05, "a reader that falls behind once would end"),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine is built; without arguments it serves the demo model on the CPU.

    Each field is annotated with the sentence that `--help`, docs/reference.md and the schema of `--config` show of it.

    A worker in a process is lost when it has ended, when it was silent for `heartbeat_timeout_s`, or when a step took
    more than `step_timeout_s`; after `max_restarts` losses within `restart_window_s` without a step between them, the
    engine gives up. A worker in a thread is never restarted.
    """

    model: Annotated[str | Path, says(MODEL, "A folder, or a name on the Hugging Face hub.")] = DEMO_MODEL
    tokenizer: Annotated[str | Path | None, says(MODEL, "The tokenizer's folder or hub name.", unset="the model's")] = (
        None
    )
    chat_template: Annotated[
        str | Path | None, says(MODEL, "A file with the template of chats (Jinja).", unset="the model's")
    ] = None
    served_model_name: Annotated[
        str | None, says(MODEL, "The name that clients use.", unset="as the model was given")
    ] = None
    device: Annotated[Literal["cpu", "cuda"], says(MODEL, "Where the model runs.")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "half", "fp16", "bf16", "float", "fp32"],
        says(MODEL, "float32, bfloat16 or float16 (also half, fp16, bf16, float, fp32); auto: as in the checkpoint."),
    ] = "auto"
    quantization: Annotated[
        str | None,
        says(
            MODEL,
            "The precision that weights are rounded to while they are loaded; int8 and fp8 are half of bfloat16, int4 "
            "a third.",
            unset="as in the checkpoint",
            choices=(*QUANTIZATIONS, UNQUANTIZED),
        ),
    ] = None
    weight_cache_dir: Annotated[
        str | Path | None,
        says(
            MODEL,
            "A folder that keeps packed weights on disk, so that the next start reads them as they are, on a CPU.",
            unset="weights are packed at each start",
        ),
    ] = None
    generation_config: Annotated[
        Literal["auto", "none"],
        says(MODEL, "auto: requests that say nothing else are sampled as generation_config.json wants it."),
    ] = "auto"
    pooling: Annotated[
        Literal["auto", "last", "mean"],
        says(
            MODEL,
            "Embeddings are the hidden state of the last token, or the mean of all; auto: as the model's folder says "
            "(1_Pooling/config.json), else the last.",
        ),
    ] = "auto"
    seed: Annotated[int | None, says(MODEL, "Seeds of requests that bring none begin here.", unset="by chance")] = None
    max_model_len: Annotated[int | None, says(MODEL, "Longest context in tokens.", unset="the model's")] = None
    max_num_seqs: Annotated[int, says(BATCHING, "Most requests in a step.")] = 256
    max_num_batched_tokens: Annotated[int, says(BATCHING, "Most tokens in a step.")] = 2048
    prefill_chunk_tokens: Annotated[int, says(BATCHING, "Most tokens of prompts in a step.")] = 512
    inter_token_target_ms: Annotated[
        float | None,
        says(
            BATCHING,
            "Steps in which requests decode hold as much of prompts as keeps them within so many milliseconds, and a "
            "block at least.",
            unset="as little as costs prompts a few hundredths of their speed",
        ),
    ] = None
    block_size: Annotated[
        int, says(MEMORY, "Tokens in a KV block; where they are no multiple of 16, the last bits differ.")
    ] = 16
    enable_prefix_caching: Annotated[
        bool, says(MEMORY, "Keep the KV of finished requests for prompts that begin alike.")
    ] = True
    share_prefix_cache: Annotated[
        bool, says(MEMORY, "One prefix cache for all tenants (keys); otherwise each finds its own prefixes only.")
    ] = False
    session_ttl_s: Annotated[
        float,
        says(
            MEMORY,
            "Seconds for which a conversation (session_id) is kept after its last answer; 0: none is.",
            flag="--session-ttl",
        ),
    ] = 600.0
    session_share: Annotated[
        float,
        says(
            MEMORY,
            "Share of the KV blocks up to which those of conversations are kept longer than other finished requests'.",
        ),
    ] = 0.5
    max_sessions: Annotated[
        int, says(MEMORY, "Conversations that are kept; beyond, the one that was used least recently ends.")
    ] = 1000
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        says(
            MEMORY,
            "How keys and values are kept: auto as they are computed; int8 and fp8 in a byte each, with a scale for "
            "each token and head.",
        ),
    ] = "auto"
    kv_cache_capacity_mode: Annotated[
        Literal["auto", "fixed"], says(MEMORY, "auto: by the free memory; fixed: by the number of blocks.")
    ] = "auto"
    kv_cache_memory_utilization: Annotated[
        float,
        says(MEMORY, "On a CPU: largest share of the memory, free beside the weights, that the KV cache may take."),
    ] = 0.6
    gpu_memory_utilization: Annotated[
        float,
        says(
            MEMORY,
            "On CUDA: the share of the device's memory that may be in use, by weights, steps, graphs, others and the "
            "KV cache, which gets what is left.",
        ),
    ] = 0.9
    memory_share: Annotated[
        float,
        says(
            MEMORY,
            "The share of the memory that may be had beside other engines: of all there is on a CPU, of what "
            "gpu_memory_utilization grants on CUDA; several models of one server divide it.",
        ),
    ] = 1.0
    num_kv_blocks: Annotated[int | None, says(MEMORY, "Blocks of the KV cache; only with the capacity mode fixed.")] = (
        None
    )
    max_num_queued_reqs: Annotated[int, says(QUEUE, "Requests that may wait; more are refused with 503.")] = 1024
    max_num_queued_tokens: Annotated[int, says(QUEUE, "Prompt tokens that may wait; more are refused with 503.")] = (
        1_048_576
    )
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        says(QUEUE, "What waits first runs first: by age, or by the priority of requests (lower goes first)."),
    ] = "fcfs"
    priority_wait_s: Annotated[
        float,
        says(QUEUE, "Seconds for which others may go before a request by priority; after twice as many none does."),
    ] = 10.0
    num_threads: Annotated[int | None, says(BATCHING, "CPU threads of the kernels.", unset="by cores and quota")] = None
    native: Annotated[
        Literal["0", "1", "require"] | None,
        says(BATCHING, "C++ kernels: 0 never, 1 where they can be had, require: or no start.", unset="1"),
    ] = None
    attention_backend: Annotated[
        Literal["auto", "triton", "cudnn", "sdpa"],
        says(
            BATCHING,
            "Kernels of attention: auto the fastest that is there; triton our own on CUDA; cudnn and sdpa torch's, "
            "over keys and values gathered together.",
        ),
    ] = "auto"
    batch_invariant: Annotated[bool, says(BATCHING, "Only kernels that compute a row alike in every batch.")] = False
    enforce_eager: Annotated[bool, says(BATCHING, "No CUDA graphs: each kernel of a step is launched by itself.")] = (
        False
    )
    worker: Annotated[
        Literal["thread", "process"], says(WORKER, "Where the device lives; a process is restarted when it is lost.")
    ] = "thread"
    warm_spare: Annotated[bool, says(WORKER, "Keep a second worker loaded, to take over at once.")] = False
    step_timeout_s: Annotated[
        float,
        says(WORKER, "Seconds after which a step counts as hung, and its worker as lost.", flag="--step-timeout"),
    ] = 60.0
    heartbeat_timeout_s: Annotated[
        float, says(WORKER, "Seconds of silence after which a worker counts as lost.", flag="--heartbeat-timeout")
    ] = 5.0
    max_restarts: Annotated[
        int, says(WORKER, "Losses without a step between them, within the restart window, before the engine gives up.")
    ] = 5
    restart_window_s: Annotated[
        float, says(WORKER, "Seconds in which losses are counted.", flag="--restart-window")
    ] = 60.0
    ladder_quiet_s: Annotated[float, says(WORKER, "Seconds without trouble before a degraded mode is left again.")] = (
        60.0
    )
    swap_space_gib: Annotated[
        float, says(MEMORY, "Host memory in GiB for the KV of paused and preempted requests; 0: none.")
    ] = 0.0
    stall_keep_s: Annotated[
        float, says(READERS, "Seconds that a slow reader's request keeps its KV on the device.")
    ] = 10.0
    stall_timeout_s: Annotated[
        float, says(READERS, "Seconds after which a slow reader's request is ended.", flag="--stall-timeout")
    ] = 300.0
    max_num_overflow_reqs: Annotated[int, says(QUEUE, "Requests beyond the queue that may wait if they asked to.")] = (
        1024
    )
    speculative_config: Annotated[
        SpeculativeConfig | str | None,
        says(
            BATCHING,
            "Steps verify guesses of the next tokens where that is faster: a JSON object as vLLM spells it, such as "
            '{"method": "ngram", "num_speculative_tokens": 5}, or {"method": "draft_model", "model": "FOLDER", '
            '"num_speculative_tokens": 3} for a smaller model with the same tokenizer ("demo-draft" is the demo '
            "model's own); answers are the same.",
        ),
    ] = None
    async_scheduling: Annotated[
        bool | None,
        says(
            BATCHING,
            "Plan a step while the one before it is computed, so that the device does not wait; never together with "
            "speculation.",
            unset="on where the worker is a process or the device is cuda",
        ),
    ] = None
    kv_events_config: Annotated[
        KvEventsConfig | str | None,
        says(
            MEMORY,
            "Tell routers over ZeroMQ which prefixes can be found here: a JSON object as vLLM spells it, such as "
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", '
            '"topic": "kv"}; it needs the extra "events", and whoever can connect reads prompts as token ids.',
        ),
    ] = None
    recorder: Annotated[bool, says(RECORDER, "Keep the last minutes, to be written when something goes wrong.")] = True
    recorder_dir: Annotated[
        str | Path | None,
        says(RECORDER, "Folder of the recordings, which hold prompts.", unset="for serve the user's state folder"),
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            msgspec.structs.force_setattr(self, "dtype", DTYPES.get(self.dtype, self.dtype))
        if self.speculative_config is not None:  # an object will do as well
            config = SpeculativeConfig.of(self.speculative_config)
            msgspec.structs.force_setattr(self, "speculative_config", config)
        if self.kv_events_config is not None:
            events = KvEventsConfig.of(self.kv_events_config)
            msgspec.structs.force_setattr(self, "kv_events_config", events)
            if events.is_on and not self.enable_prefix_caching:
                raise InvalidParameter(
                    "kv_events_config tells which prefixes can be found, and enable_prefix_caching is off: none can",
                    param="kv_events_config",
                )
        check_types(self)
        if self.quantization == UNQUANTIZED:
            msgspec.structs.force_setattr(self, "quantization", None)
        if self.quantization not in (None, *QUANTIZATIONS):
            offered = ", ".join(map(repr, QUANTIZATIONS))
            raise InvalidParameter(
                f"quantization must be one of {offered}, or {UNQUANTIZED!r} for weights as the checkpoint has them, "
                f"not {self.quantization!r}",
                param="quantization",
            )
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidParameter(f"{name} must be a finite number, not {value}", param=name)
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if not (is_path(value) and value != "") and not (name == "tokenizer" and value is None):
                raise InvalidParameter(f"{name} must be a folder or a hub id, not {value!r}", param=name)
        for name in ("weight_cache_dir", "recorder_dir"):
            value = getattr(self, name)
            if value is not None and not (is_path(value) and value != ""):  # "" would be the current folder
                raise InvalidParameter(f"{name} must be a folder, not {value!r}", param=name)
        if self.chat_template is not None and not is_path(self.chat_template):
            raise InvalidParameter(f"chat_template must be a file, not {self.chat_template!r}", param="chat_template")
        positive = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "block_size", "num_threads")
        for name in (*positive, "max_model_len", "num_kv_blocks", "max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(f"{name} must be at least 1, not {value}", param=name)
        if (target := self.inter_token_target_ms) is not None and not target > 0:
            raise InvalidParameter(
                f"inter_token_target_ms must be more than 0, not {target}", param="inter_token_target_ms"
            )
        for name in (
            "max_restarts",
            "max_num_overflow_reqs",
            "swap_space_gib",
            "stall_keep_s",
            "session_ttl_s",
            "max_sessions",
        ):
            value = getattr(self, name)
            if value < 0:
                raise InvalidParameter(f"{name} must be at least 0, not {value}", param=name)
        for name, most in AT_MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise InvalidParameter(f"{name} must be at most {most}, not {value}", param=name)
        for name in AT_LEAST_S:
            value = getattr(self, name)
            least, why = AT_LEAST_S[name]
            if value < least:
                raise InvalidParameter(f"{name} must be at least {least:g} s, not {value}: {why}", param=name)
        for name in (*AT_LEAST_S, "stall_keep_s", "session_ttl_s"):
            if (value := getattr(self, name)) > DURATION_S_MAX:
                raise InvalidParameter(f"{name} must be at most {DURATION_S_MAX:.0f} seconds, not {value}", param=name)
        if self.async_scheduling and self.speculative_config is not None:
            raise InvalidParameter(
                "async_scheduling must be off, or left out, where there is a speculative_config: what to guess next "
                "depends on the tokens of the step before",
                param="async_scheduling",
            )
        if not 0 <= self.session_share <= 1:
            raise InvalidParameter(
                f"session_share must be at least 0 and at most 1, not {self.session_share}", param="session_share"
            )
        if self.warm_spare and self.worker != "process":
            raise InvalidParameter('warm_spare needs worker "process"', param="warm_spare")
        for name in ("kv_cache_memory_utilization", "gpu_memory_utilization", "memory_share"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise InvalidParameter(f"{name} must be more than 0 and at most 1, not {value}", param=name)
        if self.device == "cuda" and self.kv_cache_memory_utilization != _default("kv_cache_memory_utilization"):
            raise InvalidParameter(
                "kv_cache_memory_utilization is a share of a CPU's free memory; on cuda gpu_memory_utilization says "
                "what share of the device's memory may be in use",
                param="kv_cache_memory_utilization",
            )
        if self.kv_cache_capacity_mode == "fixed" and self.num_kv_blocks is None:
            raise InvalidParameter('kv_cache_capacity_mode "fixed" needs num_kv_blocks', param="num_kv_blocks")
        if self.kv_cache_capacity_mode == "auto" and self.num_kv_blocks is not None:
            raise InvalidParameter('num_kv_blocks needs kv_cache_capacity_mode "fixed"', param="num_kv_blocks")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise InvalidParameter(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can decode in one step",
                param="max_num_batched_tokens",
            )

    @property
    def plans_ahead(self) -> bool:
        """Whether a step is planned while the one before it is computed: `async_scheduling`, or what None leads to."""
        if self.async_scheduling is not None:
            return self.async_scheduling
        return self.speculative_config is None and (self.worker == "process" or self.device == "cuda")

    @property
    def ignored(self) -> str | None:
        """A sentence about a setting that was given and does nothing on this device; None where there is none."""
        if self.device == "cuda" or self.gpu_memory_utilization == _default("gpu_memory_utilization"):
            return None
        return (
            f"gpu_memory_utilization {self.gpu_memory_utilization:g} is ignored on a CPU, where "
            f"kv_cache_memory_utilization says what share of the free memory the KV cache may take "
            f"({self.kv_cache_memory_utilization:g})"
        )


def _default(name: str) -> Any:
    return EngineConfig.__struct_defaults__[EngineConfig.__struct_fields__.index(name)]


def is_path(value: object) -> bool:
    """True for what may name a file: no system takes a name that holds a NUL."""
    return isinstance(value, str | Path) and "\0" not in str(value)
