"""Steps that are launched before the one before was read: buffers in a ring, tokens that stay in a pool on the device.

The CPU stands for the device: it has buffers of its own, as CUDA's are, and computes when it is told to.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import Driver, make_runner
from test_ahead import PROMPTS, ROWS, generation

from novainfer.fsm.messages.step import NO_TOKEN, SAMPLED, STEPS_IN_FLIGHT_MAX, StepPlan
from novainfer.kernels.ops.row_ops import resolved
from novainfer.kernels.runtime.flight import Flight
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.step import StepBuffers

SHAPE = Shape("plain", 4, 2, 16, 64, 160, eos_token_id=3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain"))


def buffers(max_num_seqs: int = 4) -> StepBuffers:
    made = StepBuffers(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_model_len=40,
        block_size=4,
        vocab_size=100,
        device=CPU,
        staged=True,
    )
    made.begin(20)
    return made


def beside_the_host(runner: ModelRunner) -> ModelRunner:
    """`runner`, with buffers of the device's own, whose tokens nothing reads before `Flight.done`."""
    own = runner._buffers
    runner._buffers = StepBuffers(
        max_num_seqs=own.max_num_seqs,
        max_num_batched_tokens=own.max_num_batched_tokens,
        max_model_len=own.max_model_len,
        block_size=own.block_size,
        vocab_size=own.vocab_size,
        device=CPU,
        staged=True,
    )
    runner._buffers.begin(runner.num_blocks)
    runner._is_ahead = True
    return runner


@pytest.mark.parametrize("ahead", [False, True])
def test_a_device_beside_the_host_gives_the_same_bits(folder: Path, ahead: bool) -> None:
    expected = generation(Driver(make_runner(folder), seed=1))
    driver = Driver(beside_the_host(make_runner(folder)), seed=1, ahead=ahead)
    assert generation(driver) == expected
    assert driver.num_hidden == (119 if ahead else 0)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(folder: Path) -> None:
    told = Driver(make_runner(folder))
    rows = [told.add(slot, prompt, row) for slot, (prompt, row) in enumerate(zip(PROMPTS, ROWS, strict=True))][:3]
    told.step(*rows)
    expected = [told.step(*rows) for _ in range(6)]
    driver = Driver(beside_the_host(make_runner(folder)))
    rows = [driver.add(slot, prompt, row) for slot, (prompt, row) in enumerate(zip(PROMPTS, ROWS, strict=True))][:3]
    driver.step(*rows)
    for row in rows:  # the plans tell of blocks, but of no token
        driver._grow(row, len(row.tokens) + 8)
    plan = StepPlan(step_id=7)
    for row in rows:
        driver._add_row(plan, row, row.tokens)
    plan.sample_seqs = [0, 1, 2]
    flights = [driver.runner.launch(plan)]
    for step in range(1, 6):
        ends = [len(row.tokens) + step for row in rows]
        plan = StepPlan([0, 1, 2], [1, 1, 1], ends, [SAMPLED] * 3, sample_seqs=[0, 1, 2], step_id=7 + step)
        plan.after = plan.step_id - 1
        flights.append(driver.runner.launch(plan))
    for flight in flights:
        flight.wait()
    assert [flight.done().token_ids for flight in flights] == expected


def test_what_the_computation_needs_is_there_at_launch_on_the_cpu(folder: Path) -> None:
    runner = make_runner(folder)
    flight = runner.launch(StepPlan([0], [2], [2], [5, 6], [0], [0], [0], [0], step_id=3))
    assert flight.is_through
    assert flight.done() == runner.execute(StepPlan([0], [2], [2], [5, 6], [0], [0], [0], [0], step_id=3))


def test_a_flight_waits_for_its_event_and_raises_what_that_raises() -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    flight = Flight(lambda: pytest.fail("it has not ended"), Broken())  # type: ignore[arg-type]
    assert not flight.is_through
    with pytest.raises(RuntimeError, match="illegal memory access"):
        flight.wait()


def test_a_step_that_fails_at_launch_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, waited = make_runner(folder), []

    def fails(*_: object) -> None:
        raise MemoryError("no room for scores")

    def wait() -> None:
        waited.append("the step before")
        raise RuntimeError("and that has failed as well")

    monkeypatch.setattr(runner, "_draw", fails)
    monkeypatch.setattr(runner, "_wait", wait)
    with pytest.raises(MemoryError, match="no room for scores"):
        runner.launch(StepPlan([0], [2], [2], [5, 6], [0], [0], [0], [0]))
    assert waited == ["the step before"]


def test_the_pool_holds_what_each_slot_was_given_last() -> None:
    made = buffers()
    plan = StepPlan([3, 1, 2], [1, 1, 1], [9, 20, 7], [4, 5, 6], sample_seqs=[2, 0])
    made.keep_on_device(plan, made.fill(plan), torch.tensor([50, NO_TOKEN]))
    following = StepPlan([2, 1, 3], [1, 2, 1], [8, 22, 10], [SAMPLED, 5, 6, SAMPLED], after=1)
    step = made.fill(following)
    assert step.input_ids.tolist() == [-3, 5, 6, -4]
    assert resolved(step.input_ids, step.token_pool).tolist() == [50, 5, 6, 0]
    drafted = StepPlan([0, 2], [4, 3], [9, 10], sample_seqs=[0, 1], num_drafts=[3, 2])
    made.keep(drafted, [1, 2, 3, 4], [3, 1])
    step = made.fill(StepPlan([0, 2], [1, 2], [9, 9], [SAMPLED, 8, SAMPLED], after=2))
    assert resolved(step.input_ids, step.token_pool).tolist() == [3, 8, 4]


