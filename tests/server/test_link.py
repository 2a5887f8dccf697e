"""The link between an API process and the engine's: what comes over it harms nothing but the link, and is bounded."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.server.processes import requests as engine_side
from novainfer.server.processes.forward import Forward
from novainfer.server.processes.link import Link
from novainfer.server.processes.requests import Beginnings, Requests
from novainfer.server.processes.wire import (
    ANSWER_BYTES,
    ANSWERS_BYTES,
    BODY_BYTES,
    FRAME_BYTES_MAX,
    SHARE_BYTES,
    Abort,
    Answers,
    Asks,
    Beat,
    Close,
    Hello,
    LinkError,
    Listening,
    Opened,
    Pem,
    Renewed,
    frame,
    from_process,
    to_process,
)
from tests.server.conftest import eventually

HEAD = Opened(1, "1.1", "POST", "http", "/x", b"/x", b"", [(b"host", b"x")], ("127.0.0.1", 1), ("127.0.0.1", 2))


def head(request_id: int) -> Opened:
    return msgspec.structs.replace(HEAD, request_id=request_id)


async def silent(scope: Any, receive: Any, send: Any) -> None:
    """An app that reads nothing and answers nothing until its client leaves."""
    await asyncio.Event().wait()


# ---- frames ----------------------------------------------------------------------------------------------------------

MESSAGES = [
    Listening(),
    Beat(3, 0.1, 2.5),
    Asks(opened=[HEAD], bodies=[(1, b"body")], body_ends=[1], taken=[(1, 5)], done=[1], gone=[2]),
    Asks(),
]


def test_every_message_comes_out_as_it_went_in_however_the_bytes_come() -> None:
    data = b"".join(map(frame, MESSAGES))
    for size in (1, 2, 3, 7, len(data)):
        reader = from_process()
        found = [message for at in range(0, len(data), size) for message in reader.feed(data[at : at + size])]
        assert found == MESSAGES
    told = [
        Hello({"backlog": 5, "keep_alive_timeout_s": 75.0}, Pem(b"chain", b"key"), {"novainfer": 20}, False),
        Answers([1], [(1, 200, [(b"a", b"b")])], [(1, b"x")], [1], [2], [(1, 3)]),
        *(Renewed(Pem(b"c", b"k")), Close(), Abort()),
    ]
    assert list(to_process().feed(b"".join(map(frame, told)))) == told


@given(st.binary(max_size=200))
def test_bytes_that_are_no_messages_are_a_link_error_or_wait_for_more(data: bytes) -> None:
    for reader in (from_process(), to_process()):
        with suppress(LinkError):
            list(reader.feed(data))


@given(st.integers(0, 3), st.data())
def test_a_frame_with_one_byte_changed_is_a_message_or_a_link_error(which: int, data: st.DataObject) -> None:
    bad = bytearray(frame(MESSAGES[which]))
    bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    with suppress(LinkError):
        list(from_process().feed(bytes(bad)))


def test_a_frame_that_is_too_long_is_told_by_its_length_alone() -> None:
    with pytest.raises(LinkError, match="a frame of"):
        list(from_process().feed(struct.pack("!I", FRAME_BYTES_MAX + 1)))


# ---- the engine's end ------------------------------------------------------------------------------------------------


class EngineEnd:
    """Requests over a real link whose other end the test is."""

    def __init__(self, app: Any) -> None:
        self.requests = Requests(app, Beginnings())
        self.link: Link
        self.theirs: socket.socket
        self.answers: list[Answers] = []
        self._reader = to_process()

    async def read(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self.theirs, 1 << 20)
        self.answers += self._reader.feed(data)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self.read()


@asynccontextmanager
async def engine_end(app: Any) -> AsyncIterator[EngineEnd]:
    end = EngineEnd(app)
    ours, end.theirs = socket.socketpair()
    end.theirs.setblocking(False)

    def take(message: Any) -> None:
        if not isinstance(message, Asks):
            raise LinkError("what is not for it")
        end.requests.take(message)

    end.link = await Link.on(ours, from_process(), take)
    end.requests.over(end.link)
    try:
        yield end
    finally:
        end.requests.leave()
        end.link.end("the test is over")
        end.theirs.close()


NUMBERS = st.integers(-2, 6)
BYTES = st.sampled_from([b"", b"x", b"y" * 1000, b"z" * (BODY_BYTES + 1)])
RANDOM_ASKS = st.builds(
    Asks,
    opened=st.lists(st.integers(0, 6).map(head), max_size=3),
    bodies=st.lists(st.tuples(NUMBERS, BYTES), max_size=3),
    body_ends=st.lists(NUMBERS, max_size=3),
    taken=st.lists(st.tuples(NUMBERS, st.integers(-5, 50)), max_size=3),
    done=st.lists(NUMBERS, max_size=3),
    gone=st.lists(NUMBERS, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(RANDOM_ASKS, max_size=8))
def test_asks_of_any_kind_are_taken_or_a_link_error_and_leave_nothing(asks: list[Asks]) -> None:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            if message["body"]:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": message["body"]})

    async def scene() -> None:
        requests = Requests(echo, Beginnings())
        try:
            for one in asks:
                requests.take(one)
                await asyncio.sleep(0)
        except LinkError:
            pass
        requests.leave()
        await eventually(lambda: requests.num_open == 0)
        assert requests.untaken_bytes == 0
        assert not requests._open

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        (Asks(opened=[head(1), head(1)]), "a request 1 behind 1"),
        (Asks(gone=[1]), "never began"),
        (Asks(gone=[0]), "never began"),
        (Asks(opened=[head(1)], taken=[(1, 1)]), "that 1 bytes were taken, of 0"),
        (Asks(opened=[head(1)], taken=[(1, -1)]), "that -1 bytes were taken"),
        (Asks(opened=[head(1)], done=[1]), "an end that it does not have"),
        (Asks(opened=[head(1)], bodies=[(1, b"x" * (BODY_BYTES + 1))]), "of a body"),
    ],
)
async def test_what_cannot_be_ends_the_link_with_a_sentence(asks: Asks, said: str) -> None:
    async with engine_end(silent) as end:
        await asyncio.get_running_loop().sock_sendall(end.theirs, frame(asks))
        async with asyncio.timeout(10):
            assert said in await end.link.lost


async def test_bodies_of_a_turn_go_in_one_message() -> None:
    turn = asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await turn.wait()
        await send({"type": "http.response.body", "body": b"token", "more_body": True})
        await asyncio.Event().wait()

    async with engine_end(stream) as end:
        end.requests.take(Asks(opened=[head(number) for number in range(1, 101)]))
        await end.until(lambda: sum(len(one.starts) for one in end.answers) == 100)
        num_before = len(end.answers)
        turn.set()
        await end.until(lambda: sum(len(one.bodies) for one in end.answers) == 100)
        assert len(end.answers) == num_before + 1
        for request in list(end.requests._open.values()):
            request._task.cancel()  # type: ignore[union-attr]


async def test_pieces_of_bodies_that_come_in_one_turn_keep_their_order_and_their_requests() -> None:
    came: dict[bytes, bytes] = {}

    async def read(scope: Any, receive: Any, send: Any) -> None:
        found, message = b"", {"more_body": True}
        while message["more_body"]:
            message = await receive()
            found += message["body"]
        came[scope["path"].encode()] = found

    async with engine_end(read) as end:
        opened = [msgspec.structs.replace(head(number), path=f"/{number}") for number in (1, 2)]
        pieces = [(1, b"a"), (2, b"1"), (1, b"b"), (2, b"2"), (2, b"3"), (1, b"c")]
        end.requests.take(Asks(opened=opened, bodies=pieces, body_ends=[2, 1]))
        await eventually(lambda: len(came) == 2)
        assert came == {b"/1": b"abc", b"/2": b"123"}


async def test_an_app_waits_while_its_client_takes_nothing_and_no_other_does() -> None:
    sent: dict[int, int] = {}

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        number = int(scope["path"][1:])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            sent[number] = sent.get(number, 0) + 1000
            if number == 2:
                await asyncio.Event().wait()

    async with engine_end(flood) as end:
        opened = [msgspec.structs.replace(head(number), path=f"/{number}") for number in (1, 2)]
        end.requests.take(Asks(opened=opened))
        await eventually(lambda: sent.get(2) and sent.get(1, 0) > ANSWER_BYTES - 2000)
        for _ in range(20):
            await asyncio.sleep(0)
        assert ANSWER_BYTES - 2000 <= sent[1] <= ANSWER_BYTES + 1000
        before = sent[1]
        end.requests.take(Asks(taken=[(1, 4096)]))
        await eventually(lambda: sent[1] > before)
        for _ in range(20):
            await asyncio.sleep(0)
        assert sent[1] <= before + 4096 + 1000
        for request in list(end.requests._open.values()):
            request._task.cancel()  # type: ignore[union-attr]


async def test_what_a_client_that_leaves_had_not_taken_counts_no_more() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    requests = Requests(answer, Beginnings())
    requests.take(Asks(opened=[head(1), head(2)]))
    await eventually(lambda: requests.untaken_bytes == 2000)
    requests.take(Asks(gone=[1]))
    await eventually(lambda: requests.untaken_bytes == 1000)
    requests.leave()
    await eventually(lambda: requests.num_open == 0)
    assert requests.untaken_bytes == 0


async def test_with_many_answers_under_way_each_may_have_a_share_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ANSWERS_BYTES > ANSWER_BYTES
    monkeypatch.setattr(engine_side, "ANSWERS_BYTES", 10_000)
    sent: dict[int, int] = {}

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        number = int(scope["path"][1:])
        while True:
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            sent[number] = sent.get(number, 0) + 1000

    async with engine_end(flood) as end:
        opened = [msgspec.structs.replace(head(number), path=f"/{number}") for number in (1, 2, 3)]
        end.requests.take(Asks(opened=opened))
        await eventually(lambda: sum(sent.values()) > 3 * (SHARE_BYTES - 2000))
        for _ in range(20):
            await asyncio.sleep(0)
        assert max(list(sent.values())[1:]) <= SHARE_BYTES + 1000
        for request in list(end.requests._open.values()):
            request._task.cancel()  # type: ignore[union-attr]


async def test_requests_of_all_processes_begin_one_a_turn() -> None:
    begun: list[int] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        begun.append(1)
        await asyncio.Event().wait()

    beginnings = Beginnings()
    both = [Requests(note, beginnings) for _ in range(2)]
    for requests in both:
        requests.take(Asks(opened=[head(number) for number in range(1, 11)]))
    seen = []
    while len(begun) < 20:
        before = len(begun)
        await asyncio.sleep(0)
        seen.append(len(begun) - before)
    assert max(seen) == 1
    for requests in both:
        for request in list(requests._open.values()):
            request._task.cancel()  # type: ignore[union-attr]
    await eventually(lambda: not any(requests.num_open for requests in both))


# ---- the API process's end -------------------------------------------------------------------------------------------


class Client:
    """One request through `Forward`, as its ASGI server would have it."""

    def __init__(
        self, forward: Forward, path: str = "/v1/chat/completions", more: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.may_send = asyncio.Event()
        self.may_send.set()
        names = ("http_version", "method", "scheme", "raw_path", "query_string")
        scope = {name: getattr(HEAD, name) for name in names}
        scope |= {"type": "http", "path": path, "headers": [(b"x-request-id", b"mine"), *more]}
        scope |= {"client": None, "server": None}
        self.task = asyncio.create_task(forward(scope, self.incoming.get, self.send))

    async def send(self, message: Any) -> None:
        await self.may_send.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class EngineOf:
    """The engine's end, which the test plays."""

    def __init__(self) -> None:
        self.forward = Forward()
        self.asks: list[Asks] = []
        self.link: Link
        self._reader = from_process()

    async def read(self, theirs: socket.socket) -> None:
        while data := await asyncio.get_running_loop().sock_recv(theirs, 1 << 20):
            self.asks += self._reader.feed(data)

    def all(self, name: str) -> list[Any]:
        return [one for asks in self.asks for one in getattr(asks, name)]


