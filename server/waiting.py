"""Requests that wait for their model to be loaded: each counts for its client and its key, and can be cancelled.

Who waits holds a place in the model's queue, as a request that runs holds one in its engine's; so it counts as one live
choice of its client and of its key until it has the model, and is counted anew by what it then begins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple, TypeVar

from novainfer import NovaInferError, RequestCancelled
from novainfer.inspection import RequestRecord, Transition
from novainfer.server.directory import RequestDirectory
from novainfer.server.http.clients import Clients
from novainfer.server.journal.records import Asked
from novainfer.server.keys.quotas import Hold, Quotas

STATE, REASON = "WAITING", "model"  # as inspection tells where they are, and why they wait

T = TypeVar("T")


class Waiter(NamedTuple):
    """Whose request waits, and by which names it may be asked for: `prefix`-`wanted`, and `wanted`.

    One with an `answer_id` goes on with that answer, which another server has let in.
    """

    client: str
    owner: str
    prefix: str
    wanted: str
    answer_id: str | None = None


class Returning(NamedTuple):
    """An answer of the journal that waits for its model; when it `is_over`, the answer goes on, or has ended."""

    asked: Asked
    is_over: asyncio.Event


class ModelWaits:
    """Those of one server, by the ids that the directory of live requests gives them."""

    def __init__(self, clients: Clients, quotas: Quotas, live: RequestDirectory) -> None:
        self._clients = clients
        self._quotas = quotas
        self._live = live
        self._waits: dict[str, _Wait] = {}

    async def until(self, acquire: Callable[[], Awaitable[T]], model: str, waiter: Waiter) -> T:
        """What `acquire` gives, when `model` has come up; raises what it raises.

        Raises also `RequestCancelled`; and before it waits what refuses a client, or a key, that has too much.
        """
        hold = self._enter(waiter)
        live = self._live.open(waiter.prefix, waiter.wanted, 1, waiter.owner, waiter.answer_id)
        wait = self._waits[live.engine_ids[0]] = _Wait(live.engine_ids[0], model, waiter.owner)
        try:
            return await acquire()
        except asyncio.CancelledError:
            if not wait.is_cancelled:
                raise
            wait.task.uncancel()
            raise RequestCancelled("The request was cancelled while it waited for its model") from None
        finally:
            del self._waits[wait.id]
            self._live.close(live)
            self._clients.begin(waiter.client, 0)
            self._clients.leave(waiter.client, 1)
            hold.settle(0, has_begun=False)

    def _enter(self, waiter: Waiter) -> Hold:
        if waiter.answer_id is not None:
            self._clients.enter_again(waiter.client, 1, 0)
            return self._quotas.admit_again(waiter.owner)
        hold = self._quotas.admit(waiter.owner, 1, 0)
        try:
            self._clients.enter(waiter.client, 1, 1, 0)
        except NovaInferError:
            hold.settle(0, has_begun=False)
            raise
        return hold

    def cancel(self, request_id: str) -> bool:
        """End one; False where none of this id waits."""
        if (wait := self._waits.get(request_id)) is None:
            return False
        if not wait.is_cancelled:
            wait.is_cancelled = True
            wait.task.cancel()
        return True

    def requests(self, owner: str | None = None, ids: Collection[str] | None = None) -> list[RequestRecord]:
        """Those of one owner, or of all; of these `ids`, where they are given."""
        return [
            wait.record()
            for wait in self._waits.values()
            if owner in (None, wait.owner) and (ids is None or wait.id in ids)
        ]


class _Wait:
    """One of them; made in the task that waits."""

    def __init__(self, request_id: str, model: str, owner: str) -> None:
        self.id = request_id
        self.model = model
        self.owner = owner
        self.is_cancelled = False
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._came = Transition(STATE, time.time())
        self._began_s = time.monotonic()

    def record(self) -> RequestRecord:
        return RequestRecord(
            id=self.id,
            model=self.model,
            state=STATE,
            reason=REASON,
            position=None,
            time=self._came.time,
            dwell_s=round(time.monotonic() - self._began_s, 6),
            prompt_tokens=None,
            cached_tokens=0,
            generated_tokens=0,
            draft_tokens=0,
            accepted_draft_tokens=0,
            max_tokens=None,
            blocks=0,
            host_blocks=0,
            preemptions=0,
            choices=[],
            history=[self._came],
        )
