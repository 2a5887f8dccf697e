"""Everything the HTTP side can be told, in one immutable record; the engine has its own (`EngineConfig`)."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec

from novainfer import InvalidParameter
from novainfer.fsm.messages.params import DURATION_S_MAX
from novainfer.fsm.parsing.formats import REASONING_PARSERS, TOOL_CALL_PARSERS

BODY_BYTES_MIN = 1_000_000  # a long chat history; grows with the model's context (`body_bytes_max`)
HTTP2_STREAMS_MAX = 2**31 - 1  # a connection has no more stream ids
BODY_BYTES_PER_TOKEN = 16  # an English token is 4 bytes of text, or up to 9 as a number in a JSON list
# What a browser calls a page's origin, or all of them.
_ORIGIN = re.compile(r"null|\*|[a-z][a-z0-9+.-]*://[a-z0-9._~%!$&'()*+;=:\[\]-]+")
KEEP_ALIVE_INTERVAL_S_MIN = 0.01  # below it, a stream that waits does nothing else


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server listens and what it lets in; raises `InvalidParameter`, naming the field.

    `sse_keep_alive_interval_s` is the longest silence on a stream before a comment line (0 switches them off).
    `stall_timeout_s` is the engine's: a client that takes nothing for so long loses its request, and after
    `stall_grace_s` more its stream. `body_bytes` limits a request's body; None means 1 MB, or more when the model's
    context is long. A client (a key, or an address) may have `max_client_reqs` live choices, `max_client_tokens` tokens
    of prompts that wait, and `max_client_unread` answers that wait for it to read them; None is no limit. While other
    clients are here, it may have no more than its equal share of `client_slots` live choices and of `client_tokens`
    tokens, and no more than `client_room` live choices.
    `tool_call_parser` and `reasoning_parser` name the formats of the model's answers; None: what its template says.
    With `strict_fields` a field that would have no effect is refused, instead of being named in the answer's header.
    Web pages of `allowed_origins` (`*`: of all) may use the server; of others, browsers let none read its answers.
    `shutdown_timeout_s` is what running requests get to finish when the server is told to stop. With `api_keys`, each
    key sees and cancels its own requests only; `admin_key` sees all, and is what drills (`POST /v1/faults`) need.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    self_signed: bool = False
    strict_fields: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    access_log: bool = False
    sse_keep_alive_interval_s: float = 15.0
    stall_timeout_s: float = 300.0
    stall_grace_s: float = 120.0  # to take the error event; its memory is bounded, and its blocks are free already
    shutdown_timeout_s: float = 30.0
    body_bytes: int | None = None
    body_timeout_s: float = 30.0
    http2_max_concurrent_streams: int = 1000
    max_client_reqs: int | None = None
    max_client_unread: int | None = 256
    max_client_tokens: int | None = None
    client_slots: int | None = None
    client_room: int | None = None
    client_tokens: int | None = None
    keep_alive_timeout_s: float = 75.0  # nginx's and SGLang's; above the 60 s of common load balancers
    backlog: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidParameter(f"port must be between 0 and 65535, not {self.port}", param="port")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and math.isnan(value):
                raise InvalidParameter(f"{name} must be a number of seconds, not {value}", param=name)
        for name in ("stall_timeout_s", "stall_grace_s", "body_timeout_s", "keep_alive_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidParameter(f"{name} must be more than 0 seconds", param=name)
        for name in ("sse_keep_alive_interval_s", "shutdown_timeout_s"):
            if not getattr(self, name) >= 0:
                raise InvalidParameter(f"{name} must be at least 0 seconds", param=name)
        if 0 < self.sse_keep_alive_interval_s < KEEP_ALIVE_INTERVAL_S_MIN:
            what = (
                f"sse_keep_alive_interval_s must be 0, which is none, or at least {KEEP_ALIVE_INTERVAL_S_MIN:g} seconds"
            )
            raise InvalidParameter(f"{what}, not {self.sse_keep_alive_interval_s}", param="sse_keep_alive_interval_s")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith("_s") and value > DURATION_S_MAX:
                raise InvalidParameter(f"{name} must be at most {DURATION_S_MAX:.0f} seconds, not {value}", param=name)
        for name in (
            "http2_max_concurrent_streams",
            "body_bytes",
            "max_client_reqs",
            "max_client_unread",
            "max_client_tokens",
            "client_slots",
            "client_room",
            "client_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(f"{name} must be at least 1, not {value}", param=name)
        if self.http2_max_concurrent_streams > HTTP2_STREAMS_MAX:
            message = f"must be at most {HTTP2_STREAMS_MAX}, not {self.http2_max_concurrent_streams}"
            raise InvalidParameter(f"http2_max_concurrent_streams {message}", param="http2_max_concurrent_streams")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidParameter("ssl_certfile and ssl_keyfile go together", param="ssl_certfile")
        if self.self_signed and self.ssl_certfile is not None:
            raise InvalidParameter("self_signed makes its own certificate; leave ssl_certfile out", param="self_signed")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise InvalidParameter("api_key must be ASCII and not empty", param="api_key")
        if self.admin_key is not None and (not self.admin_key or not self.admin_key.isascii()):
            raise InvalidParameter("admin_key must be ASCII and not empty", param="admin_key")
        for origin in self.allowed_origins:
            if _ORIGIN.fullmatch(origin) is None:
                wanted = "origins as browsers name them, such as https://chat.example:8443, or *"
                raise InvalidParameter(f"allowed_origins must hold {wanted}, not {origin!r}", param="allowed_origins")
        for name, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if (value := getattr(self, name)) is not None and value not in known:
                raise InvalidParameter(f"{name} must be one of {', '.join(known)}, not {value!r}", param=name)
        if self.admin_key in self.api_keys:
            raise InvalidParameter("admin_key must not be one of the API keys", param="admin_key")

    def body_bytes_max(self, max_model_len: int) -> int:
        """The body limit in bytes for a model whose context is `max_model_len` tokens."""
        return self.body_bytes or max(BODY_BYTES_MIN, BODY_BYTES_PER_TOKEN * max_model_len)
