"""The program of a device's process: it does what it is told over a socket that it has inherited.

The main thread takes one job after the other from the socket, does it on the device, and answers; where a device
computes beside its host, a thread of its jobs waits for steps and answers (jobs.py). Another one says ten times a
second that the process lives, and ends it when the other end of the socket is gone: nothing more would be asked.
Neither needs the other, so a long step is no silence, and a step that hangs keeps nothing alive.

What comes while a step is computed is read by that other thread: the next step is there, decoded, when the one before
it ends. It is woken for that only: the main thread says when by changing what the epoll that it waits on looks for.
A thread that reads everything would cost each step that waits for no other one 70 us, two wakes more.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import Any

from novainfer.actors.device.faulty import FaultyDevice, Injection
from novainfer.actors.device.jobs import Jobs, leaves_unusable
from novainfer.actors.device.wire import (
    EXIT_LINK,
    EXIT_MEMORY,
    EXIT_ORPHANED,
    EXIT_UNUSABLE,
    RECV_BYTES,
    TO_DEVICE,
    Beat,
    FrameReader,
    FrameWriter,
    Hello,
    LinkError,
    LogLine,
    Ping,
    Progress,
    UnsendableError,
    Unsent,
    WithoutGraphs,
)
from novainfer.fsm.device.process import SPARE_EPOCH
from novainfer.fsm.messages.events import Close, Fault, JobFailed, Run, StepFailed, Switch, Warm
from novainfer.fsm.messages.step import StepDone, StepMasks

logger = logging.getLogger("novainfer.actors.device.server")  # this is `__main__`

BEAT_S = 0.1
MASKS_LIMIT_S = 0.01  # for masks, where they cannot come while a step is computed
SHORT_S = 0.01  # after which what found no memory is tried again
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # <sys/prctl.h>
CLONE_FILES = 0x400  # <sched.h>
OOM_SCORE_ADJ = "500"  # when the machine's memory is short: this process comes back, the one with the clients would not


class DeviceServer:
    """Both threads' view of one socket; messages go out whole, under a lock, in the order of their numbers."""

    def __init__(self, sock: socket.socket, life_fd: int) -> None:
        self._sock = sock
        self._life_fd = life_fd
        self._lives = threading.Event()
        self._is_life_apart = False
        self._watched = select.epoll() if hasattr(select, "epoll") else None
        if self._watched is not None:
            self._watched.register(sock, 0)  # nothing but its end
        self._listening = threading.Lock()  # held by the one that reads
        self._reader = FrameReader(TO_DEVICE)
        self._unread = b""  # received, and not with the reader yet
        self._heard: deque[tuple[int, Any]] = deque()  # read while a step was computed
        self._last_given = -1  # the step that was given masks last
        self._writer = FrameWriter()
        self._lock = threading.Lock()
        self._epoch = SPARE_EPOCH  # of the job under way
        self._epochs: dict[int, int] = {}  # of the steps that are not answered, by their id
        self._device: FaultyDevice | None = None
        self._jobs: Jobs | None = None

    def serve(self) -> None:
        """Do jobs until the device is closed, the link ends, or the device is of no more use."""
        threading.Thread(target=self._live, name="novainfer-beat", daemon=True).start()
        self._lives.wait()
        if self._is_life_apart:
            os.close(self._life_fd)
        try:
            while True:
                self._epoch, message = self._next()
                self._take(message)
        except LinkError as error:
            print(f"novainfer: the engine sent {error}", file=sys.stderr)
            _exit(EXIT_LINK)
        except MemoryError:
            _exit(EXIT_MEMORY)
        except (
            BaseException
        ):  # a device may even leave the interpreter, whose own end would stop the other thread first
            traceback.print_exc()
            _exit(1)

    def say(self, message: Any, epoch: int | None = None) -> None:
        """Send; waits while the engine does not read, and ends the process when it is gone."""
        try:
            with self._lock:
                self._sock.sendall(self._writer.frame(self._epoch if epoch is None else epoch, message))
        except OSError:
            _exit(EXIT_ORPHANED)

    def _take(self, message: Any) -> None:
        if type(message) is Hello:
            _log_to(self, message.log_level)
            if message.weights_fd is not None:
                os.set_inheritable(message.weights_fd, False)
            self._device = FaultyDevice(message.spec.make(self._on_progress, message.weights_fd))
            self._jobs = Jobs(self._device, self._answer)
            return
        if type(message) is Ping:
            self.say(Beat())
            return
        assert self._device is not None, "a device's process is told first what it is to be"
        assert self._jobs is not None
        if type(message) is Injection:
            self._device.arm(message)
            return
        if type(message) is StepMasks:
            self._device.give(message)
            return
        if type(message) is Unsent:
            self.say(self._jobs.unsent(message.failed))
            return
        if type(message) is Run:
            self._epochs[message.plan.step_id] = self._epoch
            if (answer := self._step(message)) is not None and (why := self._answer(answer)) is not None:
                plan = message.plan
                self.say(self._jobs.unsent(StepFailed(plan.step_id, plan.epoch, Fault.EXCEPTION, why)))
            return
        answer = self._jobs.do(message)
        is_lost = leaves_unusable(self._device, answer)
        if is_lost and type(message) in (Warm, Switch):  # those capture
            self.say(WithoutGraphs())
        try:
            self.say(answer)
        except UnsendableError as error:
            answer = JobFailed(type(message).__name__, str(error), message.epoch)
            self.say(answer)
        if type(message) is Close:
            _exit(0)
        if is_lost:
            _exit(EXIT_UNUSABLE)

    def _answer(self, answer: StepDone | StepFailed) -> str | None:
        """Answer a step, from either thread; or why that cannot be sent.

        A device that is of no more use is not answered for: its step is lost with the process, and blamed once.
        """
        epoch = self._epochs.pop(answer.step_id, self._epoch)
        assert self._device is not None
        if type(answer) is StepFailed and leaves_unusable(self._device, answer):
            logger.error("the device is of no more use: %s", answer.message)
            _exit(EXIT_UNUSABLE)
        try:
            self.say(answer, epoch)
        except UnsendableError as error:
            return str(error)
        return None

    def _on_progress(self, num_done: int, num_all: int) -> None:
        self.say(Progress(num_done, num_all))

    # ---- listening -----------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, Any]:
        """The next message, and its epoch."""
        with self._listening:
            while (frame := self._heard.popleft() if self._heard else self._reader.next()) is None:
                self._receive()
            return frame

    def _receive(self, flags: int = 0) -> None:
        """Give the reader what has come; what raises MemoryError on the way is there the next time."""
        try:
            self._unread = self._unread or self._sock.recv(RECV_BYTES, flags)
        except ConnectionError:  # an engine that is killed leaves unread what was said to it
            _exit(EXIT_ORPHANED)
        if not self._unread:
            _exit(EXIT_ORPHANED)
        self._reader.take(self._unread)
        self._unread = b""

    def _step(self, run: Run) -> Any:
        """Let the other thread read while this one computes."""
        assert self._jobs is not None
        if run.plan.masks_to_come:
            self._hear_masks(run.plan.step_id)
        if self._watched is None:
            return self._jobs.do(run)
        self._watched.modify(self._sock, select.EPOLLIN)
        try:
            return self._jobs.do(run)
        finally:
            self._watched.modify(self._sock, 0)

    def _hear_masks(self, step_id: int) -> None:
        """Masks that have come with their step wake nobody. Where no other thread reads, they are waited for here."""
        with self._listening:
            self._sort()
            if self._watched is None:
                deadline_s = time.monotonic() + MASKS_LIMIT_S
                while self._last_given != step_id and (left_s := deadline_s - time.monotonic()) > 0:
                    if select.select([self._sock], [], [], left_s)[0]:
                        self._receive()
                        self._sort()

    def _sort(self) -> None:
        """Masks go to the device at once, and all else waits for the main thread."""
        while (frame := self._reader.next()) is not None:
            if type(frame[1]) is StepMasks and self._device is not None:
                self._device.give(frame[1])
                self._last_given = frame[1].step_id
            else:
                self._heard.append(frame)

    def _read_ahead(self) -> None:
        """What cannot be read, or finds no memory, is tried again by the main thread when its step has ended."""
        if not self._listening.acquire(blocking=False):
            return
        try:
            self._receive(socket.MSG_DONTWAIT)
            self._sort()
        except (BlockingIOError, LinkError):
            pass
        except MemoryError:
            time.sleep(SHORT_S)
        finally:
            self._listening.release()

    # ---- life ----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        # Where the system lets it, this thread alone holds the pipe whose end says that the process dies (child.py).
        self._is_life_apart = _unshare_files()
        self._lives.set()
        while True:
            with suppress(MemoryError):  # the main thread's trouble, and no reason to fall silent
                self.say(Beat())
            beat_s = time.monotonic() + BEAT_S
            while (left_s := beat_s - time.monotonic()) > 0:
                if self._watch(left_s):
                    self._read_ahead()

    def _watch(self, left_s: float) -> bool:
        """Wait for so long; True when there is something to be read. Ends the process when the other end is gone."""
        if self._watched is None:
            gone = select.poll()
            gone.register(self._sock, 0)
            if gone.poll(left_s * 1000):
                _exit(EXIT_ORPHANED)
            return False
        what = self._watched.poll(left_s)
        if what and what[0][1] & ~select.EPOLLIN:
            _exit(EXIT_ORPHANED)
        return bool(what)


