"""`POST /models/load` and `/models/unload`, llama.cpp's names: a model of several comes or goes by hand."""

from __future__ import annotations

import logging

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import InvalidParameter
from novainfer.server.http.exchange import SCOPE_KEY, Exchange, Viewer
from novainfer.server.openai.decode import decode_own
from novainfer.server.operate.info import Model, model_of
from novainfer.server.service import Service

log = logging.getLogger("novainfer.server")


class ModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of both: `model`, and `timeout` seconds, to be loaded in, or for its requests to end in."""

    model: str
    timeout: float | None = None


async def load_model(service: Service, request: Request) -> Response:
    """Load a model, and answer when it is there, or cannot be; only with the admin key.

    One that has just failed is tried again at once.
    """
    wanted, timeout_s = await _wanted(service, request, service.settings.model_wait_timeout_s)
    assert service.models is not None
    log.info("model %s: loaded by hand", wanted)
    await service.models.load(wanted, timeout_s)
    return _answer(model_of(service, wanted, _viewer(request)))


async def unload_model(service: Service, request: Request) -> Response:
    """Let a model go when the requests that have it have ended; only with the admin key.

    It answers at once: `GET /v1/models` tells what has become of it. The next request for the model loads it again.
    """
    wanted, timeout_s = await _wanted(service, request, service.settings.shutdown_timeout_s)
    assert service.models is not None
    log.info("model %s: unloaded by hand", wanted)
    service.models.unload(wanted, timeout_s)
    return _answer(model_of(service, wanted, _viewer(request)))


async def _wanted(service: Service, request: Request, default_s: float) -> tuple[str, float]:
    exchange: Exchange = request.scope[SCOPE_KEY]
    service.keys.check_admin(exchange.viewer)
    await service.turns.wait(exchange.client, len(exchange.body))
    wanted = decode_own(ModelRequest, exchange.take_body())
    if service.models is None:
        raise InvalidParameter("model cannot be loaded or unloaded: this server has one, for good", param="model")
    service.check_model(wanted.model, exchange.viewer)
    if wanted.timeout is not None and not wanted.timeout >= 0:
        raise InvalidParameter(f"timeout must be at least 0 seconds, not {wanted.timeout:g}", param="timeout")
    return wanted.model, default_s if wanted.timeout is None else wanted.timeout


def _viewer(request: Request) -> Viewer:
    exchange: Exchange = request.scope[SCOPE_KEY]
    return exchange.viewer


def _answer(model: Model) -> Response:
    return Response(msgspec.json.encode(model), media_type="application/json")
