"""Events about KV blocks as vLLM 0.33 writes them: one msgpack array a batch, and a map an event.

    [seconds since 1970, [{"type": "BlockStored", …}, {"type": "BlockRemoved", …}, {"type": "AllBlocksCleared"}], rank]

A block's hash is its name here, 16 bytes: routers take it for what it is, and chain by `parent_block_hash`. Blocks that
follow each other are one event. The medium is always vLLM's word for where attention reads, on a CPU too: there is one
tier, since what is swapped to the host is found by nobody but the request that it belongs to.
"""

from __future__ import annotations

from typing import Any

import msgspec

from novainfer.fsm.messages.events import IndexChanged, StoredBlock

MEDIUM = "GPU"

_encode = msgspec.msgpack.Encoder().encode


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that follow each other, and can be found; `token_ids` are those of all of them.

    `extra_keys` has an entry a block: what a request must bring beside the tokens to find it, or None.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that cannot be found any more."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """No block can be found any more."""


def batch(changed: IndexChanged, at_s: float, rank: int = 0) -> bytes:
    """What changed, as one batch of the engine of this rank; `at_s`: seconds since 1970."""
    events: list[Any] = []
    if changed.is_cleared:
        events.append(AllBlocksCleared())
    if changed.removed:
        events.append(BlockRemoved(changed.removed, MEDIUM, 0))
    last: StoredBlock | None = None
    for block in changed.stored:
        if last is not None and block.parent == last.name:
            event = events[-1]
            event.block_hashes.append(block.name)
            event.token_ids += block.token_ids
            if event.extra_keys is not None:
                event.extra_keys.append(None)
        else:
            events.append(_stored(block))
        last = block
    return _encode((at_s, events, rank))


def _stored(block: StoredBlock) -> BlockStored:
    return BlockStored(
        block_hashes=[block.name],
        parent_block_hash=block.parent or None,
        token_ids=block.token_ids[:],
        block_size=len(block.token_ids),
        lora_id=None,
        medium=MEDIUM,
        lora_name=None,
        extra_keys=[(block.salt,)] if block.salt else None,
        group_idx=0,
    )
