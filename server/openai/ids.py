"""Ids of what an answer holds, its calls and items: by chance, or the same ones whenever it is made again."""

from __future__ import annotations

import secrets
from hashlib import blake2b


class Ids:
    """Of one answer; with `salt`, which no other answer has, each follows from what it is for."""

    def __init__(self, salt: bytes | None = None) -> None:
        self._salt = salt

    def hex(self, num_bytes: int, what: str, *place: int) -> str:
        """So many bytes in hexadecimal, for `what` at this place."""
        if self._salt is None:
            return secrets.token_hex(num_bytes)
        return blake2b(f"{what} {place}".encode(), digest_size=num_bytes, key=self._salt).hexdigest()

    def of_call(self, choice: int, index: int) -> str:
        """Of a call of a tool: clients send it back with what the tool has said."""
        return f"call_{self.hex(12, 'call', choice, index)}"


BY_CHANCE = Ids()
