"""The listening socket, and Hypercorn's configuration around it."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import ssl
from pathlib import Path

from hypercorn.config import Config

from novainfer import InvalidParameter
from novainfer.server.http.connection import HttpConfig
from novainfer.server.http.tls import Certificate, as_files
from novainfer.server.settings import ServerSettings

FLUSH_TIMEOUT_S = 3.0  # for the last bytes of answers that are already written, after the engine has drained
UNSENT_BYTES_MAX = 128 * 1024  # in the kernel, for each connection; what is on its way to the client comes on top
USER_TIMEOUT_MS_MAX = 2**31 - 1  # a C int: 24 days
DESCRIPTORS_MAX = 65_536  # asked for: more is a kernel's table, not a server's need
REQUESTS_PER_CONNECTION_MAX = 1_000_000_000  # Hypercorn's own limit of 1000 silences streams in flight


def bind_each(settings: ServerSettings, number: int) -> list[socket.socket]:
    """So many sockets that listen at the port of `settings`; raises `InvalidParameter` as `bind`.

    The system spreads connections over them. It would let any other server of this user join them as well, so it is
    seen first whether the port can be had alone.
    """
    if settings.port:
        bind(settings, settings.port).close()
    found = [bind(settings, settings.port, is_shared=True)]
    try:
        while len(found) < number:
            found.append(bind(settings, found[0].getsockname()[1], is_shared=True))
    except InvalidParameter:
        for sock in found:
            sock.close()
        raise
    return found


def bind(settings: ServerSettings, port: int, *, field: str = "port", is_shared: bool = False) -> socket.socket:
    """A socket that listens at `port`; raises `InvalidParameter` in one sentence when the address cannot be had.

    `field` is the setting that the port comes from; other sockets may listen there, too, where all are `is_shared`.
    """
    host = settings.host.strip("[]")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.create_server(
            address[:2],
            family=family,
            backlog=settings.backlog,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
            reuse_port=is_shared,
        )
    except socket.gaierror as error:
        raise InvalidParameter(f"host {host!r} is not known: {error.strerror}", param="host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidParameter(
                f"{field} {port} of {host} is in use: choose another, or stop what listens there", param=field
            ) from None
        raise InvalidParameter(
            f"{field} {port} of {host} cannot be used: {os.strerror(error.errno or 0)}", param=field
        ) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # A client that stopped reading is dropped by the kernel, whatever layer above waits for it.
        timeout_ms = int((settings.stall_timeout_s + settings.stall_grace_s) * 1000)
        timeout_ms = min(timeout_ms, USER_TIMEOUT_MS_MAX)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # The kernel would take megabytes of an answer that its client does not read, and nothing would tell.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
    return sock


def raise_descriptor_limit() -> None:
    """As many descriptors as this process may have: a shell's 1024 are fewer than the requests that may wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_certificate(certfile: Path, keyfile: Path) -> None:
    """Raise `InvalidParameter` in one sentence when TLS cannot use them."""
    config = Config()
    config.certfile, config.keyfile = str(certfile), str(keyfile)
    try:
        config.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error.args[-1]
        raise InvalidParameter(f"ssl_certfile {certfile} cannot be used: {reason}", param="ssl_certfile") from None


def read_certificate(certfile: Path, keyfile: Path) -> Certificate:
    """What these files hold now; raises `InvalidParameter` when TLS cannot use it.

    Both are read once: between a check and a second look, whoever renews them may have written one of the two.
    """
    try:
        found = certfile.read_bytes(), keyfile.read_bytes()
    except OSError as error:
        message = f"ssl_certfile {certfile} cannot be used: {error.filename}: {error.strerror}"
        raise InvalidParameter(message, param="ssl_certfile") from None
    with as_files(found) as copies:
        try:
            check_certificate(*copies)
        except InvalidParameter as error:
            raise InvalidParameter(error.message.replace(str(copies[0]), str(certfile)), param=error.param) from None
    return found


def hypercorn_config(settings: ServerSettings, sock: socket.socket, certificate: Certificate | None) -> HttpConfig:
    """Hypercorn on `sock`, which it takes over."""
    config = HttpConfig(certificate)
    config.bind = [f"fd://{sock.detach()}"]
    config.errorlog = logging.getLogger("novainfer.http")
    config.accesslog = None  # it copies os.environ for every line; ours is in guard.py
    config.include_server_header = False
    config.backlog = settings.backlog
    config.graceful_timeout = 2 * FLUSH_TIMEOUT_S  # by then serve.py has aborted what is left
    config.keep_alive_timeout = settings.keep_alive_timeout_s
    config.keep_alive_max_requests = REQUESTS_PER_CONNECTION_MAX
    config.h2_max_concurrent_streams = settings.http2_max_concurrent_streams
    config.h2_connection_window_bytes = settings.http2_initial_connection_window_size
    config.max_app_queue_size = 0  # a full queue of an app that has ended would hold its connection's task for ever
    return config
