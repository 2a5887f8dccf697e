"""Who asks: which key a request carries, whose requests it may see and cancel, and whether it may do drills.

Without keys every client sees everything. With them, a key sees and cancels its own requests only; an admin key, all.
Another's request answers as if there were none: an error would tell that its id is in use.

Keys come from flags, and from a file that is looked at before each request: one that is revoked there is refused from
the next request on. A file that cannot be read leaves the keys as they were, and says so in the log.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Iterable
from urllib.parse import unquote_plus

from starlette.types import Scope

from novainfer import InvalidParameter
from novainfer.server.http.errors import AuthenticationError, PermissionDenied
from novainfer.server.http.exchange import Viewer, headers
from novainfer.server.keys.record import KeyRecord, digest
from novainfer.server.keys.store import KeyStore
from novainfer.server.settings import ServerSettings

log = logging.getLogger("novainfer.server")

# Probes, and pages that are the same on every server; a browser sends no key for them.
PUBLIC_PATHS = frozenset({"/health", "/healthz", "/livez", "/readyz", "/ready", "/ping", "/docs", "/", "/inspector"})
PUBLIC_FOLDER = "/assets/"  # the page's scripts and styles; nothing else is below it
METRICS_PATH = "/metrics"
KEY_BYTES_MAX = 1024  # of one that a request carries: a longer one is none of ours, and is not looked at
# Words that a key would have in an address, where proxies, logs and browsers' histories keep it.
QUERY_WORDS = frozenset({"api_key", "api-key", "apikey", "x-api-key", "access_token", "authorization", "key", "token"})
WARN_EACH_S = 60.0


class KeyRing:
    """The keys of a server; without any, no client needs one. Raises `InvalidParameter` for a file that is none."""

    def __init__(self, settings: ServerSettings) -> None:
        self._of_flags = _of_flags(settings)
        self._store = None if settings.keys_file is None else KeyStore.at(settings.keys_file)
        self._public = PUBLIC_PATHS | {METRICS_PATH} if settings.metrics_public else PUBLIC_PATHS
        self.are_needed = bool(settings.api_keys) or self._store is not None
        self._by_digest: dict[str, KeyRecord] = {}
        self._by_owner: dict[str, KeyRecord] = {}
        self._state = None if self._store is None else self._store.state()
        self._reading: asyncio.Task[None] | None = None
        self._said = ""  # what was wrong with the file when it was read last
        self._num_unknown = 0  # keys, since the log was told of them
        self._warned_s = -WARN_EACH_S
        self._take([] if self._store is None else self._store.read())

    # ---- the file ------------------------------------------------------------------------------------------------

    @property
    def has_file(self) -> bool:
        """Whether there is a file that may change."""
        return self._store is not None

    async def refresh(self, *, always: bool = False) -> None:
        """Read the file again where it has changed, in a thread; `always`: also where it seems not to have."""
        store = self._store
        if store is None:
            return
        state = store.state()
        if not always and state is not None and state == self._state:
            return
        if self._reading is not None:
            await asyncio.shield(self._reading)  # which may have begun before the change
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(store))
            self._reading.add_done_callback(self._has_read)
        await asyncio.shield(self._reading)

    async def _read(self, store: KeyStore) -> None:
        state = store.state()
        try:
            self._take(await asyncio.to_thread(store.read))
            self._said = ""
        except InvalidParameter as error:
            if error.message != self._said:
                log.error("%s; the %d keys that were known stay", error.message, len(self._by_digest))
            self._said = error.message
        self._state = state

    def _has_read(self, _: asyncio.Task[None]) -> None:
        self._reading = None

    def _take(self, records: list[KeyRecord]) -> None:
        known = [*self._of_flags, *records]
        self._by_digest = {record.hash: record for record in reversed(known)}  # of two, that of the flag
        self._by_owner = {record.owner: record for record in self._by_digest.values()}

    # ---- requests ------------------------------------------------------------------------------------------------

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key."""
        return any(record.is_admin for record in self._by_digest.values())

    def record(self, owner: str) -> KeyRecord | None:
        """The key whose requests are marked with `owner`; None where there is none (any more)."""
        return self._by_owner.get(owner)

    def identify(self, scope: Scope) -> Viewer:
        """Who sent this request; raises `AuthenticationError` when it needs a key and carries none that is known."""
        path = scope["path"]
        needs_key = self.are_needed and path not in self._public and not path.startswith(PUBLIC_FOLDER)
        if needs_key and (word := _word_in_query(scope["query_string"])):
            what = f"{word!r} in the address: addresses are logged, so a key there is refused, and should be revoked"
            raise AuthenticationError(f"{what}. Send it as the header `Authorization: Bearer KEY`")
        given = _given(scope)
        if not given:
            if needs_key:
                raise AuthenticationError("This server needs an API key: send the header `Authorization: Bearer KEY`")
            return Viewer()
        record = self._known(given)
        if record is None:
            if needs_key:
                self._warn(scope)
                raise AuthenticationError("The API key is not valid on this server")
            return Viewer()
        sees = None if record.is_admin else record.owner
        return Viewer(record.owner, sees, is_admin=record.is_admin, name=record.name)

    async def is_as_it_was(self, viewer: Viewer) -> bool:
        """Whether the key of `viewer` still is what it was when `identify` found it: for what goes on without end."""
        if not viewer.owner:
            return True
        await self.refresh()
        record = self.record(viewer.owner)
        return record is not None and record.is_admin == viewer.is_admin

    def check_admin(self, viewer: Viewer) -> None:
        """Raise `PermissionDenied` unless an admin key was given."""
        if not self.has_admin:
            raise PermissionDenied("This is switched off: start the server with --admin-key KEY, and send that key")
        if not viewer.is_admin:
            raise PermissionDenied("This needs the admin key: send the header `Authorization: Bearer ADMIN_KEY`")

    def _known(self, given: list[bytes]) -> KeyRecord | None:
        """The record of the one key that was given.

        What is looked up is a digest, so that the time it takes depends on nothing that a guess could come close to.
        """
        if len(given) > 1 or len(given[0]) > KEY_BYTES_MAX:
            return None
        found = digest(given[0])
        record = self._by_digest.get(found)
        return record if record is not None and hmac.compare_digest(record.hash, found) else None

    def _warn(self, scope: Scope) -> None:
        self._num_unknown += 1
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EACH_S:
            address = (scope.get("client") or ("an unknown address",))[0]
            log.warning("requests with keys that are not known: %d, the latest from %s", self._num_unknown, address)
            self._warned_s, self._num_unknown = now_s, 0


