"""One process that holds a device, seen from the loop: its socket, its end, and how to end it.

Everything it says arrives in order, then its end, exactly once, when the process is gone and reaped. It ends when it
wants to, when it is killed, and when it breaks the link: a process that cannot be talked to is of no use.

    starting ──▶ talking ──EOF, exit, garbage, kill──▶ dying ──reaped──▶ gone

A process that was killed gives its memory back before anything else of it can be seen to end: 0.1 s for torch alone, as
much again for each half GiB. So there is a pipe that one thread of it holds, in a table of files of its own: that is
closed within 0.1 ms, and a spare, which has memory of its own, need not wait for the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from novainfer.actors.device.wire import (
    EXIT_LINK,
    EXIT_MEMORY,
    EXIT_UNUSABLE,
    FRAME_BYTES_MAX,
    FROM_DEVICE,
    RECV_BYTES,
    FrameReader,
    FrameWriter,
    LinkError,
)

logger = logging.getLogger(__name__)

# What may wait for a process that does not read: two steps are under way at most, and a process that leaves three of
# the largest jobs unread is not going to.
UNSENT_BYTES_MAX = 3 * FRAME_BYTES_MAX
REAP_POLL_S = 0.005  # where the system has no pidfd
SERVER_MODULE = "novainfer.actors.device.server"
EXITS = {
    EXIT_LINK: "it did not understand what it was told",
    EXIT_MEMORY: "it ran out of memory",
    EXIT_UNUSABLE: "its device had failed in a way that only a new process recovers from",
}


class Child:
    """A running device server: `on_message(child, epoch, message)`, `on_dying(child)`, `on_end(child, sentence)`."""

    def __init__(
        self,
        on_message: Callable[[Child, int, Any], None],
        on_dying: Callable[[Child], None],
        on_end: Callable[[Child, str], None],
        *fds: int,
    ) -> None:
        """Start the process, which inherits `fds`; raises OSError when the system refuses."""
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_dying = on_dying
        self._on_end = on_end
        self._writer = FrameWriter()
        self._reader = FrameReader(FROM_DEVICE)
        self._unsent = bytearray()
        self._why: str | None = None  # what we ended it for
        self._is_dead = False  # its socket has ended, and so will it
        self._is_gone = False
        self._pidfd = -1
        self.heard_s = self._loop.time()  # when it last said something
        if not sys.executable:
            raise OSError("there is no interpreter to start, sys.executable is empty")
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.setblocking(False)
            numbers = (theirs.fileno(), their_life.fileno(), os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", SERVER_MODULE, *map(str, numbers)],
                pass_fds=(theirs.fileno(), their_life.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for us, and we end it in our own time
                env=environment(),
            )
        except BaseException:
            self._sock.close()
            self._life.close()
            raise
        finally:
            theirs.close()
            their_life.close()
        self.pid = self._process.pid
        self._loop.add_reader(self._sock, self._on_readable)
        self._loop.add_reader(self._life, self._on_life_ends)
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # an old kernel, or a sandbox that does not know the call
                self._pidfd = os.pidfd_open(self.pid)
                self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def is_talking(self) -> bool:
        """False once its end has begun."""
        return self._why is None and not self._is_dead and not self._is_gone

    def send(self, epoch: int, message: Any) -> None:
        """Put a message on its way; to a process that is ending it goes nowhere. Raises `UnsendableError`."""
        if not self.is_talking:
            return
        data = self._writer.frame(epoch, message)
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # it is ending: the reader will see it
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._sock, self._on_writable)
        self._unsent += data
        if len(self._unsent) > UNSENT_BYTES_MAX:
            self.kill("it no longer read what it was told")

    def look(self) -> None:
        """Take what it has said by now, without waiting for the loop to notice."""
        if self.is_talking:
            self._read()

    def kill(self, why: str = "it was ended") -> None:
        """End it at once, whatever it does; what it may still say is not heard, and its end comes."""
        if not self.is_talking:
            return
        self._why = why
        self._forget(self._sock)
        self._process.kill()
        if self._pidfd < 0:
            self._poll_exit()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def _on_readable(self) -> None:
        self._read()

    def _read(self) -> bool:
        """Take what is there; False when nothing is, and nothing more may come."""
        if self._sock.fileno() < 0:
            return False
        try:
            data = self._sock.recv(RECV_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:  # it is ending; or it has closed the link and lives on, of no use
            self._is_dead = True
            self._forget(self._sock)
            self._process.kill()
            if self._pidfd < 0:
                self._poll_exit()
            return False
        self.heard_s = self._loop.time()
        try:
            for epoch, message in self._reader.feed(data):
                self._on_message(self, epoch, message)
                if self._why is not None:
                    return False
        except LinkError as error:
            self.kill(f"it was ended, because it sent {error}")
        return True

    def _on_writable(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)  # it is ending: the reader will see it
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    def _on_life_ends(self) -> None:
        """The process is about to end: what it said before comes first."""
        self._forget(self._life)
        while self._read():
            pass
        if self.is_talking:
            self._on_dying(self)

    def _on_exit(self) -> None:
        """The process has ended: what it said before comes first."""
        while self._read():
            pass
        self._finish()

    def _poll_exit(self) -> None:
        if self._process.poll() is None:
            self._loop.call_later(REAP_POLL_S, self._poll_exit)
        else:
            self._finish()

    def _forget(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            sock.close()

    def _finish(self) -> None:
        if self._is_gone:
            return
        code = self._process.wait()  # it has ended: this takes no time
        self._is_gone = True
        self._forget(self._sock)
        self._forget(self._life)
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._on_end(self, self._sentence(code))

    def _sentence(self, code: int) -> str:
        what = f"the device's process {self.pid}"
        if self._why is not None:
            return f"{what} is gone: {self._why}"
        if code < 0:
            return f"{what} was killed by signal {-code} ({_signal_name(-code)})"
        return f"{what} ended with exit code {code}" + (f": {EXITS[code]}" if code in EXITS else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def environment() -> dict[str, str]:
    """Ours, with the way to the same modules, and nothing that spins beside the loop."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path}
