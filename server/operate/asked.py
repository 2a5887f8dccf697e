"""Which model a question of an operator is about, and whether its key may ask."""

from __future__ import annotations

from starlette.requests import Request

from novainfer import InvalidParameter
from novainfer.server.http.errors import one_of
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.service import Service

OF_MODEL = {"model": "where several are served and more than one is loaded: the model that it is about"}


def named_model(service: Service, request: Request) -> str | None:
    """The model of `?model=`; None where it says none.

    Raises `ModelNotFound`, and `PermissionDenied` where this key may not use it; of other models it hears nothing.
    """
    exchange: Exchange = request.scope[SCOPE_KEY]
    name, served = request.query_params.get("model"), service.served
    if name is not None and served:
        service.check_named(name, served, exchange.viewer)
    return name


def asked_model(service: Service, request: Request) -> str | None:
    """As `named_model`; where it says none, the only one, or of several the only one that is loaded.

    None before a server knows the name of its only model. Raises `InvalidParameter` where more than one, or none, of
    those that this key may use is loaded.
    """
    exchange: Exchange = request.scope[SCOPE_KEY]
    if (name := named_model(service, request)) is not None:
        return name
    if service.models is None:
        for only in service.served:
            service.check_named(only, service.served, exchange.viewer)
        return None
    may = [one for one in service.models.names if service.may_use(exchange.viewer, one)]
    loaded = [one for one in may if one in service.models.engines()]
    if len(loaded) != 1:
        message = f"model must say which one, of {one_of(may)}" if may else "model must be one that this key may use"
        raise InvalidParameter(message, param="model")
    return loaded[0]
