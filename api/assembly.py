"""What an engine is made of, by its configuration: the system of actors, the link to the device, the recorder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from novainfer.actors.device.device import Device, ModelSettings
from novainfer.actors.device.link import MakeLink, ThreadLink
from novainfer.actors.device.location import ModelLocation, ModelSizes
from novainfer.actors.device.process import ProcessLink
from novainfer.actors.device.spec import DeviceSpec, ModelSpec, Progress
from novainfer.actors.inspection.recorder import Recorder
from novainfer.actors.routers.config import KvEventsConfig
from novainfer.actors.routers.publisher import KvEventPublisher
from novainfer.actors.runtime import Runtime, Timeouts
from novainfer.actors.tokenizer.chosen_template import read_template
from novainfer.actors.tokenizer.tokenizer import Tokenizer, load_for_caller, load_tokenizer
from novainfer.config import EngineConfig
from novainfer.fsm.device.worker import RestartPolicy
from novainfer.fsm.messages.errors import InvalidParameter, ModelLoadError
from novainfer.fsm.schedule.planner import Limits
from novainfer.fsm.schedule.speculation import Speculation
from novainfer.fsm.schedule.speculative_config import PARAM, SpeculativeConfig

logger = logging.getLogger(__name__)


def make_runtime(
    config: EngineConfig,
    *,
    device: Device | DeviceSpec | None,
    tokenizer: Tokenizer | None,
    on_progress: Progress | None,
) -> Runtime:
    """The actors of one engine; `device` and `tokenizer` replace the model's own."""
    is_process = config.worker == "process"
    load_own = tokenizer_loader(config)
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk_tokens=min(config.prefill_chunk_tokens, config.max_num_batched_tokens),
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        inter_token_target_ms=config.inter_token_target_ms,
        scheduling_policy=config.scheduling_policy,
        priority_wait_s=config.priority_wait_s,
        share_prefix_cache=config.share_prefix_cache,
        tells_routers=(publisher := _publisher(config)) is not None,
        session_ttl_s=config.session_ttl_s,
        session_share=config.session_share,
        max_sessions=config.max_sessions,
    )
    return Runtime(
        make_link=_link(config, device or model_spec(config), on_progress),
        load_tokenizer=lambda: tokenizer or load_own(),
        limits=limits,
        max_queue=(config.max_num_queued_reqs, config.max_num_queued_tokens, config.max_num_overflow_reqs),
        recorder=_recorder(config),
        publisher=publisher,
        speculation=_speculation(config),
        max_in_flight=2 if config.plans_ahead else 1,
        timeouts=Timeouts(**{name: getattr(config, name) for name in Timeouts.__struct_fields__}),
        restarts=RestartPolicy(config.max_restarts, config.restart_window_s, is_process=True) if is_process else None,
    )


def tokenizer_loader(config: EngineConfig) -> Callable[[], Tokenizer]:
    """What loads the configured tokenizer, or the model's own; raises `ModelLoadError`, and may take seconds."""
    return partial(_load_tokenizer, _tokenizer_location(config), config.tokenizer is not None, config.chat_template)


def model_sizes(config: EngineConfig) -> ModelSizes:
    """What the model's own files say of it; raises `ModelLoadError`."""
    return ModelLocation(config.model).sizes()


def callers_tokenizer(config: EngineConfig) -> Any:
    """transformers' tokenizer of the configured model; raises `ModelLoadError`. May take a second."""
    found = load_for_caller(_tokenizer_location(config).path())
    if config.chat_template is not None:
        found.chat_template = read_template(config.chat_template)
    return found


def check_before_start(config: EngineConfig, *, has_model: bool, has_tokenizer: bool) -> None:
    """Raise `ModelLoadError` or `InvalidParameter` for what a look at the disk can tell, before anything is started.

    `has_model` and `has_tokenizer` say that the model's own will be loaded, not a replacement of the caller's.
    """
    if has_model:
        check_model(config)
    if has_tokenizer and config.tokenizer is not None:
        ModelLocation(config.tokenizer, "tokenizer").check()
    if has_tokenizer and config.chat_template is not None:
        read_template(config.chat_template)
    _recorder(config).check_folder()


