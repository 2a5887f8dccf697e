"""Bugs planted in blocks that several requests have, and in the copies that are made of them."""

from __future__ import annotations

from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.kv.blocks import BlockPool
from novainfer.fsm.simulation.bugs.mutants import Mutant
from novainfer.fsm.simulation.world.device import ScriptedDevice

COPY_MUTANTS = [
    # ---- what is shared
    Mutant(
        "what a step computes is copied in that step",
        BlockCache,
        "_find_tail",
        "is_new = holder_id in journal.tails",
        "is_new = False",
    ),
    Mutant(
        "a block is shared that its owner has gone on to write into",
        BlockCache,
        "_find_tail",
        "is_new = holder_id in journal.tails",
        "is_new = True",
    ),
    Mutant(
        "prompts that differ in their last token share it",
        BlockCache,
        "_tail_name",
        "request.token_ids[num_full * self._size : request.num_prompt]",
        "request.token_ids[num_full * self._size : request.num_prompt - 1]",
    ),
    Mutant(
        "a request shares a block and writes its own tokens into it at once",
        BlockCache,
        "_find_tail",
        "if is_new and len(request.token_ids) > request.num_prompt:",
        "if False:",
    ),
    Mutant(
        "a prompt is found that is not computed to its end",
        BlockCache,
        "expect",
        "if start < request.num_prompt <= end and (request.num_prompt - 1) % size:",
        "if start < request.num_prompt and (request.num_prompt - 1) % size:",
    ),
    Mutant(
        "a request that shares a block has room for its own tokens in it",
        BlockCache,
        "share",
        "table.is_tail_shared, table.capacity = True, request.num_prompt",
        "pass",
    ),
    Mutant(
        "a prompt is found where its request had it before it left",
        BlockCache,
        "release",
        "self._drop_tail(request.request_id, table)",
        "pass",
    ),
    Mutant(
        "a prompt is found whose step was taken back",
        BlockCache,
        "undo",
        "self._drop_tail(request_id, table)",
        "pass",
    ),
    Mutant(
        "a prompt is found whose request gave no number, and is still in a step",
        BlockCache,
        "distrust",
        "self.tails.pop(request.kv.tail_name, None)",
        "pass",
    ),
    Mutant(
        "a prompt is found at the end of what its request has written by now",
        BlockCache,
        "_find_tail",
        "block = table.blocks[len(prefix.blocks)]",
        "block = table.blocks[-1]",
    ),
    Mutant(
        "prompts that end alike share what they end in",
        BlockCache,
        "_tail_name",
        "parent = names[num_full - 1] if num_full else table.space",
        "parent = table.space",
    ),
    Mutant(
        "a last block that the prompt fills is copied before the next one is begun",
        BlockCache,
        "share",
        "if request.num_prompt % self._size:",
        "if True:",
    ),
    Mutant(
        "what was computed in several modes is found by the whole prompt",
        BlockCache,
        "expect",
        "if not self._is_sharing or table.is_mixed:",
        "if not self._is_sharing:",
    ),
    # ---- who copies
    Mutant(
        "two requests write into the block that they share",
        BlockPool,
        "is_writable",
        "self._refs[block] - num_reading == 1",
        "self._refs[block] - num_reading <= 2",
    ),
    # ---- the copies of a step
    Mutant(
        "a copy comes after the step has computed",
        ScriptedDevice,
        "run",
        "self._write(plan, spoil=False)",
        "late, plan.copy_from_blocks, plan.copy_to_blocks = (plan.copy_from_blocks, plan.copy_to_blocks), [], []\n"
        "    self._write(plan, spoil=False)\n"
        "    plan.copy_from_blocks, plan.copy_to_blocks = late\n"
        "    self._copy(plan, spoil=False)",
    ),
    Mutant(
        "the device copies nothing",
        ScriptedDevice,
        "_write",
        "self._copy(plan, spoil=spoil)",
        "pass",
    ),
    Mutant(
        "a copy is copied in the step that makes it",
        BlockCache,
        "_find_tail",
        "journal.copies.get(block, block)",
        "block",
    ),
    Mutant(
        "the device is not told that a request's last block is another",
        BlockCache,
        "_own_tail",
        "plan.table_blocks.append(table.blocks[at])",
        "plan.table_blocks.append(block)",
    ),
    Mutant(
        "the device is not told that a copy was taken back and is not made again",
        BlockCache,
        "_own_tail",
        "plan.table_slots.append(request.slot)",
        "if table.blocks[at] not in self._journal.copies:\n        return\n    plan.table_slots.append(request.slot)",
        seeds=0,
        small="two that share a block, one of which leaves when the step that copies it has failed",
    ),
    Mutant(
        "the wrong block is copied",
        BlockCache,
        "_own_tail",
        "at, block = len(table.blocks) - 1, table.blocks[-1]",
        "at, block = len(table.blocks) - 1, table.blocks[0]",
    ),
    Mutant(
        "a block that is to be copied has no share for that, and may be overwritten first",
        BlockCache,
        "share",
        "self.pool.share(prefix.tail)",
        "self.pool.share(prefix.tail) if prefix.is_tail_new else None",
    ),
    Mutant(
        "a block that is copied to several others counts once",
        BlockCache,
        "_copy",
        "self._sources.get(source, 0) + 1",
        "1",
    ),
    Mutant(
        "a step copies before it swaps",
        ScriptedDevice,
        "_write",
        "self._swap(plan, spoil=spoil)\n    self._copy(plan, spoil=spoil)",
        "self._copy(plan, spoil=spoil)\n    self._swap(plan, spoil=spoil)",
    ),
    # ---- how the step ends
    Mutant(
        "what was copied is never given back",
        BlockCache,
        "commit",
        "self.pool.release(journal.copies.values())",
        "pass",
    ),
    Mutant(
        "a block counts as being copied for ever",
        BlockCache,
        "commit",
        "self._end_copies(journal)",
        "pass",
    ),
    Mutant(
        "the copy is dropped when its step is tried again",
        BlockCache,
        "undo",
        "table.blocks[-1], table.is_tail_shared = block, True",
        "table.blocks[-1] = block",
    ),
    Mutant(
        "a request keeps the copy of a step that was taken back",
        BlockCache,
        "undo",
        "table.blocks[-1], table.is_tail_shared = block, True",
        "table.is_tail_shared = True",
    ),
    Mutant(
        "a request has the room of a step that was taken back",
        BlockCache,
        "undo",
        "table.capacity = capacity",
        "pass",
    ),
]
