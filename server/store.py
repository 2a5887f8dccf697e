"""Responses that are kept, to be asked for again, in memory: bounded in number, in bytes and in age.

All that is kept is bytes, as clients are given them, and it comes by four ways only: a response is opened, gets an
event, ends, and is dropped. So a journal on a disk may stand behind it, and what is held is counted, not guessed.

One that is being made is never dropped to make room. Those that have ended make room for it, the one first that was
not looked at for longest; where there is none left, nothing more is taken.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from novainfer.server.change import Change
from novainfer.server.http.errors import ResponseNotFound, StoreFull

EVENT_BYTES = 64  # of an event beside its text: its object, and its place in a list
ITEM_BYTES = 256  # of an item's name in the store
RECORD_BYTES = 2048  # of a response beside all that is counted: its objects, and its names in the store


class Turn:
    """What one response adds to its conversation: JSON lists of the items it was given and of those it made.

    It is held by its response while that is kept, and by each turn behind it: a conversation stays whole as long as
    its latest response does, and what its responses share is there, and counted, once.
    """

    __slots__ = ("before", "given", "made", "num_holders")

    def __init__(self, before: Turn | None, given: bytes) -> None:
        self.before = before
        self.given = given
        self.made = b"[]"
        self.num_holders = 0

    def __iter__(self) -> Iterator[Turn]:
        """The turns of the conversation, from its beginning to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return reversed(turns)

    def hold(self) -> int:
        """One holder more; the bytes of all turns that nothing else holds."""
        turn: Turn | None = self
        num_bytes = 0
        while turn is not None:
            turn.num_holders += 1
            if turn.num_holders > 1:
                break
            num_bytes += len(turn.given) + len(turn.made)
            turn = turn.before
        return num_bytes

    def release(self) -> int:
        """One holder less; the bytes of all turns that nothing holds any more."""
        turn: Turn | None = self
        num_bytes = 0
        while turn is not None:
            turn.num_holders -= 1
            if turn.num_holders:
                break
            num_bytes += len(turn.given) + len(turn.made)
            turn = turn.before
        return num_bytes


class Record:
    """One response: its events so far (None: it keeps none), and once it has ended, what it is.

    `look` tells what it is while it is being made. Where it `is_in_background`, a `task` makes it; where not, its
    client's own request does, and takes it along when it ends.
    """

    __slots__ = (
        *("_changed", "_store", "answer", "events", "id", "is_dropped", "is_in_background"),
        *("item_ids", "look", "num_bytes", "owner", "task", "turn", "used_s"),
    )

    def __init__(self, store: ResponseStore, response_id: str, owner: str, turn: Turn, *, has_events: bool) -> None:
        self._store = store
        self._changed = Change()
        self.id = response_id
        self.owner = owner
        self.turn = turn
        self.events: list[bytes] | None = [] if has_events else None
        self.look: Callable[[], bytes] | None = None
        self.answer: bytes | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_in_background = False
        self.item_ids: list[str] = []  # of what it has made
        self.is_dropped = False
        self.num_bytes = 0  # beside its turn
        self.used_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.answer is not None

    def as_it_is(self) -> bytes:
        """The response now, in JSON."""
        if self.answer is not None:
            return self.answer
        assert self.look is not None, "a response that is being made can be looked at"
        return self.look()

    def add(self, event: bytes) -> None:
        """One more event; raises `StoreFull` where there is no room for it, and has taken it then, too."""
        if self.events is None or self.is_dropped:
            return
        self.events.append(event)
        self.tell()
        self._store.grow(self, len(event) + EVENT_BYTES)

    def end(self, answer: bytes, made: bytes, item_ids: list[str]) -> None:
        """It has ended as `answer`, with the items `made`, of these ids."""
        if self.is_dropped:
            return
        self.answer = answer
        self.item_ids = item_ids
        self._store.end(self, made)
        self.tell()

    def drop(self) -> None:
        """Keep it no longer; once more is fine."""
        if not self.is_dropped:
            self._store.drop(self)
            self.tell()

    def use(self) -> None:
        """It was looked at."""
        self._store.use(self)

    async def changed(self) -> None:
        """Wait until it has one more event, or has ended, or is dropped."""
        await self._changed.wait()

    def tell(self) -> None:
        """Wake the readers that wait for a change."""
        self._changed.tell()


