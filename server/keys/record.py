"""One key as it is kept: its name, a digest of it, and what its requests may do. The key itself is kept nowhere."""

from __future__ import annotations

import hashlib
import re
import secrets

import msgspec

from novainfer import InvalidParameter
from novainfer.fsm.client.quota import Limits
from novainfer.fsm.messages.tenant import WEIGHT_MAX, WEIGHT_MIN

PREFIX = "nova-"  # by which a key is known where it should not be, as in a repository
KEY_BYTES = 32  # drawn: so a digest that is read helps nobody to find its key, and needs no salt and no slow function
LIMIT_MAX = 10**12
PRIORITY_MAX = 1000  # either way
HASH_PREFIX = "sha256:"
OWNER_CHARS = 16  # of a digest: tells keys apart, in the engine as well
_HASH = re.compile(HASH_PREFIX + "[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key and its limits; raises `InvalidParameter`, naming the field.

    `max_concurrent` are choices at a time, `weight` is its share of the engine beside other keys, and a lower
    `priority` goes first where there are priorities. `models` are those it may use; None: all. `is_admin` sees and
    cancels the requests of all keys, and may do drills. `created` is a date, for people.
    """

    name: str
    hash: str
    created: str = ""
    is_admin: bool = False
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    tokens_per_day: int | None = None
    max_concurrent: int | None = None
    priority: int = 0
    weight: float = 1.0
    models: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            what = "1 to 64 letters, digits and . _ @ -, the first a letter or a digit"
            raise InvalidParameter(f"name must be {what}, not {self.name[:80]!r}", param="name")
        if _HASH.fullmatch(self.hash) is None:
            what = f"{HASH_PREFIX} and 64 hexadecimal digits in lower case, as `novainfer keys add` writes it"
            raise InvalidParameter(f"hash must be {what}", param="hash")
        for field in Limits.__struct_fields__:
            value = getattr(self, field)
            if value is not None and not 1 <= value <= LIMIT_MAX:
                raise InvalidParameter(f"{field} must be from 1 to {LIMIT_MAX}, not {value}", param=field)
        if abs(self.priority) > PRIORITY_MAX:
            what = f"from -{PRIORITY_MAX} to {PRIORITY_MAX}"
            raise InvalidParameter(f"priority must be {what}, not {self.priority}", param="priority")
        if not WEIGHT_MIN <= self.weight <= WEIGHT_MAX:
            what = f"from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
            raise InvalidParameter(f"weight must be {what}, not {self.weight:g}", param="weight")

    @property
    def limits(self) -> Limits:
        """What its requests may use."""
        return Limits(**{field: getattr(self, field) for field in Limits.__struct_fields__})

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit to what they may use."""
        return self.limits != Limits()

    @property
    def owner(self) -> str:
        """What its requests are marked with."""
        return self.hash.removeprefix(HASH_PREFIX)[:OWNER_CHARS]

    def priority_of(self, asked: int) -> int:
        """The priority of a request that asks for one: that of its key, or further back."""
        return self.priority + max(asked, 0)

    def may_use(self, model: str) -> bool:
        """Whether its requests may name this model."""
        return self.models is None or model in self.models


def new_key() -> str:
    """A key that nobody has had."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest(key: bytes) -> str:
    """What is kept of a key."""
    return HASH_PREFIX + hashlib.sha256(key).hexdigest()


def checked(records: list[KeyRecord]) -> list[KeyRecord]:
    """`records`; raises `InvalidParameter` where a name or a key stands twice."""
    for field in ("name", "hash"):
        seen: set[str] = set()
        for record in records:
            if (value := getattr(record, field)) in seen:
                what = (
                    f"the name {value!r} stands twice"
                    if field == "name"
                    else f"two names have the key of {record.name!r}"
                )
                raise InvalidParameter(f"{what}: each key has one name of its own", param=field)
            seen.add(value)
    return records
