"""Another KV cache in the place of one that is there: nothing of the old one is left, and what the host holds stays."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import BACKENDS, Driver, Sequence, make_runner

from novainfer.actors.device.device import ModelDevice
from novainfer.fsm.messages.mode import CHECKPOINT, INT8
from novainfer.fsm.messages.step import SeqParams, StepPlan
from novainfer.kernels.errors import LoadError
from novainfer.kernels.runtime.runner import ModelRunner
from tests.actors.devices import model

SHAPE = Shape("fitted again", 4, 2, 24, 64, 160)
LONG = [(7 * i + 3) % 160 for i in range(70)]  # five blocks of 16
SHORT = [(11 * i + 5) % 160 for i in range(9)]
FREE = "novainfer.kernels.runtime.cache.free_bytes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("fitted"))


def fit(runner: ModelRunner, num_blocks: int, num_host_blocks: int = 0, *, again: bool = False) -> int:
    swap_space = num_host_blocks * runner.info.kv_bytes_per_block
    return runner.fit(mode="fixed", num_blocks=num_blocks, swap_space_bytes=swap_space, again=again)


def together(driver: Driver, num_tokens: int = 6) -> list[list[int]]:
    """A long sequence and a short one, in slots whose tables the sequences before them have left behind."""
    return driver.generate([driver.add(1, LONG), driver.add(0, SHORT)], num_tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_on_a_smaller_and_a_larger_cache_are_as_ever(folder: Path, backend: str) -> None:
    runner = make_runner(folder, backend, num_blocks=64, max_model_len=160)
    expected = together(Driver(runner))
    full = Driver(runner, seed=1)
    full.generate([full.add(slot, LONG) for slot in range(3)], 60)  # tables full of high numbers
    for num_blocks in (14, 128, 10):
        assert fit(runner, num_blocks) == runner.num_blocks == num_blocks
        assert not runner._buffers.block_table.any(), "what a table said of the old cache may not be there in this one"
        runner.warm()
        assert together(Driver(runner, seed=num_blocks)) == expected
    with pytest.raises(ValueError, match="table_blocks of a step must be 0 to 9, not 10"):
        runner.execute(StepPlan(table_slots=[0], table_indexes=[0], table_blocks=[10]))


@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "with a draft model"])
def test_the_memory_of_the_old_cache_is_free_before_the_new_one_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    runner = make_runner(folder, "native", **({"draft_dir": folder, "num_speculative_tokens": 4} if drafts else {}))
    together(Driver(runner))
    old = [weakref.ref(part) for part in runner._cache.parts]
    if runner._proposer is not None:
        old += [weakref.ref(part) for part in runner._proposer._decoder.attention.parts]
    seen = []

    def look(device: torch.device) -> int:
        seen.append([part() is None for part in old])
        return 2**40

    monkeypatch.setattr(FREE, look)
    fit(runner, 32)
    assert [all(gone) for gone in seen[:2]] == [False, True], "before it is let go, and before there is another"


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_what_was_swapped_out_comes_back_into_another_cache(folder: Path, backend: str) -> None:
    undisturbed = Driver(make_runner(folder, backend, max_model_len=160), capture=True)
    undisturbed.generate([undisturbed.add(0, LONG)], 8)

    runner = make_runner(folder, backend, max_model_len=160)
    fit(runner, 64, num_host_blocks=7)
    driver = Driver(runner, capture=True)
    sequence = driver.add(0, LONG)
    driver.generate([sequence], 3)
    hosts = [6, 2, 0, 3, 5][: len(sequence.blocks)]
    runner.execute(StepPlan(swap_out_blocks=list(sequence.blocks), swap_out_hosts=hosts))
    fit(runner, 20, num_host_blocks=7)
    blocks = [19, 3, 11, 0, 7][: len(hosts)]
    runner.execute(StepPlan(swap_in_hosts=hosts, swap_in_blocks=blocks))
    _go_on(driver, sequence, blocks)
    driver.generate([sequence], 5)
    for got, expected in zip(driver.capturing.logits, undisturbed.capturing.logits, strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="swapped blocks of a step must be 0 to 19, not 20"):
        runner.execute(StepPlan(swap_in_hosts=[0], swap_in_blocks=[20]))


def _go_on(driver: Driver, sequence: Sequence, blocks: list[int]) -> None:
    """The sequence has these blocks from now on, and its table is told anew."""
    driver.free = [block for block in range(driver.runner.num_blocks) if block not in blocks]
    sequence.blocks = blocks
    sequence.num_sent_blocks = 0


def test_a_cache_that_can_never_be_is_refused_before_the_old_one_is_touched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folder, "native", num_blocks=32, max_model_len=160)
    driver = Driver(runner)
    sequence = driver.add(0, LONG)
    driver.generate([sequence], 2)
    per_block = runner.info.kv_bytes_per_block
    monkeypatch.setattr(FREE, lambda device: 8 * per_block)
    with pytest.raises(LoadError, match=r"but 9 KV blocks hold 9: max_model_len must be at most 144"):
        fit(runner, 9)
    with pytest.raises(LoadError, match=r"^41 KV blocks need .* GiB are free: at most 40 blocks fit$"):
        fit(runner, 41)
    assert runner.num_blocks == 32
    driver.generate([sequence], 4)
    monkeypatch.undo()
    undisturbed = Driver(make_runner(folder, "native", max_model_len=160))
    assert [sequence.tokens[len(LONG) :]] == undisturbed.generate([undisturbed.add(0, LONG)], 6)


def test_a_cache_that_turns_out_too_large_leaves_room_for_the_old_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pages count when they are written, what the old one gives back is known when it has."""
    runner = make_runner(folder, "native", num_blocks=32, max_model_len=160)
    expected = together(Driver(runner))
    per_block = runner.info.kv_bytes_per_block
    free = [8 * per_block, 15 * per_block]  # of the 32 only 7 were written
    monkeypatch.setattr(FREE, lambda device: free.pop(0) if len(free) > 1 else free[0])
    with pytest.raises(LoadError, match=r"^20 KV blocks need .* at most 15 blocks fit$"):
        fit(runner, 20)
    with pytest.raises(RuntimeError, match="the KV cache is not fitted"):
        runner.warm()
    assert fit(runner, 32, again=True) == 32
    assert together(Driver(runner)) == expected