@asynccontextmanager
async def api_end() -> AsyncIterator[EngineOf]:
    end = EngineOf()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    end.link = await Link.on(ours, to_process(), end.forward.take)
    end.forward.over(end.link)
    reading = asyncio.create_task(end.read(theirs))
    try:
        yield end
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        end.link.end("the test is over")
        theirs.close()


EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"100")]


@pytest.mark.parametrize(
    ("path", "headers", "body", "is_whole"),
    [
        ("/v1/chat/completions", EVENTS, b'data: {"error":', True),
        ("/v1/messages", EVENTS, b'event: error\ndata: {"type":"error"', True),
        ("/v1/responses", EVENTS, b'event: error\ndata: {"type":"error"', True),
        ("/v1/chat/completions", JSON, b"", False),
    ],
)
async def test_answers_that_have_begun_end_when_the_engines_process_is_gone(
    path: str, headers: Any, body: bytes, is_whole: bool
) -> None:
    async with api_end() as end:
        client = Client(end.forward, path)
        await eventually(lambda: end.all("opened"))
        end.forward.take(Answers(starts=[(1, 200, headers)], bodies=[(1, b"data: 1\n\n")]))
        await eventually(lambda: client.body)
        end.forward.lose()
        await client.task
        rest = client.body.removeprefix(b"data: 1\n\n")
        assert rest.startswith(body)
        assert bool(rest) == is_whole
        assert (not client.sent[-1].get("more_body", False)) == is_whole


