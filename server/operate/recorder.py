"""The flight recorder from outside: `POST /v1/recorder/dump`, SIGUSR2, and the folder that its files go to.

Only a server does this: a library installs no signal handlers, and writes a file only when it is told to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import NovaInferError
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.operate.asked import asked_model
from novainfer.server.service import Service

log = logging.getLogger("novainfer.server")


class Dumped(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/recorder/dump`: the name of the new file in the folder of `--recorder-dir`."""

    object: str = "recorder.dump"
    file: str


def default_folder() -> Path:
    """Where files go unless `--recorder-dir` says so: the user's state directory, as the XDG rules have it."""
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "novainfer" / "recordings"
    try:
        return Path.home() / ".local" / "state" / "novainfer" / "recordings"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "novainfer-recordings"


def usable_default() -> Path | None:
    """The default folder, made if need be; None where it cannot be written, as in a container with a read-only disk."""
    folder = default_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


async def dump_recorder(service: Service, request: Request) -> Response:
    """Write what the flight recorder holds to a file of the server; with an admin key, only for its owner."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    if service.keys.has_admin:
        service.keys.check_admin(exchange.viewer)
    name = asked_model(service, request)
    engine = service.any_engine(name) or service.ready_engine(name)
    path = await engine.dump_recorder()
    log.warning("The flight recorder was dumped to %s (it holds prompts)", path)
    return Response(msgspec.json.encode(Dumped(file=path.name)), media_type="application/json")


def dump_on_signal(service: Service, loop: asyncio.AbstractEventLoop) -> None:
    """Write a file whenever SIGUSR2 comes."""
    tasks: set[asyncio.Task[None]] = set()

    async def dump() -> None:
        engines = list(service.engines().values())
        if not engines:
            log.error("SIGUSR2: nothing is dumped: no model is loaded, or it is still loading")
        for engine in engines:
            try:
                path = await engine.dump_recorder()
                log.warning("SIGUSR2: the flight recorder was dumped to %s (it holds prompts)", path)
            except NovaInferError as error:
                log.error("SIGUSR2: %s", error.message)

    def on_signal() -> None:
        task = loop.create_task(dump())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGUSR2, on_signal)
