"""The line that the log has of each request: who asked for what, how long it took, and how it ended. No text of it."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import Scope

from novainfer import EngineDraining
from novainfer.server.http.errors import ModelLoading
from novainfer.server.http.exchange import Exchange
from novainfer.server.logs import FIELDS

log = logging.getLogger("novainfer.access")

PATH_CHARS_MAX = 256
# Asked every few seconds by machines: told at the level DEBUG, unless the answer is bad, and not to be expected.
PROBES = frozenset({"/health", "/healthz", "/livez", "/readyz", "/ping", "/metrics", "/load"})

EXPECTED = frozenset({ModelLoading.code, EngineDraining.code})  # of a server that starts, or stops


def log_request(scope: Scope, exchange: Exchange, status: int) -> None:
    """Write the line of a request that has ended with `status`."""
    is_as_expected = status < 400 or exchange.ended_by in EXPECTED
    level = logging.DEBUG if exchange.path in PROBES and is_as_expected else logging.INFO
    if not log.isEnabledFor(level):
        return
    fields = request_fields(scope, exchange, status)
    text = '%s "%s %s HTTP/%s" %d %dB %.3fs id=%s'
    values = (
        fields["client"] or "-",
        fields["method"],
        fields["path"],
        fields["http_version"],
        status,
        fields["response_bytes"],
        fields["total_ms"] / 1000,
        exchange.request_id,
    )
    details = "".join(f" {name}={fields[name]}" for name in DETAILS if fields.get(name) is not None)
    log.log(
        level,
        text + "%s",
        *values,
        details,
        extra={FIELDS: {"message": f"{fields['method']} {fields['path']} {status}"} | fields},
    )


DETAILS = ("generation", "model", "prompt_tokens", "cached_tokens", "completion_tokens", "queue_ms", "ttft_ms", "end")


def request_fields(scope: Scope, exchange: Exchange, status: int) -> dict[str, Any]:
    """What there is to say of a request; times in milliseconds.

    `end` is how it ended: finish reasons, an error's code, or "disconnect"; `key` is the name of the key.
    """
    client = scope.get("client")
    fields: dict[str, Any] = {
        "id": exchange.request_id,
        "method": exchange.method,
        "path": exchange.path.encode("unicode_escape").decode("ascii")[:PATH_CHARS_MAX],  # no forged lines in the log
        "http_version": scope["http_version"],
        "status": status,
        "client": client[0] if client else None,
        "key": exchange.viewer.name or None,
        "response_bytes": exchange.num_bytes,
    }
    work = exchange.work
    if work.prefix:
        fields |= {
            "generation": work.id,
            "model": work.model,
            "prompt_tokens": work.prompt_tokens,
            "cached_tokens": work.cached_tokens,
            "completion_tokens": work.completion_tokens,
            "queue_ms": _ms(work.queue_s),
            "ttft_ms": _ms(work.first_s - exchange.started) if work.first_s is not None else None,
        }
    fields["total_ms"] = _ms(time.perf_counter() - exchange.started)
    fields["end"] = exchange.ended_by or work.ended_by or None
    return fields


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
