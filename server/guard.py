"""The one ASGI wrapper around all endpoints: nothing gets in unchecked, nothing is left hanging on the way out.

It reads the body first (bounded in size and time), runs the handler in this very task while a watcher waits for the
client to leave, cancels the handler the moment it does, turns every exception into one answer, and lets none out once
an answer has begun. Cancelling the handler is what cancels the request in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from novainfer import NovaInferError
from novainfer.server.http.errors import (
    AuthenticationError,
    MethodNotAllowed,
    PathNotFound,
    error_headers,
    error_status,
    log_if_ours,
)
from novainfer.server.http.exchange import (
    ADMITTED_KEY,
    SCOPE_KEY,
    Admitted,
    ClientGone,
    Exchange,
    lifespan,
    trace_headers,
)
from novainfer.server.http.limits import check_content_type, read_body
from novainfer.server.http.shapes import body_of_error, event_of_error
from novainfer.server.request_log import log_request
from novainfer.server.service import Service

CLIENT_GONE_STATUS = 499  # nginx's; for the log and the metrics only


class Guard:
    """ASGI app around the router."""

    def __init__(
        self, router: ASGIApp, service: Service, labels: Mapping[object, str], *, needs_keys: bool = True
    ) -> None:
        self._router = router
        self._service = service
        self._labels = labels  # endpoint -> path template, for the metrics
        self._needs_keys = needs_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        _leave_out(scope, service.settings.root_path)
        exchange = Exchange(
            scope,
            send,
            unread=service.unread,
            is_draining=lambda: service.is_draining,
            is_watched=service.settings.access_log or service.tracing is not None,
        )
        exchange.extra_headers = service.origins.headers(scope)
        scope[SCOPE_KEY] = exchange
        scope["app"] = self
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass  # a second request body event cannot come
            if not exchange.ended:  # Hypercorn reports its own end of a complete answer as a disconnect, too
                gone = True
                task.cancel()

        watcher: asyncio.Task[None] | None = None
        admitted: Admitted | None = None
        try:
            try:
                if (preflight := service.origins.preflight(scope)) is not None:
                    await exchange.answer(200, preflight, b"")
                    return
                await self._admit(scope, receive, exchange)
                if (admitted := scope.get("state", {}).get(ADMITTED_KEY)) is not None:
                    admitted.enter()
                watcher = asyncio.create_task(watch())
                await self._router(scope, _told_by(watcher), exchange.send)
            except ClientGone:
                gone = True
            except Exception as error:
                await _fail(exchange, error, timeout_s=self._service.settings.stall_timeout_s)
        except asyncio.CancelledError:
            if not gone:
                raise  # the server is being stopped
            task.uncancel()
        finally:
            if watcher is not None:
                watcher.cancel()
            if admitted is not None:
                admitted.leave()
            exchange.close()
            self._record(scope, exchange, gone=gone)

    async def _admit(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        refusal: NovaInferError | None = None
        service = self._service
        try:
            if self._needs_keys:
                await service.keys.refresh()
                exchange.viewer = viewer = service.keys.identify(scope)
                exchange.rate_limits = lambda: service.quotas.headers(viewer.owner)
            if scope["method"] == "POST":
                check_content_type(scope)
        except NovaInferError as error:
            refusal = error
            service.metrics.unknown_keys += isinstance(error, AuthenticationError)
        settings = service.settings
        bytes_max = 0 if refusal is not None else service.body_bytes_max
        try:
            body = await read_body(receive, bytes_max=bytes_max, timeout_s=settings.body_timeout_s)
            if scope["method"] == "POST":
                exchange.body = body  # of other methods none is asked for
        except NovaInferError as error:
            raise refusal or error from None
        if refusal is not None:
            raise refusal

    def _record(self, scope: Scope, exchange: Exchange, *, gone: bool) -> None:
        status = CLIENT_GONE_STATUS if gone else exchange.status
        route = self._labels.get(scope.get("endpoint"), "other")
        method = exchange.method if exchange.method in _METHODS else "other"  # bounded labels
        self._service.metrics.http_requests[method, route, status] += 1
        if gone:
            exchange.ended_by = "disconnect"
        if self._service.settings.access_log:
            log_request(scope, exchange, status)
        if (tracing := self._service.tracing) is not None:
            tracing.tell(scope, exchange, status, route, self._service.address)
        if exchange.work.is_going_on:
            exchange.work.leave_behind(exchange.request_id, trace_headers(scope))


def _leave_out(scope: Scope, root_path: str | None) -> None:
    """The path below `root_path`, before anything is decided by it: of a proxy that does not strip its prefix."""
    if root_path is not None and scope["path"].startswith(root_path + "/"):
        scope["path"] = scope["path"].removeprefix(root_path)


_METHODS = frozenset({"GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"})


async def _fail(exchange: Exchange, error: Exception, *, timeout_s: float) -> None:
    """Answer with `error`, or end a stream with it of which only the head was sent.

    Of an answer that has got further the log says it: returning then ends the stream.
    """
    if isinstance(error, HTTPException):
        error = _routing_error(error, exchange)
    exchange.ended_by = error.code if isinstance(error, NovaInferError) else NovaInferError.code
    log_if_ours(error, exchange.request_id)
    with contextlib.suppress(TimeoutError, ClientGone):
        async with asyncio.timeout(timeout_s):
            if not exchange.status:
                body = body_of_error(error, exchange.path, exchange.request_id)
                await exchange.answer(error_status(error), error_headers(error), body)
            elif exchange.is_begun_stream:
                event = event_of_error(error, exchange.path, exchange.request_id)
                await exchange.send({"type": "http.response.body", "body": event or b""})


def _routing_error(error: HTTPException, exchange: Exchange) -> NovaInferError:
    if error.status_code == 405:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return MethodNotAllowed(f"{exchange.path} takes {allow}, not {exchange.method}", allow=allow)
    return PathNotFound(f"Nothing is served at {exchange.path[:200]}: see /openapi.json for what is")


def _told_by(watcher: asyncio.Task[None]) -> Receive:
    """A `receive` for handlers, which find the body in the exchange: it tells of the client's leaving."""

    async def receive() -> Message:
        await asyncio.wait([watcher])
        return {"type": "http.disconnect"}

    return receive
