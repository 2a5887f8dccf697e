"""Watches the answers of every server that a test's process starts: each stream has one ending, and nothing behind it.

`one_ending` is for conftest files to import. What a client was sent is seen here as the server's application sends it;
`answers_to` keeps it, for tests that look at the bodies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from novainfer.server import serve
from novainfer.server.http.exchange import WRITE_NOW_KEY
from novainfer.server.service import Service

OF_RESPONSES = ("response.completed", "response.failed", "response.incomplete", "error")
OF_MESSAGES = ("message_stop", "error")
STREAMS = re.compile(r"/v1/(chat/completions|completions|messages|responses)(/[^/]+)?")


class Event(msgspec.Struct, frozen=True):
    """One server-sent event."""

    kind: str  # its `event:`
    data: str


class Answer(msgspec.Struct):
    """What was sent for one request; `is_whole` once its end was."""

    method: str
    path: str
    query: str
    resumes: bool  # whether the client has some of it
    status: int = 0
    media_type: str = ""
    body: bytes = b""
    is_whole: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether it is server-sent events."""
        return self.media_type == "text/event-stream"

    def events(self) -> list[Event]:
        """Its events, without comments."""
        return events_of(self.body.decode())


def events_of(text: str) -> list[Event]:
    """The events of a stream's text; those that are nothing but comments are none."""
    found = []
    for block in text.split("\n\n"):
        fields = [line.partition(": ")[::2] for line in block.split("\n") if line and not line.startswith(":")]
        if fields:
            told = dict(fields)
            found.append(Event(told.get("event", ""), told.get("data", "")))
    return found


def is_ending(path: str, event: Event) -> bool:
    """Whether this event ends a stream of `path`."""
    if path.startswith("/v1/responses"):
        return json.loads(event.data)["type"] in OF_RESPONSES
    if path.startswith("/v1/messages"):
        return json.loads(event.data)["type"] in OF_MESSAGES
    return event.data == "[DONE]" or "error" in json.loads(event.data)


class Endings:
    """Counts the endings of one stream while it is sent."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = ""
        self._num = 0
        self._wrong: str | None = None

    def take(self, data: bytes) -> None:
        """What was sent now."""
        self._rest += data.decode()
        whole, mark, self._rest = self._rest.rpartition("\n\n")
        for event in events_of(whole + mark):
            if self._num:
                self._wrong = self._wrong or f"{event} comes behind the ending"
            self._num += is_ending(self._answer.path, event)

    def wrong(self) -> str | None:
        """What is wrong with it, when it has been sent as far as it ever will be."""
        if self._rest:
            return f"the stream breaks off inside an event: {self._rest[-200:]!r}"
        if self._answer.is_whole and not self._num and not self._answer.resumes:
            return "the stream ends without an ending"
        return self._wrong


class Witness:
    """Sees what applications send."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.kept: list[Answer] | None = None  # while somebody wants them

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, watched."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            answer = _answer_to(scope)
            endings = Endings(answer) if STREAMS.fullmatch(answer.path) else None

            def take(data: bytes) -> None:
                if answer.is_stream and endings is not None:
                    endings.take(data)
                if self.kept is not None:
                    answer.body += data

            async def watch(message: Message) -> None:
                await send(message)
                if message["type"] == "http.response.start":
                    answer.status = message["status"]
                    told = dict(message["headers"]).get(b"content-type", b"")
                    answer.media_type = told.partition(b";")[0].decode()
                elif message["type"] == "http.response.body":
                    answer.is_whole = not message.get("more_body", False)
                    take(message.get("body", b""))

            extensions = dict(scope.get("extensions") or {})
            if (write_now := extensions.get(WRITE_NOW_KEY)) is not None:

                def watch_now(data: bytes) -> bool:
                    if has_written := write_now(data):
                        take(data)
                    return bool(has_written)

                extensions[WRITE_NOW_KEY] = watch_now
                scope = {**scope, "extensions": extensions}
            try:
                await app(scope, receive, watch)
            finally:
                if answer.is_stream and endings is not None and (found := endings.wrong()) is not None:
                    self.wrong.append(f"{answer.method} {answer.path}: {found}")
                if self.kept is not None:
                    self.kept.append(answer)

        return watched

    @contextmanager
    def answers(self) -> Iterator[list[Answer]]:
        """Keep the answers that end in here."""
        self.kept = kept = []
        try:
            yield kept
        finally:
            self.kept = None


def _answer_to(scope: Scope) -> Answer:
    query = scope["query_string"].decode()
    has_some = "starting_after=" in query or any(name == b"last-event-id" for name, _ in scope["headers"])
    return Answer(scope["method"], scope["path"], query, has_some)


WITNESS = Witness()


@pytest.fixture(scope="session", autouse=True)
def watched() -> Iterator[None]:
    """Every server that this process starts is watched."""
    create: Callable[[Service], Any] = serve.create_app
    if getattr(create, "is_watched", False):
        yield
        return

    def create_watched(service: Service) -> ASGIApp:
        return WITNESS.around(create(service))

    create_watched.is_watched = True  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "create_app", create_watched)
        yield


@pytest.fixture(autouse=True)
def one_ending() -> Iterator[None]:
    """Fail the test in which a stream had no ending, or more than one."""
    yield
    wrong, WITNESS.wrong = WITNESS.wrong, []
    assert not wrong, wrong
