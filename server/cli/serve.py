"""`novainfer serve`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click
import msgspec

from novainfer import EngineConfig
from novainfer.fsm.parsing.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from novainfer.server.cli.flags import Grouped, flag
from novainfer.server.cli.options import API_KEY_VARIABLES, engine_config, engine_options, set_up_logging
from novainfer.server.engine import ServedEngine
from novainfer.server.http.clients import SHARES_MAX
from novainfer.server.operate.recorder import default_folder, usable_default
from novainfer.server.settings import ServerSettings

log = logging.getLogger("novainfer.server")

LISTEN, ACCESS, HTTP = "Address and TLS", "Access", "HTTP"
_PATH = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=Grouped)
@engine_options
@flag(LISTEN, "--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 for all.")
@flag(LISTEN, "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@flag(LISTEN, "--ssl-certfile", type=_PATH, help="Certificate (PEM): HTTPS, with HTTP/2 by ALPN.")
@flag(LISTEN, "--ssl-keyfile", type=_PATH, help="The certificate's key (PEM).")
@flag(LISTEN, "--self-signed", is_flag=True, help="HTTPS with a certificate made for this run.")
@flag(
    ACCESS,
    "--api-key",
    "api_keys",
    multiple=True,
    envvar=API_KEY_VARIABLES,
    help="A key that requests must carry; may be given several times. [env: NOVAINFER_API_KEY]",
)
@flag(
    ACCESS,
    "--admin-key",
    envvar="NOVAINFER_ADMIN_KEY",
    help="A key that sees and cancels all requests, and may inject faults. [env: NOVAINFER_ADMIN_KEY]",
)
@flag(
    ACCESS,
    "--allowed-origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin whose web pages may use the server, as in https://chat.example, or *; may be given several times, "
    "or as a JSON list. [default: none]",
)
@flag(ACCESS, "--access-log/--no-access-log", default=False, show_default=True, help="Log a line for each request.")
@flag(
    HTTP,
    "--tool-call-parser",
    type=click.Choice(list(TOOL_CALL_PARSERS)),
    help="The format in which the model calls tools. [default: by its chat template]",
)
@flag(
    HTTP,
    "--reasoning-parser",
    type=click.Choice(list(REASONING_PARSERS)),
    help="The format in which the model reasons. [default: by its chat template]",
)
@flag(HTTP, "--strict-fields", is_flag=True, help="Refuse request fields that have no effect, by name.")
@flag(
    HTTP,
    "--sse-keep-alive-interval",
    type=float,
    default=15.0,
    show_default=True,
    help="Most seconds of silence on a stream; 0: no limit.",
)
@flag(
    HTTP,
    "--shutdown-timeout",
    type=float,
    default=30.0,
    show_default=True,
    help="Seconds that running requests get when the server stops.",
)
@flag(HTTP, "--max-body-bytes", type=int, help="Largest request body. [default: 1 MB, more for long contexts]")
@flag(
    HTTP,
    "--http2-max-concurrent-streams",
    type=int,
    default=1000,
    show_default=True,
    help="Streams of one HTTP/2 connection.",
)
@flag(
    HTTP,
    "--max-client-reqs",
    type=int,
    help="Live choices of one client: a key, or an address. [default: of a key, half of what may run and wait, "
    "and while other keys are here, an equal share of --max-num-seqs; of an address, no limit, and while others "
    "are here, --max-num-seqs and an eighth of --max-num-queued-reqs]",
)
@flag(
    HTTP,
    "--max-client-unread",
    type=int,
    default=256,
    show_default=True,
    help="Answers that may wait for one client to read them.",
)
@click.pass_context
def serve(ctx: click.Context, /, **options: Any) -> int:
    """Serve MODEL (a folder, a hub name, or the demo model) over OpenAI's HTTP API until Ctrl-C."""
    from novainfer.server.serve import run_server

    folder = usable_default() if options["recorder_dir"] is None else None
    config = engine_config(ctx, options, worker="process", recorder_dir=folder)
    settings = ServerSettings(
        host=options["host"],
        port=options["port"],
        api_keys=tuple(options["api_keys"]),
        admin_key=options["admin_key"],
        allowed_origins=_origins(options["allowed_origins"]),
        ssl_certfile=options["ssl_certfile"],
        ssl_keyfile=options["ssl_keyfile"],
        self_signed=options["self_signed"],
        access_log=options["access_log"],
        strict_fields=options["strict_fields"],
        tool_call_parser=options["tool_call_parser"],
        reasoning_parser=options["reasoning_parser"],
        sse_keep_alive_interval_s=options["sse_keep_alive_interval"],
        shutdown_timeout_s=options["shutdown_timeout"],
        stall_timeout_s=config.stall_timeout_s,
        body_bytes=options["max_body_bytes"],
        http2_max_concurrent_streams=options["http2_max_concurrent_streams"],
        max_client_unread=options["max_client_unread"],
        **_client_limits(options, config),
    )
    set_up_logging(options, access_log=settings.access_log)
    if config.recorder and config.recorder_dir is None:
        log.warning("%s cannot be written: recordings stay in memory unless --recorder-dir is given", default_folder())
    return run_server(settings, lambda: make_engine(config))


def _origins(given: tuple[str, ...]) -> tuple[str, ...]:
    """The origins of all flags, each an origin or a JSON list of them, as vLLM takes it."""
    found: list[str] = []
    for text in given:
        if not text.lstrip().startswith("["):
            found.append(text)
            continue
        try:
            found += msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError:
            message = f"an origin, or a JSON list of strings, and not {text!r}"
            raise click.BadParameter(message, param_hint="--allowed-origins") from None
    return tuple(origin.rstrip("/").lower() for origin in found)


def _client_limits(options: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """One client must fill neither the queue nor, where clients have keys, the slots for the others.

    An address may be a proxy's, so it has all while no other one is here, and more than a key has while others are.
    """
    given, has_keys = options["max_client_reqs"], bool(options["api_keys"])
    slots, room, tokens = config.max_num_seqs, config.max_num_queued_reqs, config.max_num_queued_tokens
    limits = {"max_client_reqs": given, "client_tokens": tokens}
    if has_keys:
        limits["max_client_tokens"] = max(tokens // 2, 1)
    if given is None and has_keys:
        limits |= {"max_client_reqs": max((slots + room) // 2, 1), "client_slots": slots}
    elif given is None:
        limits["client_room"] = slots + room // SHARES_MAX
    return limits


def make_engine(config: EngineConfig) -> ServedEngine:
    """The real engine; imported here, because it brings torch along."""
    from novainfer import Engine
    from novainfer.progress import LoadingBar

    return Engine(config, on_progress=LoadingBar())