def test_host_blocks_that_were_never_written_take_from_what_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folder, "native", num_blocks=32, max_model_len=160)
    fit(runner, 32, num_host_blocks=6)
    runner.execute(StepPlan(swap_out_blocks=[0, 1], swap_out_hosts=[4, 5]))
    per_block = runner.info.kv_bytes_per_block
    monkeypatch.setattr(FREE, lambda device: 20 * per_block)
    with pytest.raises(LoadError, match="at most 16 blocks fit"):
        fit(runner, 17, num_host_blocks=6)
    assert fit(runner, 16, num_host_blocks=6) == 16


def test_the_host_keeps_as_many_blocks_as_were_asked_for_last(folder: Path) -> None:
    runner = make_runner(folder, "native", num_blocks=32, max_model_len=160)
    for num_host_blocks in (6, 9, 0, 4):
        fit(runner, 32, num_host_blocks)
        assert runner.num_host_blocks == num_host_blocks
        swap = StepPlan(swap_out_blocks=[1], swap_out_hosts=[max(num_host_blocks - 1, 0)])
        if num_host_blocks:
            runner.execute(swap)
        else:
            with pytest.raises(ValueError, match="there is no swap space"):
                runner.execute(swap)


def test_a_cache_for_another_mode_has_the_kernels_of_that_mode(folder: Path) -> None:
    runner = make_runner(folder, "native", max_model_len=160)
    for mode in runner.info.modes[1:]:
        runner.switch(mode)
        expected = together(Driver(runner))
        kernel = type(runner._decoder.attention)
        fit(runner, 12)
        assert runner.mode == mode
        assert type(runner._decoder.attention) is kernel
        assert together(Driver(runner)) == expected


def test_a_draft_model_begins_anew(folder: Path) -> None:
    options = {"draft_dir": folder, "num_speculative_tokens": 4, "max_model_len": 160}
    runner = make_runner(folder, "native", **options)
    drafts = []
    for num_blocks in (64, 12, 40):
        fit(runner, num_blocks)
        proposer = runner._proposer
        assert proposer is not None
        assert not proposer._drafted.any()
        driver = Driver(runner, num_drafts=4)
        row = driver.add(2, LONG)
        driver.step(row)
        for _ in range(6):
            assert driver.verify([row], driver.last.draft_token_ids) == [5], "it drafts for itself: always right"
        drafts.append(row.tokens)
    assert drafts[0] == drafts[1] == drafts[2]


def test_what_a_draft_model_has_put_off_is_forgotten_with_the_old_cache(folder: Path) -> None:
    runner = make_runner(folder, "native", draft_dir=folder, num_speculative_tokens=4, max_model_len=160)
    fit(runner, 64)
    driver = Driver(runner, num_drafts=4)
    rows = [driver.add(slot, LONG) for slot in range(3)]
    driver.step(*rows)
    driver.num_drafts = 0
    driver.generate(rows, 20)
    proposer = runner._proposer
    assert proposer is not None
    assert proposer._late_tokens
    assert proposer._is_known.any()
    fit(runner, 12)
    assert (proposer._late_tokens, proposer._is_known.any(), len(proposer._drafted)) == ([], False, 12)
    again = Driver(runner, num_drafts=4)
    row = again.add(0, LONG)
    again.step(row)
    assert again.verify([row], again.last.draft_token_ids) == [5]


