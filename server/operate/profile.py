"""`POST /start_profile` and `/stop_profile`, vLLM's names: what the loop did meanwhile, and each step by its phases.

Two files come of it, which hold names of functions and numbers, and nothing of requests:

    profile-TIME.trace.json   the steps, for ui.perfetto.dev or chrome://tracing
    profile-TIME.folded       stacks of the loop's thread and how often each was seen, for speedscope or flamegraph.pl

A thread looks at the loop's stack, which costs the loop some microseconds a look. What kernels do is the worker's, a
process of its own: of it the steps tell how long it took.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import RecorderUnavailable, ServerError
from novainfer.inspection import StepRecord
from novainfer.server.engine import ServedEngine
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.operate.asked import asked_model
from novainfer.server.service import Service

log = logging.getLogger("novainfer.server")

LOOK_EACH_S = 0.005
COLLECT_EACH_S = 0.5  # the engine remembers 1024 steps, which are two seconds of its fastest
STEPS_MAX = 100_000  # of a trace: about 40 MB
DURATION_S_MAX = 300.0  # then it ends by itself: a profile that was forgotten must not cost for ever
DEPTH_MAX = 64
US = 1_000_000


class ProfileConflict(ServerError):
    """A profile is being made already, or none is."""

    status = 409
    type = "conflict_error"
    code = "profile_conflict"


class Profiled(msgspec.Struct, kw_only=True):
    """The answer of both endpoints: `files` are in the folder of `--recorder-dir`, once the profile has ended."""

    object: str = "profile"
    state: str
    files: list[str] = []
    duration_s: float = 0.0
    num_steps: int = 0
    num_looks: int = 0


class Profile:
    """One profile in the making, of the loop that it is made in; `end` once."""

    def __init__(self, engine: ServedEngine, folder: Path) -> None:
        """Of `engine`'s steps, for files in `folder`."""
        self._engine = engine
        self.folder = folder
        self._began_s = time.time()
        self._ended_s: float | None = None
        self._steps: dict[tuple[int, int], StepRecord] = {}  # by epoch and id
        self._stacks: Counter[tuple[str, ...]] = Counter()
        self._stop = threading.Event()
        self._loop_thread = threading.get_ident()
        self._looker = threading.Thread(target=self._look, name="profile", daemon=True)
        self._looker.start()
        self._collector = asyncio.create_task(self._collect())

    async def end(self) -> None:
        """Look no more."""
        self._collector.cancel()
        self._take_steps()
        self._stop.set()
        await asyncio.to_thread(self._looker.join)
        self._ended_s = self._ended_s or time.time()

    @property
    def duration_s(self) -> float:
        """How long it has been going on."""
        return (self._ended_s or time.time()) - self._began_s

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def num_looks(self) -> int:
        return sum(self._stacks.values())

    def trace(self) -> bytes:
        """The steps in Chrome's format of trace events; times in microseconds since the beginning."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
            for tid, name in enumerate(("schedule", "device", "outputs"), 1)
        ]
        for step in self._steps.values():
            launched_us = (step.time - self._began_s) * US
            done_us = launched_us + (step.device_us or 0.0)
            name = f"step {step.step_id}"
            what = {
                "requests": step.num_requests,
                "tokens": step.num_tokens,
                "samples": step.num_samples,
                "outcome": step.outcome,
                "epoch": step.epoch,
            }
            phases = (
                (launched_us - step.schedule_us, step.schedule_us),
                (launched_us, step.device_us),
                (done_us, step.outputs_us),
            )
            for tid, (start_us, duration_us) in enumerate(phases, 1):
                if duration_us is not None:
                    at = {"ts": round(start_us, 1), "dur": round(duration_us, 1)}
                    events.append({"ph": "X", "name": name, "pid": 1, "tid": tid, **at, "args": what})
        return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})

    def folded(self) -> str:
        """A line for each stack of the loop, the outermost function first, with how often it was seen."""
        return "".join(f"{';'.join(stack)} {count}\n" for stack, count in self._stacks.most_common())

    async def _collect(self) -> None:
        while self.duration_s < DURATION_S_MAX:
            await asyncio.sleep(COLLECT_EACH_S)
            self._take_steps()
        self._stop.set()
        self._ended_s = time.time()
        log.warning("the profile has ended by itself after %g s: /stop_profile writes it", DURATION_S_MAX)

    def _take_steps(self) -> None:
        for step in self._engine.steps(last=1024):
            if step.time >= self._began_s and (
                len(self._steps) < STEPS_MAX or (step.epoch, step.step_id) in self._steps
            ):
                self._steps[step.epoch, step.step_id] = step  # again, if it was still running

    def _look(self) -> None:
        while not self._stop.wait(LOOK_EACH_S):
            frame = sys._current_frames().get(self._loop_thread)
            if frame is not None:
                self._stacks[_stack(frame)] += 1


def _stack(frame: FrameType) -> tuple[str, ...]:
    """The functions of a stack, the outermost first, and only the innermost of a deep one."""
    names: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(names) < DEPTH_MAX:
        names.append(f"{at.f_globals.get('__name__', '?')}:{at.f_code.co_qualname}")
        at = at.f_back
    return tuple(reversed(names))


async def start_profile(service: Service, request: Request) -> Response:
    """Begin a profile; only with the admin key."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    service.keys.check_admin(exchange.viewer)
    engine = service.ready_engine(asked_model(service, request))
    if engine.recorder_dir is None:
        raise RecorderUnavailable("A profile needs a folder for its files: start the server with --recorder-dir DIR")
    if service.profile is not None:
        raise ProfileConflict("A profile is being made already: end it with POST /stop_profile")
    service.profile = Profile(engine, engine.recorder_dir)
    return _answer(Profiled(state="running"))


async def stop_profile(service: Service, request: Request) -> Response:
    """End the profile, and write its files, whatever has become of its model; only with the admin key."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    service.keys.check_admin(exchange.viewer)
    profile, service.profile = service.profile, None
    if profile is None:
        raise ProfileConflict("No profile is being made: begin one with POST /start_profile")
    await profile.end()
    folder = profile.folder
    stem = f"profile-{datetime.now(UTC):%Y%m%dT%H%M%S%f}Z"
    files = {f"{stem}.trace.json": profile.trace(), f"{stem}.folded": profile.folded().encode()}
    try:
        await asyncio.to_thread(_write, folder, files)
    except OSError as error:
        raise RecorderUnavailable(f"{folder} cannot be written: {error.strerror}") from None
    log.info("a profile of %.1f s was written to %s", profile.duration_s, folder / stem)
    return _answer(
        Profiled(
            state="written",
            files=[*files],
            duration_s=round(profile.duration_s, 3),
            num_steps=profile.num_steps,
            num_looks=profile.num_looks,
        )
    )


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _answer(found: Profiled) -> Response:
    return Response(msgspec.json.encode(found), media_type="application/json")
