"""The KV cache: slots keep their blocks, sequences never see each other, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from novainfer import Engine, EngineConfig, EngineStatistics
from novainfer.actors.device.device import ModelDevice
from novainfer.fsm.messages.step import StepDone, StepPlan
from tests.acceptance.reference import Reference, exactly, read, tokens_of

pytestmark = pytest.mark.slow

BLOCK = 16


class Watcher:
    """Follows the plans that go to the device, and asserts what must be true of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables: dict[int, dict[int, int]] = {}  # slot -> index -> block
        self.num_steps = 0
        self.num_shared = 0  # entries that two sequences of a step had in common
        self.broken: list[str] = []
        run = ModelDevice.run

        def watched(device: ModelDevice, plan: StepPlan) -> StepDone:
            self._look(plan)
            return run(device, plan)

        monkeypatch.setattr(ModelDevice, "run", watched)

    def _look(self, plan: StepPlan) -> None:
        self.num_steps += 1
        copies = set(zip(plan.copy_from_blocks, plan.copy_to_blocks, strict=True))
        for admission in plan.admissions:
            self.tables[admission.slot] = {}
        for slot, index, block in zip(plan.table_slots, plan.table_indexes, plan.table_blocks, strict=True):
            old = self.tables.setdefault(slot, {}).get(index)
            if old is not None and old != block and (old, block) not in copies:
                self.broken.append(f"slot {slot}: block {index} moved from {old} to {block}")
            self.tables[slot][index] = block
        if len(set(plan.slots)) != len(plan.slots):
            self.broken.append(f"a slot is twice in one step: {plan.slots}")
        written: dict[tuple[int, int], int] = {}  # the token in each cell of each block
        writers: dict[int, set[int]] = {}
        token_ids = iter(plan.input_ids)
        half_full: set[int] = set()  # written in this step, and not to their end
        seen: dict[int, set[int]] = {}
        for slot, query, context in zip(plan.slots, plan.query_lens, plan.context_lens, strict=True):
            table = self.tables[slot]
            missing = [i for i in range(-(-context // BLOCK)) if i not in table]
            if missing:
                self.broken.append(f"slot {slot} has no block for its tokens: {missing}")
                continue
            for position in range(context - query, context):
                token_id = next(token_ids)
                writers.setdefault(table[position // BLOCK], set()).add(slot)
                if written.setdefault((table[position // BLOCK], position % BLOCK), token_id) != token_id:
                    self.broken.append(f"slot {slot} writes {token_id} where another one writes another token")
            if context % BLOCK:
                half_full.add(table[context // BLOCK])
            for index in range(-(-context // BLOCK)):
                seen.setdefault(table[index], set()).add(slot)
        for block, slots in writers.items():
            # A full block may be read in the step that fills it: keys and values are written before they are read. So
            # may the last one of a prompt that others have as well, by those that write its last token as well.
            if seen[block] - slots and block in half_full:
                self.broken.append(f"slots {slots} write into block {block}, which {seen[block]} read")
        self.num_shared += sum(len(slots) > 1 for slots in seen.values())


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Watcher:
    return Watcher(monkeypatch)


async def at_rest(engine: Engine) -> EngineStatistics:
    """The engine's numbers when everything has come back; asserts that nothing is lost."""
    while (found := engine.statistics()).state != "IDLE" or found.num_running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert found.kv_blocks_owned == 0
    assert found.kv_blocks_free + found.kv_blocks_cached == found.kv_blocks_total
    return found


def small(reference: Reference, **more: object) -> EngineConfig:
    settings = {"dtype": "float32", "block_size": BLOCK, "max_num_seqs": 16, "max_model_len": 128, **more}
    return EngineConfig(model=reference.folder, **settings)  # type: ignore[arg-type]


async def test_the_slot_mapping_of_a_sequence_is_stable_while_it_runs(
    tiny: Callable[[str], Reference], watcher: Watcher
) -> None:
    reference = tiny("mqa")
    prompts = [reference.prompt(5 + 7 * i, seed=i) for i in range(12)]
    async with Engine(small(reference, prefill_chunk_tokens=20, max_num_seqs=5)) as engine:
        found = await asyncio.gather(*(read(engine, p, exactly(30)) for p in prompts))
        await at_rest(engine)
    assert watcher.broken == []
    assert watcher.num_steps > 30
    assert [tokens_of(deltas) for deltas in found] == [reference.greedy(p, 30) for p in prompts]


async def test_sequences_that_share_a_prefix_share_its_blocks_and_only_read_them(
    tiny: Callable[[str], Reference], watcher: Watcher
) -> None:
    reference = tiny("mqa")
    prefix = reference.prompt(3 * BLOCK, seed=100)
    prompts = [[*prefix, *reference.prompt(1 + i, seed=i)] for i in range(8)]
    async with Engine(small(reference)) as engine:
        first = await read(engine, prompts[0], exactly(8))
        rest = await asyncio.gather(*(read(engine, p, exactly(8)) for p in prompts[1:]))
        found = await at_rest(engine)
    assert watcher.broken == []
    assert watcher.num_shared > 0
    assert first[-1].num_cached_tokens == 0
    assert [deltas[-1].num_cached_tokens for deltas in rest] == [3 * BLOCK] * 7
    assert found.prefix_cache_hits == 7 * 3 * BLOCK
    assert [tokens_of(d) for d in (first, *rest)] == [reference.greedy(p, 8) for p in prompts]


async def test_without_prefix_caching_nothing_is_shared(tiny: Callable[[str], Reference], watcher: Watcher) -> None:
    reference = tiny("mqa")
    prompt = reference.prompt(40, seed=1)
    async with Engine(small(reference, enable_prefix_caching=False)) as engine:
        found = await asyncio.gather(*(read(engine, prompt, exactly(8)) for _ in range(4)))
        assert (await at_rest(engine)).kv_blocks_cached == 0
    assert watcher.broken == []
    assert watcher.num_shared == 0
    assert [tokens_of(deltas) for deltas in found] == [reference.greedy(prompt, 8)] * 4


async def test_a_sequence_does_not_see_its_neighbours_nor_who_had_its_blocks_before(
    tiny: Callable[[str], Reference],
) -> None:
    reference = tiny("mha")
    prompts = [reference.prompt(20 + i, seed=i) for i in range(60)]
    # 24 blocks for sequences of up to 5: every block changes hands many times.
    config = small(reference, kv_cache_capacity_mode="fixed", num_kv_blocks=24, max_num_seqs=6)
    async with Engine(config) as engine:
        found = await asyncio.gather(*(read(engine, p, exactly(10)) for p in prompts))
        await at_rest(engine)
    assert [tokens_of(deltas) for deltas in found] == [reference.greedy(p, 10) for p in prompts]


async def test_a_preempted_sequence_goes_on_with_the_same_tokens(
    tiny: Callable[[str], Reference], watcher: Watcher
) -> None:
    reference = tiny("mha")
    prompts = [reference.prompt(30, seed=i) for i in range(8)]
    config = small(reference, kv_cache_capacity_mode="fixed", num_kv_blocks=14)
    async with Engine(config) as engine:
        found = await asyncio.gather(*(read(engine, p, exactly(60)) for p in prompts))
        assert (await at_rest(engine)).preemptions > 0
    assert watcher.broken == []
    assert [tokens_of(deltas) for deltas in found] == [reference.greedy(p, 60) for p in prompts]
    assert [d[-1].num_generated_tokens for d in found] == [60] * 8


async def test_choices_of_one_prompt_share_it_and_then_part(tiny: Callable[[str], Reference], watcher: Watcher) -> None:
    reference = tiny("mha")
    prompt = reference.prompt(2 * BLOCK + 3, seed=5)
    async with Engine(small(reference)) as engine:
        deltas = await read(engine, prompt, exactly(20, n=4))
        await at_rest(engine)
    assert watcher.broken == []
    assert watcher.num_shared > 0
    assert [tokens_of(deltas, choice) for choice in range(4)] == [reference.greedy(prompt, 20)] * 4


async def test_nothing_is_lost_whatever_ends_a_request(tiny: Callable[[str], Reference]) -> None:
    reference = tiny("mha")
    config = small(reference, kv_cache_capacity_mode="fixed", num_kv_blocks=30)
    async with Engine(config) as engine:

        async def leave_after(number: int) -> None:
            async for delta in engine.generate(reference.prompt(10 + number % 50, number), exactly(60)):
                if delta.num_generated_tokens > number % 13:
                    break

        for begin in range(0, 200, 50):
            tasks = [asyncio.create_task(leave_after(number)) for number in range(begin, begin + 50)]
            for task in tasks[::4]:
                asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.gather(*tasks, return_exceptions=True)
        await at_rest(engine)
        prompt = reference.prompt(33, seed=999)
        assert tokens_of(await read(engine, prompt, exactly(20))) == reference.greedy(prompt, 20)
        await at_rest(engine)
