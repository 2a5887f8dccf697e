"""The lines that the log has of each request: when it comes, and when it has ended, how that was. No text of it."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
from starlette.types import Scope

from novainfer import EngineDraining, SamplingParams
from novainfer.server.http.errors import ModelLoading
from novainfer.server.http.exchange import Exchange
from novainfer.server.logs import FIELDS
from novainfer.server.work import Work

log = logging.getLogger("novainfer.access")
requests_log = logging.getLogger("novainfer.requests")

PATH_CHARS_MAX = 256
# Asked every few seconds by machines: told at the level DEBUG, unless the answer is bad, and not to be expected.
PROBES = frozenset({"/health", "/healthz", "/livez", "/readyz", "/ready", "/ping", "/metrics", "/load"})

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


def log_arrival(work: Work, num_prompts: int, key: str | None) -> None:
    """Write the line of a generation that has come: what it asks for, in numbers. Words may be a client's text."""
    fields = {"key": key, **_generation(work), "num_prompts": num_prompts, **_asked(work)}
    details = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
    message = f"{work.id} came"
    requests_log.info("%s%s", message, details, extra={FIELDS: {"message": message} | fields})


def _asked(work: Work) -> dict[str, int | float]:
    """How many tokens it may have, and the other parameters that are numbers, where they are not as by default."""
    params = work.params
    assert params is not None, "it has begun"
    found = {field.name: getattr(params, field.name) for field in msgspec.structs.fields(params)}
    usual = SamplingParams(max_tokens=None)
    return {
        name: value for name, value in found.items() if isinstance(value, int | float) and value != getattr(usual, name)
    }


DETAILS = ("generation", "model", "prompt_tokens", "cached_tokens", "completion_tokens", "queue_ms", "ttft_ms", "end")


def log_generation(work: Work, key: str | None) -> None:
    """Write the line of a generation that has ended behind its request; `key` is the name of whose it was."""
    fields = {"id": work.request_id or None, "key": key, **_generation(work), **_used(work)}
    fields |= {"total_ms": _ms(time.perf_counter() - work.began_s), "end": work.ended_by or None}
    details = "".join(f" {name}={fields[name]}" for name in DETAILS[1:] if fields.get(name) is not None)
    message = f"{work.id} ended"
    log.info(
        "%s %.3fs id=%s%s",
        message,
        fields["total_ms"] / 1000,
        fields["id"] or "-",
        details,
        extra={FIELDS: {"message": message} | fields},
    )


def request_fields(scope: Scope, exchange: Exchange, status: int) -> dict[str, Any]:
    """What there is to say of a request; times in milliseconds.

    `end` is how it ended: finish reasons, an error's code, or "disconnect"; `key` is the name of the key. What a
    generation has used that goes on is told at its end.
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
        fields |= _generation(work)
        if not work.is_going_on:
            fields |= _used(work)
    fields["total_ms"] = _ms(time.perf_counter() - exchange.started)
    fields["end"] = exchange.ended_by or work.ended_by or None
    return fields


def _generation(work: Work) -> dict[str, Any]:
    return {"generation": work.id, "model": work.model}


def _used(work: Work) -> dict[str, Any]:
    return {
        "prompt_tokens": work.prompt_tokens,
        "cached_tokens": work.cached_tokens,
        "completion_tokens": work.completion_tokens,
        "queue_ms": _ms(work.queue_s),
        "ttft_ms": _ms(work.first_s - work.began_s) if work.first_s is not None else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
