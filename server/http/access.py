"""Who asks: which key a request carries, whose requests it may see and cancel, and whether it may do drills.

Without API keys every client sees everything. With them, a key sees and cancels its own requests only; the
admin key, all. Another's request answers as if there were none: an error would tell that its id is in use.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import Scope

from novainfer.server.http.errors import AuthenticationError, PermissionDenied
from novainfer.server.http.exchange import Viewer, header

# Probes, and a page that is the same on every server; a browser sends no key for it.
PUBLIC_PATHS = frozenset({"/health", "/healthz", "/livez", "/readyz", "/ping", "/docs"})
OWNER_CHARS = 16  # of a key's SHA-256: tells keys apart, and keeps them out of the engine


class Keys:
    """The keys of a server; without any, no client needs one."""

    def __init__(self, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._has_api_keys = bool(api_keys)
        self._has_admin_key = admin_key is not None
        viewers = {key: Viewer(owner := _owner_of(key), owner) for key in api_keys}
        if admin_key is not None:
            viewers[admin_key] = Viewer(_owner_of(admin_key), None, is_admin=True)
        self._viewers = [(key.encode("ascii"), viewer) for key, viewer in viewers.items()]

    def identify(self, scope: Scope) -> Viewer:
        """Who sent this request; raises `AuthenticationError` when it needs a key and carries none that is known."""
        needs_key = self._has_api_keys and scope["path"] not in PUBLIC_PATHS
        given = header(scope, b"authorization")
        if given is None and (key := header(scope, b"x-api-key")) is not None:  # Anthropic's clients
            given = b"Bearer " + key
        if given is None:
            if needs_key:
                raise AuthenticationError("This server needs an API key: send the header `Authorization: Bearer KEY`")
            return Viewer()
        scheme, _, key = given.partition(b" ")
        # every key is compared, so that the time taken says nothing about which one came close
        found = [viewer for known, viewer in self._viewers if hmac.compare_digest(key.strip(), known)]
        if found and scheme.lower() == b"bearer":
            return found[0]
        if needs_key:
            raise AuthenticationError("The API key is not valid on this server")
        return Viewer()

    def check_admin(self, viewer: Viewer) -> None:
        """Raise `PermissionDenied` unless the admin key was given."""
        if not self._has_admin_key:
            raise PermissionDenied("This is switched off: start the server with --admin-key KEY, and send that key")
        if not viewer.is_admin:
            raise PermissionDenied("This needs the admin key: send the header `Authorization: Bearer ADMIN_KEY`")


def _owner_of(key: str) -> str:
    return hashlib.sha256(key.encode("ascii")).hexdigest()[:OWNER_CHARS]
