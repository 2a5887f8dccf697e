"""One HTTP request and its answer, as the guard and the handlers both see it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from ipaddress import IPv6Address
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Message, Receive, Scope, Send

from novainfer import InvalidParameter
from novainfer.server.http.shapes import is_of_messages
from novainfer.server.served import ServedModel
from novainfer.server.work import Work

if TYPE_CHECKING:
    from novainfer.server.http.clients import Unread

REQUEST_ID_CHARS_MAX = 128
SCOPE_KEY = "nova.exchange"
ADMITTED_KEY = "nova.admitted"  # of the scope's state
# Of the scope's extensions: takes bytes of a body that has begun at once, or says False where they have to be sent as
# ASGI has it. Not for an answer to HEAD.
WRITE_NOW_KEY = "nova.write_now"


class Viewer(msgspec.Struct, frozen=True):
    """What a key may do: its requests are marked with `owner`; it sees those of `sees`, or all if that is None.

    `name` is what people call it, and what logs may hold.
    """

    owner: str = ""
    sees: str | None = None
    is_admin: bool = False
    name: str = ""


class Admitted:
    """How many requests of one connection were let in, with their whole bodies, and have not ended."""

    num_requests = 0

    def enter(self) -> None:
        """One more is let in."""
        self.num_requests += 1

    def leave(self) -> None:
        """One of them has ended."""
        self.num_requests -= 1


class ClientGone(Exception):
    """The client went away before its request was complete, or does not take its answer."""


class Exchange:
    """Follows an answer on its way out: adds the headers every answer has, and knows whether it began and ended."""

    __slots__ = (
        "_address",
        "_is_last",
        "_is_stream",
        "_make_unread",
        "_model",
        "_send",
        "_was_begun",
        "_write_now",
        "asked",
        "body",
        "ended",
        "ended_by",
        "extra_headers",
        "ignored",
        "method",
        "num_bytes",
        "path",
        "rate_limits",
        "request_id",
        "started",
        "status",
        "user",
        "viewer",
        "work",
    )

    def __init__(
        self,
        scope: Scope,
        send: Send,
        *,
        unread: Callable[[str], Unread],
        is_draining: Callable[[], bool] = lambda: False,
        is_watched: bool = False,
    ) -> None:
        self.work = Work(is_watched=is_watched)
        self.started = self.work.began_s
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.request_id = _request_id(scope)
        self.body = b""
        self.asked = b""  # the body once more, for the journal
        self.viewer = Viewer()  # who asks; the guard finds out
        self.extra_headers: Sequence[tuple[bytes, bytes]] = ()  # what a page's browser wants to know
        self.rate_limits: Callable[[], Sequence[tuple[bytes, bytes]]] = tuple  # what the key may still use, then
        self.user: str | None = None  # whose budget the request takes its tokens of, beside its key's
        self.ignored = b""  # the value of x-nova-ignored-fields
        self.status = 0  # 0: no answer yet
        self.ended = False
        self.ended_by = ""  # the code of the error that was its answer, or "disconnect"
        self.num_bytes = 0
        self._model: ServedModel | None = None
        self._send = send
        extensions = scope.get("extensions", {}) if self.method != "HEAD" else {}
        self._write_now: Callable[[bytes], bool] | None = extensions.get(WRITE_NOW_KEY)
        self._address: str = (scope.get("client") or ("",))[0]
        self._make_unread = unread
        self._is_stream = False
        self._was_begun = False
        # A load balancer that is told so does not send its next request into a server that goes down. HTTP/2 has no
        # such header; its connections get a GOAWAY.
        self._is_last = is_draining if scope["http_version"].startswith("1") else lambda: False

    @property
    def client(self) -> str:
        """Whose request it is: its key's digest, or the address that it came from; of IPv6, the network."""
        return self.viewer.owner or network_of(self._address)

    @property
    def model(self) -> ServedModel:
        """The model that the body names, held until this exchange is over."""
        assert self._model is not None, "the handler has not asked for a model"
        return self._model

    def take(self, model: ServedModel) -> None:
        """`model`, which was held for this exchange, is the one that it is for."""
        assert self._model is None, "an exchange is for one model"
        self._model = model

    def close(self) -> None:
        """It is over, whatever became of it: let its model go."""
        if self._model is not None:
            self._model.release()

    def unread(self) -> Unread:
        """A watch of this answer's sends."""
        return self._make_unread(self.client)

    def ignore(self, name: str, why: str, *, is_strict: bool) -> None:
        """`name` has no effect, as its client is told; raises `InvalidParameter` where the server `is_strict`."""
        if is_strict:
            raise InvalidParameter(
                f"{name} {why}, and this server refuses what it would ignore: leave it out", param=name
            )
        self.ignored = b", ".join(filter(None, [self.ignored, name.encode()]))

    def take_body(self) -> bytes:
        """The body, which its handler needs once: a request that lives for minutes does not hold it."""
        body, self.body = self.body, b""
        return body

    async def begin_stream(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of a stream before the handler can: its own one will be left out."""
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        self._was_begun = True

    @property
    def is_begun_stream(self) -> bool:
        """True while a stream has its head, and nothing of its handler yet."""
        return self._was_begun

    async def send(self, message: Message) -> None:
        """ASGI's `send`, for the handlers."""
        if message["type"] == "http.response.start":
            if self._was_begun:
                self._was_begun = False
                return
            elapsed_ms = (time.perf_counter() - self.started) * 1000
            headers = list(message.get("headers", ()))
            headers.append((b"x-request-id", self.request_id.encode("ascii")))
            if is_of_messages(self.path):  # as Anthropic's clients know it
                headers.append((b"request-id", self.request_id.encode("ascii")))
            headers.append((b"openai-processing-ms", b"%d" % elapsed_ms))
            headers.extend(self.extra_headers)
            headers.extend(self.rate_limits())
            if self._is_last():
                headers.append((b"connection", b"close"))
            if self.ignored:
                headers.append((b"x-nova-ignored-fields", self.ignored))
            self.status = message["status"]
            await self._send({**message, "headers": headers})
            return
        if message["type"] == "http.response.body":
            self.num_bytes += len(message.get("body", b""))
            self.ended = not message.get("more_body", False)
            if self.ended and not self._is_stream:
                await self._send_whole(message)
                return
            self._is_stream = True  # and watches its sends itself
        await self._send(message)

    def stream(self) -> Callable[[bytes], bool]:
        """Its body is a stream, which watches its sends itself; gives what takes more of it at once, when it has begun.

        That answers False where more has to be sent by `send`; a token has eight functions less on its way than by
        that. Who calls it adds what it has taken to `num_bytes`.
        """
        self._is_stream = True
        return self._write_now or _not_now

    async def _send_whole(self, message: Message) -> None:
        try:
            with self.unread().whole():
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole answer."""
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _not_now(data: bytes) -> bool:
    return False


async def lifespan(receive: Receive, send: Send) -> None:
    """Nothing to do at either end: `serve` starts and stops the engine, in an order that lifespan cannot express."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called `name` (lower case), or None."""
    return next(iter(headers(scope, name)), None)


def headers(scope: Scope, name: bytes) -> list[bytes]:
    """All headers called `name` (lower case)."""
    return [bytes(value) for key, value in scope["headers"] if key.lower() == name]


def trace_headers(scope: Scope) -> dict[str, str]:
    """The headers that say of which trace a request is a part (W3C Trace Context)."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name.lower() in (b"traceparent", b"tracestate")
    }


def _request_id(scope: Scope) -> str:
    """The client's own x-request-id where it is fit to be a header and a log entry; else a new one."""
    given = header(scope, b"x-request-id")
    if given is not None and len(given) <= REQUEST_ID_CHARS_MAX:
        text = given.decode("latin-1")
        if is_printable_id(text):
            return text
    return secrets.token_hex(16)


def network_of(address: str) -> str:
    """What one client has: an address of IPv4, or all that begin with the same 64 bits, of IPv6."""
    if ":" not in address:
        return address
    try:
        found = IPv6Address(address)
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(IPv6Address(int(found) >> 64 << 64))


def is_printable_id(text: str) -> bool:
    """True for 1 to 128 printable ASCII characters without spaces or quotes."""
    return 0 < len(text) <= REQUEST_ID_CHARS_MAX and all("!" <= c <= "~" and c not in "\"'\\" for c in text)