def test_a_seed_and_a_penalty_go_on_in_another_cache(folder: Path) -> None:
    row = SeqParams(slot=3, temperature=1.5, seed=5, repetition_penalty=1.3, num_prompt_tokens=len(SHORT))
    plain = Driver(make_runner(folder, "native", max_model_len=160))
    expected = plain.generate([plain.add(3, SHORT, row)], 12)[0]
    driver = Driver(make_runner(folder, "native", max_model_len=160))
    sequence = driver.add(3, SHORT, row)
    driver.generate([sequence], 6)
    fit(driver.runner, 11)
    driver.release(sequence)  # it comes back as one that was preempted
    driver.free = list(range(11))
    driver.generate([sequence], 6)
    assert sequence.tokens[len(SHORT) :] == expected


def test_a_device_loads_again_in_another_precision_and_back(folder: Path) -> None:
    spec = model(str(folder), native="1")
    fresh = {}
    for precision in (CHECKPOINT, INT8):
        device = ModelDevice(spec.settings)
        fresh[precision] = _answer(device, precision), device._model.weight_bytes
        device.close()
    assert fresh[CHECKPOINT] != fresh[INT8]
    device = ModelDevice(spec.settings)
    for precision in (CHECKPOINT, INT8, CHECKPOINT):
        old = None if device._runner is None else weakref.ref(device._model._decoder.head.tensors[0])  # type: ignore[attr-defined]
        answer = _answer(device, precision)
        assert (answer, device._model.weight_bytes) == fresh[precision]
        assert old is None or old() is None, "the old weights are gone"
    device.close()


def test_the_old_model_is_gone_before_another_is_read_and_its_steps_are_measured_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, measured, loads = [], [], ModelRunner.load
    device = ModelDevice(model(str(folder), native="1").settings)

    def load(*args: Any, **options: Any) -> ModelRunner:
        read.append(device._runner)
        return loads(*args, **options)

    def costs(runner: ModelRunner) -> list[tuple[int, float]]:
        measured.append(runner.info.modes[0].precision)
        return [(1, 1.0)]

    monkeypatch.setattr(ModelRunner, "load", load)
    monkeypatch.setattr(ModelRunner, "measure_step_costs", costs)
    for precision in (CHECKPOINT, INT8):
        device.load(precision)
        for num_blocks in (40, 30):
            device.fit(num_blocks)
            assert device.warm(measures=False) == {}
            assert device.warm() == {"step_costs": [(1, 1.0)]}
    assert read == [None, None]
    assert measured == [CHECKPOINT, INT8], "they do not depend on the KV cache"
    device.close()


def test_without_a_precision_a_device_loads_as_its_settings_say(folder: Path) -> None:
    device = ModelDevice(model(str(folder), native="1", quantization="int8").settings)
    assert device.load()["modes"][0]["precision"] == INT8
    assert device.load(CHECKPOINT)["modes"][0]["precision"] == CHECKPOINT
    assert device.load()["modes"][0]["precision"] == INT8
    with pytest.raises(LoadError, match="quantization must be one of 'int8', 'int4', 'fp8', 'none', not 'int3'"):
        device.load("int3")
    device.close()


def test_a_first_step_without_memory_has_the_cache_fitted_again_with_less(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ModelDevice(model(str(folder), native="1").settings)
    device.load()
    full = device.fit()["num_blocks"]
    fitted, warm, failures = [full], ModelRunner.warm, [torch.OutOfMemoryError("out of memory")] * 2

    def warmed(runner: ModelRunner) -> None:
        if failures:
            raise failures.pop()
        warm(runner)
        fitted.append(runner.num_blocks)

    monkeypatch.setattr(ModelRunner, "warm", warmed)
    found = device.warm()
    assert found.pop("step_costs")
    assert found == {"num_blocks": full * 7 // 8 * 6 // 8, "num_host_blocks": 0}
    assert fitted == [full, full * 7 // 8 * 6 // 8]
    device.fit()
    failures[:] = [torch.OutOfMemoryError("out of memory")] * 4
    with pytest.raises(torch.OutOfMemoryError):
        device.warm()
    assert len(failures) == 0, "three times less, and then it is the caller's"
    failures[:] = [RuntimeError("another thing")]
    device.fit()
    with pytest.raises(RuntimeError, match="another thing"):
        device.warm()
    assert device._model.num_blocks == full


def test_a_number_of_blocks_that_was_asked_for_is_not_made_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ModelDevice(model(str(folder), native="1").settings)
    device.load()
    monkeypatch.setattr(ModelRunner, "warm", _without_memory)
    device.fit(40, is_new=True)
    with pytest.raises(MemoryError):
        device.warm()
    assert device._model.num_blocks == 40
    device.fit(40)  # as it was a moment ago
    with pytest.raises((MemoryError, LoadError)):
        device.warm()
    assert device._model.num_blocks < 40


def _without_memory(runner: ModelRunner) -> None:
    raise MemoryError("there is none")


def _answer(device: ModelDevice, precision: str) -> list[list[int]]:
    assert device.load(precision)["modes"][0]["precision"] == precision
    assert device.fit(40) == {"num_blocks": 40, "num_host_blocks": 0}
    device.warm()
    driver = Driver(device._model)
    return driver.generate([driver.add(0, [5, 9, 33, 80])], 10)