class ResponseStore:
    """The responses of one server: at most `max_responses` with `max_bytes`, those that have ended for `ttl_s` seconds
    after they were looked at last.
    """

    def __init__(
        self, max_responses: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._all: dict[str, Record] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()  # the one first that was not looked at for longest
        self._makers: dict[str, Record] = {}  # by the id of an item, the response that has made it
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def open(
        self,
        response_id: str,
        owner: str,
        *,
        before: Turn | None = None,
        given: bytes = b"[]",
        has_events: bool = False,
    ) -> Record:
        """A response that is about to be made, behind the turn `before`; raises `StoreFull`."""
        self.sweep()
        record = Record(self, response_id, owner, Turn(before, given), has_events=has_events)
        self.num_bytes += record.turn.hold()  # before room is made, which may drop the response before it
        try:
            while len(self._all) >= self.max_responses:
                self._make_room()
            self._all[response_id] = record
            self.grow(record, RECORD_BYTES)
        except StoreFull:
            self.drop(record)
            raise
        return record

    def find(self, response_id: str, sees: str | None) -> Record:
        """The response of this id, if it is of the owner `sees`, or of any where that is None.

        Raises `ResponseNotFound`.
        """
        self.sweep()
        record = self._all.get(response_id)
        if record is None or sees not in (None, record.owner):
            raise ResponseNotFound(f"Response with id '{response_id[:100]}' not found: {self._policy}")
        self.use(record)
        return record

    def find_maker(self, item_id: str, sees: str | None) -> Record:
        """The response that has made the item of this id; raises as `find` does."""
        self.sweep()
        record = self._makers.get(item_id)
        if record is None or sees not in (None, record.owner):
            raise ResponseNotFound(f"Item with id '{item_id[:100]}' not found: {self._policy}")
        self.use(record)
        return record

    @property
    def _policy(self) -> str:
        kept = f"the last {self.max_responses}, for {self._ttl_s:g} s after they were last asked for"
        return (
            "it never was, was deleted, or is kept no longer "
            f"(this server keeps {kept}, and {self._max_bytes} bytes of them)"
        )

    def use(self, record: Record) -> None:
        """It was looked at: others are dropped before it."""
        record.used_s = self._clock()
        if record.id in self._ended:
            self._ended.move_to_end(record.id)

    def grow(self, record: Record, num_bytes: int) -> None:
        """`record` has so many bytes more; raises `StoreFull` where nothing can make room for them."""
        record.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._make_room()

    def end(self, record: Record, made: bytes) -> None:
        """`record` has its answer, and made these items."""
        assert record.answer is not None
        self.num_bytes += len(made) - len(record.turn.made)
        record.turn.made = made
        record.look = record.task = None
        self._ended[record.id] = record
        self._makers |= dict.fromkeys(record.item_ids, record)
        self.use(record)
        num_bytes = len(record.answer) + ITEM_BYTES * len(record.item_ids)
        record.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and len(self._ended) > 1:
            self._make_room()

    def drop(self, record: Record) -> None:
        """Forget `record`, and what of its conversation nothing else holds."""
        record.is_dropped = True
        record.look = None
        self._all.pop(record.id, None)
        self._ended.pop(record.id, None)
        for item_id in record.item_ids:
            self._makers.pop(item_id, None)
        self.num_bytes -= record.num_bytes + record.turn.release()
        if record.events is not None:
            record.events = []

    def sweep(self) -> None:
        """Drop what is too old."""
        too_old_s = self._clock() - self._ttl_s
        while self._ended and next(iter(self._ended.values())).used_s <= too_old_s:
            next(iter(self._ended.values())).drop()

    def _make_room(self) -> None:
        if not self._ended:
            raise StoreFull(
                "As many responses are being made as can be kept: try again in a moment, or send store: false"
            )
        next(iter(self._ended.values())).drop()