class _Forward(logging.Handler):
    """Log lines go to the engine's process, whose log they are part of."""

    def __init__(self, server: DeviceServer) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().encode("utf-8", "backslashreplace").decode()  # names of files may be no text
        self._server.say(LogLine(record.name, record.levelno, text))


def _log_to(server: DeviceServer, level: int) -> None:
    ours = logging.getLogger("novainfer")
    ours.setLevel(level)
    ours.addHandler(_Forward(server))
    ours.propagate = False


def _exit(code: int) -> None:
    """End at once, from any thread: with torch loaded, a clean end of the interpreter takes a tenth of a second."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _unshare_files() -> bool:
    """Give the calling thread a table of files of its own; False where that cannot be (a sandbox may forbid it)."""
    try:
        return sys.platform == "linux" and bool(ctypes.CDLL(None).unshare(CLONE_FILES) == 0)
    except (OSError, AttributeError):
        return False


def _settle(parent: int) -> None:
    """Make this process one that ends with its engine and not before; where the system cannot help, EOF does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # A service manager tells every process of the service; the engine decides when its work is done.
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_NAME, b"nova-worker", 0, 0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(OOM_SCORE_ADJ)
    if os.getppid() != parent:
        _exit(EXIT_ORPHANED)  # it went before it could be asked for its death


def main(argv: list[str]) -> None:
    """The arguments are the numbers of the socket and of the pipe that says whether it lives, and the engine's pid."""
    fd, life_fd, parent = map(int, argv[1:])
    for number in (fd, life_fd):
        os.set_inheritable(number, False)  # or a compiler that a kernel starts would hold it open
    faulthandler.enable()
    _settle(parent)
    DeviceServer(socket.socket(fileno=fd), life_fd).serve()


if __name__ == "__main__":
    main(sys.argv)
