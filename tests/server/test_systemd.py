"""What systemd hears of a server: a datagram for each, and nothing where it has not started it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from novainfer.server import serve as serve_module
from novainfer.server.operate import systemd
from tests.server.conftest import running
from tests.server.fakes import FakeEngine


@pytest.fixture(params=["a path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that hears what is sent to NOTIFY_SOCKET."""
    name = str(tmp_path / "notify") if request.param == "a path" else f"@novainfer-{tmp_path.name}-{id(request)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        sock.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield sock


def test_lines_arrive_as_one_datagram(manager: socket.socket) -> None:
    assert systemd.notify(systemd.READY, "STATUS=at http://127.0.0.1:8000")
    assert manager.recv(1000) == b"READY=1\nSTATUS=at http://127.0.0.1:8000"


def test_nothing_is_sent_where_nobody_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not systemd.notify(systemd.READY)
    assert not systemd.has_watchdog()
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert systemd.notify(systemd.READY)  # no error: a server goes on without its manager


async def test_signs_of_life_come_while_the_engine_moves_and_only_then(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setattr(serve_module, "ALIVE_CHECK_S", 0.001)
    engine = FakeEngine()
    async with running(engine):
        assert await asyncio.to_thread(manager.recv, 1000) == b"WATCHDOG=1"
        engine.stuck = "the scheduler does not move"
        manager.setblocking(False)
        drain(manager)  # what was sent before it got stuck
        await asyncio.sleep(0.02)
        assert drain(manager) == 0


def drain(manager: socket.socket) -> int:
    """Take what is there; returns how many datagrams that were."""
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while manager.recv(1000):
            taken += 1
    return taken