def check_model(config: EngineConfig) -> None:
    """Raise `ModelLoadError` when a file of a model is missing, or damaged as far as a look at its headers tells."""
    ModelLocation(config.model).check()
    if (draft := _draft(config)) is not None:
        draft.check()


def _tokenizer_location(config: EngineConfig) -> ModelLocation:
    if config.tokenizer is not None:
        return ModelLocation(config.tokenizer, "tokenizer")
    return ModelLocation(config.model)


def _load_tokenizer(location: ModelLocation, is_asked_for: bool, chat_template: str | Path | None) -> Tokenizer:
    """The tokenizer; when it is the model's own, an error blames the model's setting."""
    template = None if chat_template is None else read_template(chat_template)
    try:
        return load_tokenizer(location.path(), is_asked_for=is_asked_for, template=template)
    except ModelLoadError as error:
        raise ModelLoadError(error.message, param="tokenizer" if is_asked_for else "model") from error


def _link(config: EngineConfig, device: Device | DeviceSpec, on_progress: Progress | None) -> MakeLink:
    """How the worker's machine reaches its device."""
    if isinstance(device, DeviceSpec):
        if config.worker == "process":
            return partial(ProcessLink, device, warm_spare=config.warm_spare, on_progress=on_progress)
        device = device.make(on_progress)
    elif config.worker == "process":
        raise InvalidParameter('worker "process" makes its device there, and cannot take one from here', param="worker")
    return partial(ThreadLink, device, patience_s=config.step_timeout_s)


def model_spec(config: EngineConfig) -> ModelSpec:
    """What makes the device that runs the configured model, and the one that drafts for it."""
    if (ignored := config.ignored) is not None:
        logger.warning("%s", ignored)
    speculative = _speculative(config)
    settings = ModelSettings(
        location=ModelLocation(config.model),
        device=config.device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        kv_cache_capacity_mode=config.kv_cache_capacity_mode,
        kv_cache_memory_utilization=config.kv_cache_memory_utilization,
        memory_share=config.memory_share,
        num_kv_blocks=config.num_kv_blocks,
        num_threads=config.num_threads,
        native=config.native,
        batch_invariant=config.batch_invariant,
        enforce_eager=config.enforce_eager,
        swap_space_gib=config.swap_space_gib,
        gpu_memory_utilization=config.gpu_memory_utilization,
        generation_config=config.generation_config,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        attention_backend=config.attention_backend,
        weight_cache_dir=str(config.weight_cache_dir) if config.weight_cache_dir is not None else None,
        draft=_draft(config),
        num_speculative_tokens=speculative.num_speculative_tokens if speculative is not None else 0,
    )
    return ModelSpec(settings)


def _speculation(config: EngineConfig) -> Speculation | None:
    wanted = _speculative(config)
    return Speculation.of(wanted) if wanted is not None else None


def _speculative(config: EngineConfig) -> SpeculativeConfig | None:
    """As `EngineConfig` has read it, if it was given as text."""
    wanted = config.speculative_config
    return wanted if isinstance(wanted, SpeculativeConfig) else None


def _draft(config: EngineConfig) -> ModelLocation | None:
    """Where the model lies that proposes drafts, if one is to."""
    wanted = _speculative(config)
    if wanted is None or wanted.method != "draft_model":
        return None
    assert wanted.model is not None, "set where it is made"
    return ModelLocation(wanted.model, PARAM)


def _publisher(config: EngineConfig) -> KvEventPublisher | None:
    wanted = config.kv_events_config
    if not isinstance(wanted, KvEventsConfig) or not wanted.is_on:
        return None
    return KvEventPublisher(
        wanted.for_model(config.served_model_name or str(config.model)), config.max_num_batched_tokens
    )


def _recorder(config: EngineConfig) -> Recorder:
    folder = Path(config.recorder_dir) if config.recorder_dir is not None else None
    return Recorder(folder, is_enabled=config.recorder)
