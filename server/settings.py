"""Everything the HTTP side can be told, in one immutable record; the engine has its own (`EngineConfig`)."""

from __future__ import annotations

import math
import re
import socket
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from novainfer import InvalidParameter
from novainfer.config import READERS
from novainfer.fsm.messages.params import DURATION_S_MAX, check_types
from novainfer.fsm.parsing.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from novainfer.setting import says

# The sections of `--help` that settings of a server stand in.
LISTEN, ACCESS, HTTP, LOGS = "Address and TLS", "Access", "HTTP", "Logs and traces"
MODELS = "Several models"
GENERAL = "General"  # also of the command line's own, such as --help

BODY_BYTES_MIN = 1_000_000  # a long chat history; grows with the model's context (`body_bytes_max`)
HTTP2_STREAMS_MAX = 2**31 - 1  # a connection has no more stream ids
HTTP2_WINDOW_BYTES_MIN = 65_535  # RFC 9113 6.9.2: what a connection begins with can only be made larger
HTTP2_WINDOW_BYTES_MAX = 2**31 - 1  # RFC 9113 6.9.1
API_PROCESSES_MAX = 64  # one engine's loop feeds four or so
BACKLOG_MAX = 65_535  # the kernel takes what is smaller: this, or net.core.somaxconn
BODY_BYTES_PER_TOKEN = 16  # an English token is 4 bytes of text, or up to 9 as a number in a JSON list
# What a browser calls a page's origin, or all of them.
_ORIGIN = re.compile(r"null|\*|[a-z][a-z0-9+.-]*://[a-z0-9._~%!$&'()*+;=:\[\]-]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")
_HTTP_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
JOURNAL_BYTES_MIN = 1 << 18  # a handful of answers
KEEP_ALIVE_INTERVAL_S_MIN = 0.01  # below it, a stream that waits does nothing else


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server listens and what it lets in; raises `InvalidParameter`, naming the field.

    Each field is annotated with the sentence that `--help`, docs/reference.md and the schema of `--config` show of it;
    those without a flag follow from the engine's settings (`novainfer.server.cli.serve`).

    `stall_timeout_s` is the engine's: a client that takes nothing for so long loses its request, and after
    `stall_grace_s` more its stream. While other clients are here, a client may have no more than `client_room` live
    choices, and its equal share of `client_tokens` tokens.
    With `api_keys`, each key sees and cancels its own requests only; `admin_key` sees all, and is what drills
    (`POST /v1/faults`) need.
    """

    host: Annotated[str, says(LISTEN, "Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, says(LISTEN, "Port to listen at; 0 takes a free one.")] = 8000
    ssl_certfile: Annotated[Path | None, says(LISTEN, "Certificate (PEM): HTTPS, with HTTP/2 by ALPN.")] = None
    ssl_keyfile: Annotated[Path | None, says(LISTEN, "The certificate's key (PEM).")] = None
    self_signed: Annotated[bool, says(LISTEN, "HTTPS with a certificate made for this run.")] = False
    api_processes: Annotated[
        int,
        says(
            LISTEN,
            "Processes that speak HTTP and TLS for the engine's, which has the API, each with file descriptors "
            "(ulimit -n), and so connections, of its own; 0: the engine's speaks HTTP itself.",
        ),
    ] = 0
    backlog: Annotated[int, says(LISTEN, "Connections that may wait to be accepted.")] = 1024
    root_path: Annotated[
        str | None,
        says(
            LISTEN,
            "Path below which a proxy in front serves this server, such as /llm: the API's document names it, and "
            "paths that begin with it are taken, too.",
            unset="none",
        ),
    ] = None
    api_keys: Annotated[
        tuple[str, ...],
        says(ACCESS, "A key that requests must carry; may be given several times.", flag="--api-key", unset="none"),
    ] = ()
    admin_key: Annotated[
        str | None, says(ACCESS, "A key that sees and cancels all requests, and may inject faults.")
    ] = None
    keys_file: Annotated[
        Path | None,
        says(
            ACCESS,
            "A file of keys with limits, as `novainfer keys` writes it; requests need one of them then, or an API key.",
        ),
    ] = None
    metrics_port: Annotated[
        int | None, says(ACCESS, "A port for /metrics alone, without a key or TLS; 0 takes a free one.", unset="none")
    ] = None
    metrics_public: Annotated[bool, says(ACCESS, "Let /metrics be read without a key at the server's own port.")] = (
        False
    )
    webui: Annotated[
        bool, says(ACCESS, "Serve the page: a chat at / and an inspector at /inspector; their files need no key.")
    ] = True
    metrics_compat: Annotated[bool, says(ACCESS, "Add the names to /metrics that older versions of vLLM had.")] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        says(
            ACCESS,
            "Origin whose web pages may use the server, as in https://chat.example, or *; may be given several times, "
            "or as a JSON list.",
            unset="none",
        ),
    ] = ()
    tool_call_parser: Annotated[
        str | None,
        says(
            HTTP,
            "The format in which the model calls tools.",
            unset="by its chat template",
            choices=tuple(TOOL_CALL_PARSERS),
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        says(
            HTTP,
            "The format in which the model reasons.",
            unset="by its chat template",
            choices=tuple(REASONING_PARSERS),
        ),
    ] = None
    strict_fields: Annotated[
        bool,
        says(
            HTTP, "Refuse request fields that have no effect, by name, instead of naming them in the answer's header."
        ),
    ] = False
    sse_keep_alive_interval_s: Annotated[
        float,
        says(
            HTTP,
            "Most seconds of silence on a stream, before a comment line; 0: no limit.",
            flag="--sse-keep-alive-interval",
        ),
    ] = 15.0
    stall_timeout_s: Annotated[float, says(READERS, "As the engine has it.", flag="")] = 300.0
    stall_grace_s: Annotated[
        float, says(READERS, "Seconds that such a reader has more, to take the error event.", flag="")
    ] = 120.0  # its memory is bounded, and its blocks are free already
    stream_interval: Annotated[
        int,
        says(
            HTTP,
            "Tokens between two events of a choice (chats, completions, messages), unless a request says otherwise.",
        ),
    ] = 1
    shutdown_timeout_s: Annotated[
        float,
        says(HTTP, "Seconds that running requests get when the server stops.", flag="--shutdown-timeout"),
    ] = 30.0
    body_bytes: Annotated[
        int | None,
        says(HTTP, "Largest request body in bytes.", flag="--max-body-bytes", unset="1 MB, more for long contexts"),
    ] = None
    body_timeout_s: Annotated[
        float, says(HTTP, "Seconds in which a request's body must arrive.", flag="--body-timeout")
    ] = 30.0
    http2_max_concurrent_streams: Annotated[int, says(HTTP, "Streams of one HTTP/2 connection.")] = 1000
    http2_initial_connection_window_size: Annotated[
        int, says(HTTP, "Bytes of bodies that a client may have on their way on one HTTP/2 connection.")
    ] = 1024 * 1024  # Go's, and Granian's
    keep_alive_timeout_s: Annotated[
        float,
        says(
            HTTP,
            "Seconds after which an idle connection is closed; more than a load balancer in front takes.",
            flag="--keep-alive-timeout",
        ),
    ] = 75.0  # nginx's and SGLang's; above the 60 s of common load balancers
    max_stored_responses: Annotated[
        int,
        says(HTTP, "Responses (/v1/responses) that are kept to be asked for again, in memory; 0: none is."),
    ] = 10_000
    max_stored_bytes: Annotated[int, says(HTTP, "Bytes of them, with their conversations and events.")] = 256 << 20
    stored_ttl_s: Annotated[
        float, says(HTTP, "Seconds for which they are kept after they were asked for last.", flag="--stored-ttl")
    ] = 86_400.0
    session_token_budget: Annotated[
        int | None,
        says(ACCESS, "Tokens, of prompts and answers, that one conversation (session_id) may have.", unset="no limit"),
    ] = None
    user_token_budget: Annotated[
        int | None,
        says(ACCESS, "Tokens that each user (the field user) of a key may have in a day.", unset="no limit"),
    ] = None
    journal: Annotated[
        Path | None,
        says(
            HTTP,
            "A file (SQLite) of streams and of responses in the background, token by token: their clients may come "
            "back for the rest (Last-Event-ID), and with --resume they survive the server.",
            unset="none",
        ),
    ] = None
    journal_max_bytes: Annotated[int, says(HTTP, "Bytes of that file; what has ended first makes room.")] = 1 << 30
    journal_ttl_s: Annotated[float, says(HTTP, "Seconds for which it keeps what has ended.", flag="--journal-ttl")] = (
        3600.0
    )
    journal_grace_s: Annotated[
        float,
        says(HTTP, "Seconds that a stream in the journal goes on without a client.", flag="--journal-grace"),
    ] = 60.0
    resume: Annotated[
        bool, says(HTTP, "Go on with what the journal holds unended; without it, these answers end with an error.")
    ] = False
    max_loaded_models: Annotated[
        int | None,
        says(
            MODELS,
            "Models that are loaded at once, each with an equal share of the memory; others when they are asked for.",
            unset="all of them",
        ),
    ] = None
    model_idle_unload_s: Annotated[
        float | None,
        says(
            MODELS,
            "Seconds without a request after which a model is unloaded, until it is asked for again.",
            flag="--model-idle-unload",
            unset="only to make room for another",
        ),
    ] = None
    model_wait_timeout_s: Annotated[
        float,
        says(
            MODELS,
            "Most seconds that a request waits for its model to be loaded, before it is refused with 503.",
            flag="--model-wait-timeout",
        ),
    ] = 300.0  # Ollama's for a load that stands still
    access_log: Annotated[bool, says(LOGS, "Log a line for each request: no text of prompts or answers.")] = False
    enable_log_requests: Annotated[
        bool, says(LOGS, "Log a line when a generation comes, with what it asks for: no text of prompts.")
    ] = False
    disable_log_stats: Annotated[
        bool, says(LOGS, "Leave out the line of tokens a second, which is written every 10 s while there is work.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        says(
            LOGS,
            "Where traces are sent, as OTLP over HTTP, such as http://collector:4318; needs novainfer[otel].",
            unset="none are made",
        ),
    ] = None
    has_priorities: Annotated[bool, says(ACCESS, "Whether the engine schedules by priority.", flag="")] = False
    max_client_reqs: Annotated[
        int | None,
        says(
            HTTP,
            "Live choices of one client: a key, or an address.",
            unset="of a key, half of what may run and wait; of an address, no limit; of either, while others are here, "
            "--max-num-seqs and an eighth of --max-num-queued-reqs",
        ),
    ] = None
    max_client_unread: Annotated[int | None, says(HTTP, "Answers that may wait for one client to read them.")] = 256
    max_client_tokens: Annotated[int | None, says(HTTP, "Tokens of one client's prompts that wait.", flag="")] = None
    client_room: Annotated[int | None, says(HTTP, "Live choices of one client while others are here.", flag="")] = None
    client_tokens: Annotated[int | None, says(HTTP, "Tokens of prompts that clients share.", flag="")] = None

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.port <= 65535:
            raise InvalidParameter(f"port must be between 0 and 65535, not {self.port}", param="port")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            message = f"metrics_port must be between 0 and 65535, not {self.metrics_port}"
            raise InvalidParameter(message, param="metrics_port")
        if self.metrics_port and self.metrics_port == self.port:
            raise InvalidParameter("metrics_port must be another port than that of requests", param="metrics_port")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and math.isnan(value):
                raise InvalidParameter(f"{name} must be a number of seconds, not {value}", param=name)
        above_zero = ("stall_timeout_s", "stall_grace_s", "body_timeout_s", "keep_alive_timeout_s", "stored_ttl_s")
        for name in (*above_zero, "journal_ttl_s"):
            if not getattr(self, name) > 0:
                raise InvalidParameter(f"{name} must be more than 0 seconds", param=name)
        for name in ("sse_keep_alive_interval_s", "shutdown_timeout_s", "journal_grace_s"):
            if not getattr(self, name) >= 0:
                raise InvalidParameter(f"{name} must be at least 0 seconds", param=name)
        if self.max_loaded_models is not None and self.max_loaded_models < 1:
            message = f"max_loaded_models must be at least 1, not {self.max_loaded_models}"
            raise InvalidParameter(message, param="max_loaded_models")
        for name in ("model_idle_unload_s", "model_wait_timeout_s"):
            if (value := getattr(self, name)) is not None and not 0 < value <= DURATION_S_MAX:
                limits = f"more than 0 seconds and at most {DURATION_S_MAX:.0f}"
                raise InvalidParameter(f"{name} must be {limits}, not {value:g}", param=name)
        if 0 < self.sse_keep_alive_interval_s < KEEP_ALIVE_INTERVAL_S_MIN:
            what = (
                f"sse_keep_alive_interval_s must be 0, which is none, or at least {KEEP_ALIVE_INTERVAL_S_MIN:g} seconds"
            )
            raise InvalidParameter(f"{what}, not {self.sse_keep_alive_interval_s}", param="sse_keep_alive_interval_s")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith("_s") and value is not None and value > DURATION_S_MAX:
                raise InvalidParameter(f"{name} must be at most {DURATION_S_MAX:.0f} seconds, not {value}", param=name)
        for name in (
            "http2_max_concurrent_streams",
            "stream_interval",
            "backlog",
            "body_bytes",
            "max_client_reqs",
            "max_client_unread",
            "max_client_tokens",
            "client_room",
            "client_tokens",
            "max_stored_bytes",
            "session_token_budget",
            "user_token_budget",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(f"{name} must be at least 1, not {value}", param=name)
        if not 0 <= self.api_processes <= API_PROCESSES_MAX:
            message = f"api_processes must be between 0 and {API_PROCESSES_MAX}, not {self.api_processes}"
            raise InvalidParameter(message, param="api_processes")
        if self.api_processes and not hasattr(socket, "SO_REUSEPORT"):
            message = "api_processes must be 0 on this system, where sockets cannot share a port"
            raise InvalidParameter(message, param="api_processes")
        if self.backlog > BACKLOG_MAX:
            raise InvalidParameter(f"backlog must be at most {BACKLOG_MAX}, not {self.backlog}", param="backlog")
        if self.journal_max_bytes < JOURNAL_BYTES_MIN:
            message = f"journal_max_bytes must be at least {JOURNAL_BYTES_MIN}, not {self.journal_max_bytes}"
            raise InvalidParameter(message, param="journal_max_bytes")
        if self.resume and self.journal is None:
            raise InvalidParameter("resume needs a journal to go on with: name its file", param="resume")
        if self.max_stored_responses < 0:
            message = f"max_stored_responses must be at least 0, not {self.max_stored_responses}"
            raise InvalidParameter(message, param="max_stored_responses")
        if self.http2_max_concurrent_streams > HTTP2_STREAMS_MAX:
            message = f"must be at most {HTTP2_STREAMS_MAX}, not {self.http2_max_concurrent_streams}"
            raise InvalidParameter(f"http2_max_concurrent_streams {message}", param="http2_max_concurrent_streams")
        if not HTTP2_WINDOW_BYTES_MIN <= self.http2_initial_connection_window_size <= HTTP2_WINDOW_BYTES_MAX:
            limits = f"between {HTTP2_WINDOW_BYTES_MIN} and {HTTP2_WINDOW_BYTES_MAX}"
            message = f"http2_initial_connection_window_size must be {limits} bytes"
            raise InvalidParameter(
                f"{message}, not {self.http2_initial_connection_window_size}",
                param="http2_initial_connection_window_size",
            )
        if self.root_path is not None and _ROOT_PATH.fullmatch(self.root_path) is None:
            wanted = "a path that begins with / and does not end with it, such as /llm"
            raise InvalidParameter(f"root_path must be {wanted}, not {self.root_path!r}", param="root_path")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidParameter("ssl_certfile and ssl_keyfile go together", param="ssl_certfile")
        if self.self_signed and self.ssl_certfile is not None:
            raise InvalidParameter("self_signed makes its own certificate; leave ssl_certfile out", param="self_signed")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise InvalidParameter("api_keys must be ASCII and not empty", param="api_keys")
        if self.admin_key is not None and (not self.admin_key or not self.admin_key.isascii()):
            raise InvalidParameter("admin_key must be ASCII and not empty", param="admin_key")
        for origin in self.allowed_origins:
            if _ORIGIN.fullmatch(origin) is None:
                wanted = "origins as browsers name them, such as https://chat.example:8443, or *"
                raise InvalidParameter(f"allowed_origins must hold {wanted}, not {origin!r}", param="allowed_origins")
        if self.otlp_traces_endpoint is not None and _HTTP_URL.fullmatch(self.otlp_traces_endpoint) is None:
            message = f"must be a URL that begins with http:// or https://, not {self.otlp_traces_endpoint!r}"
            raise InvalidParameter(f"otlp_traces_endpoint {message}", param="otlp_traces_endpoint")
        for name, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if (value := getattr(self, name)) is not None and value not in known:
                raise InvalidParameter(f"{name} must be one of {', '.join(known)}, not {value!r}", param=name)
        if self.admin_key in self.api_keys:
            raise InvalidParameter("admin_key must not be one of the API keys", param="admin_key")

    def body_bytes_max(self, max_model_len: int) -> int:
        """The body limit in bytes for a model whose context is `max_model_len` tokens."""
        return self.body_bytes or max(BODY_BYTES_MIN, BODY_BYTES_PER_TOKEN * max_model_len)


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the commands of an engine write on standard error."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], says(LOGS, "Least level of log lines on standard error.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], says(LOGS, "Log lines as text for people, or as JSON, an object a line.")
    ] = "text"
