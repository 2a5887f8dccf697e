"""`POST /v1/admin/reconfigure`: another number of KV blocks, or another precision, while requests are answered."""

from __future__ import annotations

import logging

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer.fsm.messages.mode import Mode
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.openai.decode import decode_own
from novainfer.server.operate.asked import asked_model
from novainfer.server.service import Service

log = logging.getLogger("novainfer.server")


class Reconfiguration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/admin/reconfigure`: blocks of the KV cache, and "checkpoint" or "int8"; null: as it is."""

    num_kv_blocks: int | None = None
    precision: str | None = None


class Configuration(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/admin/reconfigure`: the engine as it is now.

    `precision` is that of the first of `modes`, in which it computes while all is well; sizes are in bytes.
    """

    object: str = "configuration"
    num_kv_blocks: int
    block_size: int
    kv_bytes_per_block: int
    precision: str
    modes: list[Mode]
    weight_bytes: int
    kernels: dict[str, str]


async def reconfigure(service: Service, request: Request) -> Response:
    """Reconfigure the engine, and answer when that is done or refused; only with the admin key.

    A client that leaves meanwhile leaves it going on.
    """
    exchange: Exchange = request.scope[SCOPE_KEY]
    service.keys.check_admin(exchange.viewer)
    await service.turns.wait(exchange.client, len(exchange.body))
    wanted = decode_own(Reconfiguration, exchange.take_body())
    engine = service.ready_engine(asked_model(service, request))
    info = await engine.reconfigure(num_kv_blocks=wanted.num_kv_blocks, precision=wanted.precision)
    precision = info.modes[0].precision
    log.info("Reconfigured: %d KV blocks, weights in precision %s", info.num_kv_blocks, precision)
    configuration = Configuration(
        num_kv_blocks=info.num_kv_blocks,
        block_size=info.block_size,
        kv_bytes_per_block=info.kv_bytes_per_block,
        precision=precision,
        modes=list(info.modes),
        weight_bytes=info.weight_bytes,
        kernels=info.kernels,
    )
    return Response(msgspec.json.encode(configuration), media_type="application/json")