async def test_requests_without_an_answer_get_a_503_when_the_engines_process_is_gone() -> None:
    async with api_end() as end:
        before = Client(end.forward)
        await eventually(lambda: end.all("opened"))
        end.link.end("it closed its link")
        end.forward.lose()
        after = Client(end.forward)
        for client in (before, after):
            await client.task
            assert client.sent[0]["status"] == 503
            assert (b"retry-after", b"2") in client.sent[0]["headers"]
            assert b"engine" in client.body.lower()


async def test_heads_of_many_requests_in_one_turn_go_in_messages_that_the_link_takes() -> None:
    """A client writes what its head holds, and those of hundreds of clients may come at once."""
    async with api_end() as end:
        fields = [(b"x-%d" % at, b"v" * 4000) for at in range(16)]
        number = FRAME_BYTES_MAX // 64_000 + 2
        clients = [Client(end.forward, more=fields) for _ in range(number)]
        await eventually(lambda: len(end.all("opened")) == number)
        assert not end.link.lost.done()
        end.forward.lose()
        await asyncio.gather(*(client.task for client in clients))


async def test_what_was_taken_is_told_in_large_pieces_and_not_for_each_event() -> None:
    async with api_end() as end:
        client = Client(end.forward)
        await eventually(lambda: end.all("opened"))
        end.forward.take(Answers(starts=[(1, 200, EVENTS)]))
        for number in range(100):
            end.forward.take(Answers(bodies=[(1, b"x" * 200)]))
            await eventually(lambda n=number: len(client.body) == 200 * (n + 1))  # type: ignore[misc]
        end.forward.take(Answers(ends=[1]))
        await client.task
        await eventually(lambda: end.all("done") == [1])
        taken = end.all("taken")
        assert 3 <= len(taken) <= 5
        assert sum(num_bytes for _, num_bytes in taken) <= 20_000


