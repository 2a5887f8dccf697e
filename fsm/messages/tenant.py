"""On whose behalf a request is served: whose share of the engine it takes, and whose prefixes it may find."""

from __future__ import annotations

import msgspec

from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.params import check_types, is_unicode, shown

ID_CHARS_MAX = 512
WEIGHT_MIN, WEIGHT_MAX = 1e-3, 1e3  # a millionth of another's share is none


class Tenant(msgspec.Struct, frozen=True):
    """One of those that share an engine; requests that say nothing else are all of one, whose `id` is empty.

    While tenants have requests that wait, each is served by its `weight`: with twice the weight, twice as many tokens.
    Raises `InvalidParameter`.
    """

    id: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if len(self.id) > ID_CHARS_MAX or not is_unicode(self.id):
            message = f"a tenant's id must be valid Unicode of at most {ID_CHARS_MAX} characters"
            raise InvalidParameter(message, param="tenant")
        if not WEIGHT_MIN <= self.weight <= WEIGHT_MAX:
            limits = f"between {WEIGHT_MIN:g} and {WEIGHT_MAX:g}"
            raise InvalidParameter(f"a tenant's weight must be {limits}, not {shown(self.weight)}", param="tenant")


ANYONE = Tenant()
