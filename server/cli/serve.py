"""`novainfer serve`."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import click
import msgspec

from novainfer import EngineConfig
from novainfer.models import Models
from novainfer.server.cli.flags import Grouped, given
from novainfer.server.cli.models import NamedModels, named_models
from novainfer.server.cli.options import (
    Command,
    engine_config,
    engine_options,
    options_of,
    set_up_logs,
    unknown_variables,
)
from novainfer.server.engine import ServedEngine
from novainfer.server.http.clients import SHARES_MAX
from novainfer.server.operate import garbage
from novainfer.server.operate.recorder import default_folder, usable_default
from novainfer.server.settings import ServerSettings
from novainfer.setting import settings_of

log = logging.getLogger("novainfer.server")

_IMPORTING = threading.Lock()  # models load at once, each in a thread, and what they import has circles in it

_PATH = click.Path(exists=True, dir_okay=False, path_type=Path)


def _origins(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """The origins of all flags, each an origin or a JSON list of them, as vLLM takes it."""
    found: list[str] = []
    for text in values:
        if not text.lstrip().startswith("["):
            found.append(text)
            continue
        try:
            found += msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError:
            raise click.BadParameter(f"an origin, or a JSON list of strings, and not {text!r}") from None
    return tuple(origin.rstrip("/").lower() for origin in found)


# What a flag has beside what the setting says of it (see `flag_of_setting`).
MORE: dict[str, dict[str, Any]] = {
    "ssl_certfile": {"type": _PATH},
    "ssl_keyfile": {"type": _PATH},
    "api_keys": {"variables": ("NOVA_API_KEY",)},  # its old name
    "journal": {"type": click.Path(dir_okay=False, path_type=Path)},
    "keys_file": {"type": click.Path(dir_okay=False, path_type=Path)},
    "allowed_origins": {"metavar": "ORIGIN", "callback": _origins},
}


def server_options(command: Command) -> Command:
    """Give `command` the flags of a server."""
    for option in reversed(options_of(ServerSettings, MORE)):
        command = option(command)
    return command


def engines_options(command: Command) -> Command:
    """The flags of an engine, of which `--model` may be given several times."""
    model = {"multiple": True, "type": NamedModels(), "more": "several times, as NAME=PATH, for several models."}
    return engine_options(command, model=model)


@click.command(cls=Grouped)
@engines_options
@server_options
@click.pass_context
def serve(ctx: click.Context, /, **options: Any) -> int:
    """Serve MODEL (a folder, a hub name, or the demo model) over OpenAI's HTTP API until Ctrl-C."""
    from novainfer.server.serve import run_server

    models = named_models(ctx, options)
    config, settings = settings_from(ctx, options)
    set_up_logs(ctx, access_log=settings.access_log)
    if config.recorder and config.recorder_dir is None:
        log.warning("%s cannot be written: recordings stay in memory unless --recorder-dir is given", default_folder())
    for name in unknown_variables(os.environ):
        log.warning("%s in the environment is no setting, and does nothing", name)
    if len(models) < 2 and settings.model_idle_unload_s is None:
        return run_server(settings, lambda: make_engine(config))
    models = models or {config.served_model_name or str(config.model): str(config.model)}
    hosted = Models(
        {name: msgspec.structs.replace(config, model=path) for name, path in models.items()},
        make_engine_of_several,
        max_loaded=settings.max_loaded_models,
        idle_unload_s=settings.model_idle_unload_s,
        check=check_one_of_several,
        unloaded=garbage.let_go,
    )
    return run_server(settings, hosted)


def settings_from(ctx: click.Context, options: dict[str, Any]) -> tuple[EngineConfig, ServerSettings]:
    """The engine and the server that the flags ask for; raises `UsageError` or `InvalidParameter` naming the flag."""
    folder = usable_default() if options["recorder_dir"] is None else None
    config = engine_config(ctx, options, worker="process", recorder_dir=folder)
    fields = _client_limits(options, config) | given(ctx, settings_of(ServerSettings))
    return config, ServerSettings(
        **fields, stall_timeout_s=config.stall_timeout_s, has_priorities=config.scheduling_policy == "priority"
    )


def _client_limits(options: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """One client must not fill the queue for the others; whose turn it is in there is the scheduler's.

    An address may be a proxy's, so it has all while no other one is here.
    """
    is_given, has_keys = options["max_client_reqs"] is not None, bool(options["api_keys"] or options["keys_file"])
    slots, room, tokens = config.max_num_seqs, config.max_num_queued_reqs, config.max_num_queued_tokens
    limits = {"client_tokens": tokens}
    if has_keys:
        limits["max_client_tokens"] = max(tokens // 2, 1)
    if not is_given:
        limits["client_room"] = slots + room // SHARES_MAX
        if has_keys:
            limits["max_client_reqs"] = max((slots + room) // 2, 1)
    return limits


def check_one_of_several(config: EngineConfig) -> None:
    """As `check_before_start`, of one of several models, before another has to make room for it."""
    with _IMPORTING:
        from novainfer.assembly import check_before_start

    check_before_start(config, has_model=True, has_tokenizer=True)


def make_engine_of_several(config: EngineConfig) -> ServedEngine:
    """The engine of one of several models, which may be loaded at any time: without a bar."""
    with _IMPORTING:
        from novainfer import Engine

    return Engine(config)


def make_engine(config: EngineConfig) -> ServedEngine:
    """The real engine; imported here, because it brings torch along."""
    from novainfer import Engine
    from novainfer.progress import LoadingBar

    return Engine(config, on_progress=LoadingBar())