async def test_a_client_that_leaves_is_told_and_what_still_comes_for_it_is_dropped() -> None:
    async with api_end() as end:
        client = Client(end.forward)
        await eventually(lambda: end.all("opened"))
        client.incoming.put_nowait({"type": "http.disconnect"})
        await client.task
        await eventually(lambda: end.all("gone") == [1])
        end.forward.take(Answers(starts=[(1, 200, EVENTS)], bodies=[(1, b"late")], ends=[1]))
        assert not client.sent
        with pytest.raises(LinkError, match="never began"):
            end.forward.take(Answers(bodies=[(2, b"x")]))


async def test_an_app_that_gives_up_interrupts_the_send_that_its_client_does_not_take() -> None:
    async with api_end() as end:
        client = Client(end.forward)
        client.may_send.clear()
        await eventually(lambda: end.all("opened"))
        end.forward.take(Answers(starts=[(1, 200, EVENTS)], bodies=[(1, b"unread")]))
        for _ in range(5):
            await asyncio.sleep(0)
        end.forward.take(Answers(aborts=[1]))
        await client.task
        assert not client.sent
        assert end.forward.num_open == 0


async def test_what_came_before_an_abort_is_still_given_to_a_client_that_reads() -> None:
    async with api_end() as end:
        client = Client(end.forward)
        await eventually(lambda: end.all("opened"))
        end.forward.take(Answers(starts=[(1, 200, EVENTS)], bodies=[(1, b"before")], aborts=[1]))
        await client.task
        assert client.body == b"before"
        assert client.sent[-1]["more_body"]


async def test_a_body_goes_no_further_than_the_app_reads() -> None:
    async with api_end() as end:
        client = Client(end.forward)
        client.incoming.put_nowait({"type": "http.request", "body": b"x" * (3 * BODY_BYTES), "more_body": False})
        await eventually(lambda: sum(len(data) for _, data in end.all("bodies")) == BODY_BYTES)
        for _ in range(20):
            await asyncio.sleep(0)
        assert sum(len(data) for _, data in end.all("bodies")) == BODY_BYTES
        assert not end.all("body_ends")
        for _ in range(2):
            end.forward.take(Answers(taken=[(1, BODY_BYTES)]))
        await eventually(lambda: end.all("body_ends") == [1])
        assert sum(len(data) for _, data in end.all("bodies")) == 3 * BODY_BYTES
        client.incoming.put_nowait({"type": "http.disconnect"})
        await client.task
