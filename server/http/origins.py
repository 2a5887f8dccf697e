"""Which web pages of other origins may use the server: none, unless the operator names them (`--allowed-origins`).

A browser asks before it sends what no form could: a preflight, which carries no key. Without an answer that allows it,
the page's request is not sent; without the header on an answer, the page cannot read that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.types import Scope

from novainfer.server.http.errors import Headers
from novainfer.server.http.exchange import header

ANY = "*"
PREFLIGHT_KEPT_S = 600  # by a browser; a server that is started anew with other origins is obeyed after it
HEADERS_BYTES_MAX = 1024  # of names that a page may ask for
_METHODS = b"DELETE, GET, POST"  # of all endpoints there are
_NAMES = re.compile(rb"[A-Za-z0-9_, -]*")
# What openai-js and people read of an answer, beside its body.
_EXPOSED = (
    b"openai-processing-ms, request-id, retry-after, retry-after-ms, x-nova-ignored-fields, x-novainfer-queue, "
    b"x-ratelimit-limit-requests, x-ratelimit-limit-session-tokens, x-ratelimit-limit-tokens, "
    b"x-ratelimit-limit-user-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-session-tokens, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-remaining-user-tokens, x-ratelimit-reset-requests, "
    b"x-ratelimit-reset-tokens, x-request-id, x-should-retry"
)


class Origins:
    """The origins that are allowed; `*` among them allows all."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(origin.encode("ascii") for origin in allowed)
        self._is_any = ANY in allowed

    def headers(self, scope: Scope) -> Headers:
        """What an answer to this request carries, so that its page may read it."""
        if not self._allowed:
            return []
        if self._is_any:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        vary = [(b"vary", b"origin")]  # a cache keeps the answers to different origins apart
        origin = header(scope, b"origin")
        if origin is None or origin.lower() not in self._allowed:
            return vary
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED), *vary]

    def preflight(self, scope: Scope) -> Headers | None:
        """The answer's own headers, when this is a browser that asks for a page of an allowed origin."""
        if scope["method"] != "OPTIONS" or header(scope, b"access-control-request-method") is None:
            return None
        origin = header(scope, b"origin")
        if origin is None or not (self._is_any or origin.lower() in self._allowed):
            return None
        asked = header(scope, b"access-control-request-headers") or b""
        is_sane = len(asked) <= HEADERS_BYTES_MAX and _NAMES.fullmatch(asked)
        allowed = asked if is_sane else b"authorization, content-type"
        return [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", allowed),
            (b"access-control-max-age", b"%d" % PREFLIGHT_KEPT_S),
        ]