def test_the_host_knows_where_tokens_stand_that_it_has_not_seen() -> None:
    made = buffers()
    plan = StepPlan([2], [1], [7], [4], sample_seqs=[0])
    made.keep_on_device(plan, made.fill(plan), torch.tensor([50]))
    with pytest.raises(ValueError, match="slot 2 was given at position 8, but its last one stands at 7"):
        made.fill(StepPlan([2], [1], [9], [SAMPLED], after=1))
    with pytest.raises(ValueError, match="slot 0 was given at position 7, but its last one stands at -1"):
        made.fill(StepPlan([0], [1], [8], [SAMPLED], after=1))


def test_steps_in_flight_are_laid_out_in_buffers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plan = buffers(), StepPlan([0], [1], [1], [5])
    free: list[object] = list(made._stagings)
    assert len(free) == STEPS_IN_FLIGHT_MAX
    used = []
    for staging in made._stagings:
        monkeypatch.setattr(staging, "wait", lambda staging=staging: used.append(("wait", staging)))
        monkeypatch.setattr(staging, "sent", lambda staging=staging: used.append(("sent", staging)))
    for _ in range(2 * STEPS_IN_FLIGHT_MAX):
        made.fill(plan)
    order = [staging for staging in free * 2 for _ in "ws"]
    assert used == list(zip(["wait", "sent"] * len(order), order, strict=False))


def test_the_table_of_the_device_follows_that_of_the_host() -> None:
    made = buffers()
    made.fill(StepPlan([1], [1], [8], [5], [1, 1], [0, 1], [3, 4]))
    made.update_table(StepPlan(table_slots=[2, 2], table_indexes=[0, 0], table_blocks=[6, 7]))  # a step of copies only
    step = made.fill(StepPlan([2, 1], [1, 1], [3, 8], [5, 6]))
    assert step.block_tables.tolist() == [[7, 0], [3, 4]]
    for _ in range(30):
        made.update_table(StepPlan(table_slots=[0] * 10, table_indexes=list(range(10)), table_blocks=[2] * 10))
    assert made.fill(StepPlan([0], [1], [40], [5])).block_tables.tolist() == [[2] * 10]
    made.begin(20)
    assert made.fill(StepPlan([2, 0], [1, 1], [3, 8], [5, 6])).block_tables.tolist() == [[0, 0], [0, 0]]


def test_what_did_not_get_over_goes_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = buffers()

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "index_select", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            made.fill(StepPlan([1], [1], [8], [5], [1, 1], [0, 1], [3, 4]))
    made._device_table.zero_()  # nothing of it has got there
    assert made.fill(StepPlan([1], [1], [8], [5])).block_tables.tolist() == [[3, 4]]


def test_every_step_of_a_bucket_lies_where_the_others_do() -> None:
    made = buffers(max_num_seqs=6)
    first = made.fill(StepPlan([4, 1, 0], [1, 1, 1], [8, 3, 1], [5, 6, 7], [4], [1], [9], [0, 1, 2]), bucket=4)
    assert first.input_ids.tolist() == [5, 6, 7, 0]
    assert first.positions.tolist() == [7, 2, 0, 0]
    assert first.slot_mapping.tolist() == [39, 2, 0, -1]
    assert first.query_start.tolist() == [0, 1, 2, 3, 4]
    assert first.context_lens.tolist() == [8, 3, 1, 0]
    assert first.block_tables[:3].tolist() == [[0, 9, *[0] * 8], [0] * 10, [0] * 10]
    assert (first.num_samples, first.logit_rows, first.bucket) == (3, None, 4)
    assert first.sample_slots is not None
    assert first.sample_slots.tolist() == [4, 1, 0]

    def places(step: object) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        names = ("input_ids", "positions", "slot_mapping", "query_start", "context_lens", "block_tables", "token_pool")
        found = [getattr(step, name) for name in names]
        return [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in found]

    was = places(first)
    made.fill(StepPlan([2, 3], [5, 1], [5, 3], [1, 2, 3, 4, 5, 6]))
    second = made.fill(StepPlan([2], [1], [30], [8], sample_seqs=[0]), bucket=4)
    assert places(second) == was == places(made.blank(4))
    blank = made.blank(4)
    assert (blank.slot_mapping.tolist(), blank.context_lens.tolist()) == ([-1] * 4, [0] * 4)
    assert made.fill(StepPlan([2], [1], [30], [8], sample_seqs=[]), bucket=4).logit_rows is not None


@pytest.mark.parametrize(("query_lens", "bucket"), [([1, 1], 1), ([1, 2], 4), ([1, 1], 7)])
def test_only_a_step_of_one_token_a_row_is_padded_to_a_bucket_that_exists(query_lens: list[int], bucket: int) -> None:
    plan = StepPlan([0, 1], query_lens, [3, 3], [5] * sum(query_lens))
    with pytest.raises(ValueError, match=f"cannot be padded to {bucket} rows"):
        buffers(max_num_seqs=6).fill(plan, bucket=bucket)