def _of_flags(settings: ServerSettings) -> list[KeyRecord]:
    keys = [(f"api-key-{at}", key, False) for at, key in enumerate(dict.fromkeys(settings.api_keys), 1)]
    if settings.admin_key is not None:
        keys.append(("admin-key", settings.admin_key, True))
    return [KeyRecord(name=name, hash=digest(key.encode("ascii")), is_admin=is_admin) for name, key, is_admin in keys]


def _given(scope: Scope) -> list[bytes]:
    """The different keys of a request: of `Authorization: Bearer`, or of Anthropic's `x-api-key`."""
    found: dict[bytes, None] = {}
    has_other = False
    for value in headers(scope, b"authorization"):
        scheme, _, key = value.partition(b" ")
        if scheme.lower() == b"bearer":
            found[key.strip()] = None
        else:
            has_other = True  # meant for a proxy, where there is a key beside it
    found |= dict.fromkeys(value.strip() for value in headers(scope, b"x-api-key"))
    return list(found) or [b""] * has_other


def _word_in_query(query: bytes) -> str:
    """The first parameter of an address that is named like a key, or nothing."""
    parts: Iterable[str] = query.decode("latin-1").replace(";", "&").split("&") if query else ()
    return next((word for part in parts if (word := unquote_plus(part.partition("=")[0]).lower()) in QUERY_WORDS), "")
