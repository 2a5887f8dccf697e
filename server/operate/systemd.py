"""What systemd is told, where it has started this server (`Type=notify`): that it is ready, moves, or stops.

The protocol is a datagram of `NAME=VALUE` lines to the socket that `NOTIFY_SOCKET` names (sd_notify(3)); anywhere else
nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket

READY, STOPPING, MOVING = "READY=1", "STOPPING=1", "WATCHDOG=1"
SOCKET_VARIABLE, WATCHDOG_VARIABLE = "NOTIFY_SOCKET", "WATCHDOG_USEC"


def notify(*lines: str) -> bool:
    """Send these lines; False where nobody asked for them. A service manager that does not listen ends no server."""
    address = os.environ.get(SOCKET_VARIABLE)
    if not address:
        return False
    if address.startswith("@"):  # an abstract one
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto("\n".join(lines).encode(), address)
    return True


def has_watchdog() -> bool:
    """Whether a sign of life is expected now and then (`WatchdogSec=`)."""
    return bool(os.environ.get(WATCHDOG_VARIABLE)) and bool(os.environ.get(SOCKET_VARIABLE))
