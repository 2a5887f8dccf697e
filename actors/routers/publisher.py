"""The publisher exists because routers have their own pace: what they are told is sent by a thread, or left out.

    IndexChanged ──▶ queue, numbered ──▶ thread ──▶ PUB: topic, number, batch ──▶ subscribers
                                           └──▶ the last batches ◀── ROUTER: which are asked for again

A number is 8 bytes, big-endian, and taken as a change comes: whatever is left out, because the queue is full or a
subscriber is too slow, leaves a gap by which a router knows. Nothing here makes a step wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Any

import msgspec

from novainfer.actors.routers.config import PARAM, KvEventsConfig
from novainfer.actors.routers.wire import batch
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import IndexChanged

logger = logging.getLogger(__name__)

NO_ZMQ = f"{PARAM} needs the package pyzmq: pip install 'novainfer[events]'"
NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
REQUEST_FRAMES = 3  # of a replay: who asks, nothing, and the first number that is wanted
QUEUE_BYTES_MAX = 64 << 20  # of batches that wait to be sent, as objects
KEPT_BYTES_MAX = 256 << 20  # of those that can be had again, as they were sent
SUBSCRIBER_BYTES_MAX = 256 << 20  # that wait for a subscriber which never reads; all of these share one copy
TOKEN_OBJECT_BYTES = 36  # of a token id in a list: its integer, and the pointer to it
TOKEN_BYTES = 7  # of one as it is sent: the longest integer, and its part of a block's hash
LINGER_MS = 200  # for what was sent last to reach those who listen, when the engine ends


class KvEventPublisher:
    """Publishes what routers are told; `put` on the loop, sockets in a thread of its own."""

    def __init__(self, config: KvEventsConfig, step_tokens_max: int = 8192) -> None:
        """`step_tokens_max` tokens are in one batch at most: so many as a step computes."""
        self.config = config  # once it has started, with the ports that were chosen
        self.hwm = min(config.hwm, max(SUBSCRIBER_BYTES_MAX // (step_tokens_max * TOKEN_BYTES), 1))
        self.num_dropped = 0  # batches that found the queue full
        self._queue: deque[tuple[int, float, IndexChanged]] = deque()
        self._next = 0  # the number of the next change
        self._put_bytes = self._taken_bytes = 0  # of the queue: by the loop, and by the thread
        self._kept: deque[tuple[bytes, bytes]] = deque()  # numbers and batches
        self._kept_bytes = 0
        self._topic = config.topic.encode()
        self._is_stopped = self._is_dead = False
        self._is_awake = False  # the thread will look at the queue again
        self._sleeps = self._wakes = -1  # a pipe's ends
        self._zmq: Any = None
        self._context: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, or connect; raises `InvalidParameter` when that cannot be, or pyzmq is not there."""
        try:
            import zmq
        except ImportError:
            raise InvalidParameter(NO_ZMQ, param=PARAM) from None
        self._zmq, self._context = zmq, zmq.Context()
        try:
            publishing = self._context.socket(zmq.PUB)
            publishing.set_hwm(self.hwm)
            endpoint = self._open(publishing, "endpoint", self.config.endpoint, is_bound=self.config.is_bound)
            replaying, replay_endpoint = None, self.config.replay_endpoint
            if replay_endpoint is not None:
                replaying = self._context.socket(zmq.ROUTER)
                replaying.set_hwm(self.config.buffer_steps + 1)  # an answer has room; a reader that asks on loses some
                replay_endpoint = self._open(replaying, "replay_endpoint", replay_endpoint, is_bound=True)
        except InvalidParameter:
            self._context.destroy(linger=0)
            raise
        self.config = msgspec.structs.replace(self.config, endpoint=endpoint, replay_endpoint=replay_endpoint)
        how = "listens at" if self.config.is_bound else 'connects to (with "bind": true it would listen there)'
        logger.info("KV events: the publisher %s %s", how, endpoint)
        self._sleeps, self._wakes = os.pipe()
        self._thread = threading.Thread(
            target=self._run, args=(publishing, replaying), name="novainfer-kv-events", daemon=True
        )
        self._thread.start()
        os.write(self._wakes, b"\0")  # for what has come before

    def put(self, changed: IndexChanged) -> None:
        """Have it published; left out, with its number, where too much waits already."""
        number, self._next = self._next, self._next + 1
        if self._is_dead:
            return
        num_bytes = _object_bytes(changed)
        has_room = self._put_bytes - self._taken_bytes + num_bytes <= QUEUE_BYTES_MAX or not self._queue
        if len(self._queue) >= self.config.max_queue_size or not has_room:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("KV events come faster than they are sent: some are left out, and their numbers too")
            return
        self._put_bytes += num_bytes
        self._queue.append((number, time.time(), changed))
        if not self._is_awake and self._wakes >= 0:
            self._is_awake = True
            os.write(self._wakes, b"\0")

    def stop(self) -> None:
        """Send what waits, and that nothing can be found here any more; then close."""
        if self._thread is None:
            return
        self.put(IndexChanged([], [], is_cleared=True))
        self._is_stopped = True
        os.write(self._wakes, b"\0")
        self._thread.join()
        self._thread = None
        self._context.term()
        os.close(self._sleeps)
        os.close(self._wakes)
        self._sleeps = self._wakes = -1

    def _open(self, socket: Any, name: str, endpoint: str, *, is_bound: bool) -> str:
        """Listen at an endpoint, or connect to it; gives it with the port that it has now."""
        try:
            if not is_bound:
                socket.connect(endpoint)
                return endpoint
            if "::" in endpoint:
                socket.setsockopt(self._zmq.IPV6, 1)
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise InvalidParameter(f"{PARAM}: {name} {endpoint!r} cannot be used: {error}", param=PARAM) from None
        if not endpoint.endswith(":0"):
            return endpoint
        port = socket.getsockopt_string(self._zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"{endpoint.rpartition(':')[0]}:{port}"

    # ---- in the thread -------------------------------------------------------------------------------------------

    def _run(self, publishing: Any, replaying: Any) -> None:
        try:
            self._publish(publishing, replaying)
        except Exception:  # a bug; that routers know less is no reason for requests to end
            logger.exception("KV events are not published any more")
            self._is_dead = True
            self._queue.clear()
        finally:
            for socket in (publishing, replaying):
                if socket is not None:
                    socket.close(linger=LINGER_MS)

    def _publish(self, publishing: Any, replaying: Any) -> None:
        poller = self._zmq.Poller()
        poller.register(self._sleeps, self._zmq.POLLIN)
        if replaying is not None:
            poller.register(replaying, self._zmq.POLLIN)
        while not self._is_stopped:
            ready = dict(poller.poll())
            if self._sleeps in ready:
                os.read(self._sleeps, 4096)
                self._is_awake = False  # what comes from now on writes again
                self._send(publishing)
            if replaying in ready:
                self._replay(replaying)
        self._send(publishing)

    def _send(self, publishing: Any) -> None:
        while self._queue:
            number, at_s, changed = self._queue.popleft()
            self._taken_bytes += _object_bytes(changed)
            written = number.to_bytes(NUMBER_BYTES, "big"), batch(changed, at_s, self.config.rank)
            publishing.send_multipart((self._topic, *written))
            self._keep(written)

    def _keep(self, written: tuple[bytes, bytes]) -> None:
        """Let it be had again, in the place of the oldest ones."""
        self._kept.append(written)
        self._kept_bytes += len(written[1])
        while len(self._kept) > self.config.buffer_steps or self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self, replaying: Any) -> None:
        """Send one who asks all that is kept from a number on, and then its end."""
        frames = replaying.recv_multipart()
        if len(frames) != REQUEST_FRAMES or len(frames[2]) != NUMBER_BYTES:
            logger.warning("a request for KV events is none: it has %s", [len(frame) for frame in frames])
            return
        who, first = frames[0], frames[2]
        for number, written in self._kept:
            if number >= first:
                replaying.send_multipart((who, b"", self._topic, number, written))
        replaying.send_multipart((who, b"", b"", END_OF_REPLAY, b""))


def _object_bytes(changed: IndexChanged) -> int:
    """About what it takes while it waits."""
    num_tokens = sum(len(block.token_ids) for block in changed.stored)
    return (
        num_tokens * TOKEN_OBJECT_BYTES + sum(map(len, changed.removed)) + sum(len(one.name) for one in changed.stored)
    )
