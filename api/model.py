"""The model that is served, as it is now; and what it may be asked to become."""

from __future__ import annotations

from typing import Any

import msgspec

from novainfer.arguments import must_be
from novainfer.config import AT_MOST, EngineConfig
from novainfer.fsm.kv.blocks import blocks_for, tokens_in
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import PromptKind, WorkerReady
from novainfer.fsm.messages.mode import PRECISIONS, Mode
from novainfer.fsm.messages.pooling import ModelPooling
from novainfer.fsm.parsing.formats import Formats


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served; `created` is when it was loaded, in seconds since 1970.

    `dtype` is that of activations; `precision` says how the weights of matrix products came to be loaded: their dtype,
    what `quantization` asked for, or what the checkpoint was quantised to and by what ("int4 (gptq)"). `modes` are
    those that it can be computed in, best first: it comes up in the first, and goes on in another when memory stays
    short or kernels fail. `kernels` names, for each operation, the implementations of the first; `failed_kernels` says
    of others, by operation and name, how their self-test failed at the load: they should have been in use here, and
    something is wrong with them on this machine. `num_threads` is theirs on the CPU, 0 where it is not known.
    `kv_cache_dtype` and `enable_prefix_caching` are what was asked for. A step computes for at most `max_num_seqs`
    requests. `prompt_kind` is the most that a prompt can be: `chat`; `text`, where there is no chat template;
    `token_ids`, where there is no tokenizer. `memory` says what a GPU's is used for, in bytes: `total_bytes`,
    `model_bytes` (weights and buffers), the peak of `activation_bytes`, `graph_bytes`, `other_bytes` (outside torch),
    `kv_cache_bytes`, `free_bytes`. On a CPU, and where the number of KV blocks was fixed, it is empty. `step_costs` are
    (tokens, milliseconds) of a step, as measured at the start or at the last reconfiguration; a worker that has come up
    since may go by others.
    `formats` say how the model calls tools and reasons, by its chat template. A vector of `Engine.embed` has
    `hidden_size` numbers, and is made as `pooling` says, unless a request says otherwise.
    """

    name: str
    max_model_len: int
    vocab_size: int
    dtype: str
    precision: str = ""
    device: str
    num_kv_blocks: int
    created: int
    weight_bytes: int = 0
    kv_bytes_per_block: int = 0
    kernels: dict[str, str] = {}
    failed_kernels: dict[str, str] = {}
    modes: tuple[Mode, ...] = (Mode(),)
    sampling_defaults: dict[str, Any] = {}
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    max_num_seqs: int = 256
    num_threads: int = 0
    memory: dict[str, int] = {}
    prompt_kind: PromptKind = "chat"
    step_costs: list[tuple[int, float]] = []
    formats: Formats = Formats()
    hidden_size: int = 0
    pooling: ModelPooling = ModelPooling()


def model_info(
    config: EngineConfig, ready: WorkerReady, *, created: int, prompt_kind: PromptKind, formats: Formats
) -> ModelInfo:
    """What a worker that came up has said of its model."""
    return ModelInfo(
        name=config.served_model_name or str(config.model),
        max_model_len=min(ready.max_model_len, tokens_in(ready.num_blocks, config.block_size)),
        vocab_size=ready.vocab_size,
        dtype=str(ready.facts.get("dtype", "unknown")),
        precision=str(ready.facts.get("precision", "")),
        device=config.device,
        num_kv_blocks=ready.num_blocks,
        created=created,
        weight_bytes=int(ready.facts.get("weight_bytes", 0)),
        kv_bytes_per_block=int(ready.facts.get("kv_bytes_per_block", 0)),
        kernels=dict(ready.facts.get("kernels", {})),
        failed_kernels=dict(ready.facts.get("failed_kernels", {})),
        modes=ready.modes,
        sampling_defaults=dict(ready.facts.get("sampling_defaults", {})),
        block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
        max_num_seqs=config.max_num_seqs,
        num_threads=int(ready.facts.get("num_threads", 0)),
        memory=dict(ready.facts.get("memory", {})),
        prompt_kind=prompt_kind,
        formats=formats,
        hidden_size=int(ready.facts.get("hidden_size", 0)),
        pooling=_pooling(config, ready),
        step_costs=ready.step_costs,
    )


def _pooling(config: EngineConfig, ready: WorkerReady) -> ModelPooling:
    """What the model's folder says; `config` knows better, where it says anything."""
    own = msgspec.convert(ready.facts.get("pooling", {}), ModelPooling)
    return own if config.pooling == "auto" else ModelPooling(kind=config.pooling, normalize=own.normalize)


def checked_reconfiguration(info: ModelInfo, num_kv_blocks: Any, precision: Any) -> tuple[int | None, str | None]:
    """Both as plain values, as a recording holds them; `InvalidParameter`, naming the field, for what can never be."""
    if num_kv_blocks is None and precision is None:
        raise InvalidParameter("num_kv_blocks or precision must be given", param="num_kv_blocks")
    if precision is not None and precision not in PRECISIONS:
        offered = " or ".join(map(repr, PRECISIONS))
        raise InvalidParameter(f"precision must be {offered}, not {precision!r}", param="precision")
    precision = None if precision is None else PRECISIONS[PRECISIONS.index(precision)]
    if num_kv_blocks is None:
        return None, precision
    if isinstance(num_kv_blocks, bool):
        raise InvalidParameter(f"num_kv_blocks must be an integer, not {num_kv_blocks}", param="num_kv_blocks")
    must_be("num_kv_blocks", num_kv_blocks, int, "an integer")
    if num_kv_blocks > (most := AT_MOST["num_kv_blocks"]):
        raise InvalidParameter(f"num_kv_blocks must be at most {most}, not {num_kv_blocks}", param="num_kv_blocks")
    least = blocks_for(info.max_model_len, info.block_size)
    if num_kv_blocks < least:
        raise InvalidParameter(
            f"num_kv_blocks must be at least {least}, not {num_kv_blocks}: a request of {info.max_model_len} tokens "
            f"(max_model_len) needs so many blocks of {info.block_size}",
            param="num_kv_blocks",
        )
    return int(num_kv_blocks), precision
