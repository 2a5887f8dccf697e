"""Steps that are handed over before the one before has ended: what it samples is put in on the device, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import BACKENDS, Driver, Sequence, make_runner
from safetensors.torch import load_file, save_file

from novainfer.fsm.messages.mode import PRECISIONS, Mode
from novainfer.fsm.messages.step import NO_TOKEN, SAMPLED, Logprobs, SeqParams, StepDone, StepPlan
from novainfer.kernels.step import StepBuffers

SHAPE = Shape("plain", 4, 2, 16, 64, 160, eos_token_id=3)
CPU = torch.device("cpu")
PROMPTS = [[7, 8, 9] * 7, [40], [i % 150 for i in range(30)], [11, 12], [13] * 20]
ROWS = [
    SeqParams(slot=0),
    SeqParams(slot=0, temperature=1.0, seed=5, logprobs=2),
    SeqParams(slot=0, temperature=0.8, seed=6, frequency_penalty=0.7, repetition_penalty=1.2, num_prompt_tokens=30),
    SeqParams(slot=0, presence_penalty=1.0, num_prompt_tokens=2, min_position=12, stop_token_ids=[3, 5, 7]),
    SeqParams(slot=0, temperature=0.7, seed=8, repetition_penalty=1.5, num_prompt_tokens=20, logprobs=0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain"))


def generation(driver: Driver) -> list[tuple[list[int], list[Logprobs | None]]]:
    """What steps give in which prompts, chunks and decodes meet, a row is left out, and a slot changes hands."""
    rows = [driver.add(slot, prompt, row) for slot, (prompt, row) in enumerate(zip(PROMPTS, ROWS, strict=True))]
    first, second, third, fourth, fifth = rows
    found = []

    def step(*work: Sequence | tuple[Sequence, int]) -> None:
        found.append((driver.step(*work), driver.last.logprobs))

    step(first, second)
    step(first, second, (third, 9))
    step(first, second, (third, 20), (fourth, 1))
    step(second, third, fourth)
    for _ in range(8):
        step(fourth, third, second, first)  # the first was left out of one step: its token is told
    driver.release(first)
    fifth.slot = 0
    step(second, fifth, third, fourth)
    for _ in range(20):
        step(fifth, second, third, fourth)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_that_the_plan_does_not_tell_gives_the_same_bits(
    folder: Path, backend: str, precision: str, dtype: str
) -> None:
    runner = make_runner(folder, backend, dtype=dtype)
    runner.switch(Mode(runner.mode.kernels, precision))
    told, hidden = Driver(runner, seed=1), Driver(runner, seed=1, ahead=True)
    expected = generation(told)
    assert generation(hidden) == expected
    assert (told.num_hidden, hidden.num_hidden) == (0, 119)


def test_a_draft_model_guesses_alike(folder: Path) -> None:
    runner = make_runner(folder, draft_dir=folder, num_speculative_tokens=3)
    found = []
    for ahead in (False, True):
        driver = Driver(runner, num_drafts=3, ahead=ahead)
        rows = [driver.add(slot, prompt) for slot, prompt in enumerate(PROMPTS[:3])]
        drafts = []
        for _ in range(20):
            driver.step(*rows)
            drafts.append(driver.last.draft_token_ids)
        found.append(([row.tokens for row in rows], drafts))
    assert found[0] == found[1]
    assert all(len(guesses) == 3 for guesses in found[0][1][-1])


def test_after_drafts_the_last_token_that_was_accepted_follows(folder: Path) -> None:
    runner = make_runner(folder)
    plain = Driver(runner)
    rows = [plain.add(slot, prompt, row) for slot, (prompt, row) in enumerate(zip(PROMPTS, ROWS, strict=True))][:3]
    plain.generate(rows, 12)
    wanted = [row.tokens for row in rows]
    driver = Driver(runner, ahead=True)
    rows = [driver.add(slot, prompt, row) for slot, (prompt, row) in enumerate(zip(PROMPTS, ROWS, strict=True))][:3]
    driver.step(*rows)
    at = [len(row.tokens) for row in rows]
    drafts = [wanted[0][at[0] : at[0] + 3], [], [wanted[2][at[2]], (wanted[2][at[2] + 1] + 1) % 160, 5]]
    assert driver.verify(rows, drafts) == [4, 1, 2]
    driver._sampled = rows
    for _ in range(3):
        driver.step(*rows)
    assert driver.num_hidden == 9
    for row, right in zip(rows, wanted, strict=True):
        assert row.tokens == right[: len(row.tokens)]


def test_a_step_that_fails_leaves_what_was_sampled_and_what_penalties_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails before anything was drawn or behind it: computed again, it gives what it would have given."""
    runner = make_runner(folder, "native")
    expected = generation(Driver(runner))
    for name in ("_lay_out", "_draw"):
        driver = Driver(runner, ahead=True)
        real, calls = getattr(runner, name), iter(range(10**6))

        def failing(*arguments: Any, real: Any = real, calls: Any = calls) -> Any:
            result = real(*arguments)
            if next(calls) % 3 == 0:
                raise RuntimeError("behind everything")
            return result

        run = driver._run

        def twice(plan: StepPlan, run: Any = run) -> StepDone:
            try:
                done: StepDone = run(plan)
            except RuntimeError:
                done = run(plan)
            return done

        monkeypatch.setattr(runner, name, failing)
        monkeypatch.setattr(driver, "_run", twice)
        assert generation(driver) == expected
        monkeypatch.undo()
        assert next(calls) > 30


def test_a_row_whose_token_is_none_goes_on_with_one_that_exists(tmp_path: Path) -> None:
    folder = save_checkpoint(Shape("poisoned", 4, 2, 24, 96, 160, tied=False), tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    runner = make_runner(folder)
    told = Driver(runner)
    expected = told.generate([told.add(0, [1, 2, 3])], 3)[0]
    driver = Driver(runner, ahead=True)
    well, poisoned = driver.add(0, [1, 2, 3]), driver.add(1, [5, 77], ROWS[2])
    assert driver.step(well, poisoned) == [expected[0], NO_TOKEN]
    assert driver.step(well, poisoned)[0] == expected[1]
    driver.release(poisoned)
    again = driver.add(1, [1, 2, 3])
    assert driver.step(well, again) == [expected[2], expected[0]]


def buffers() -> StepBuffers:
    made = StepBuffers(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40, block_size=4, vocab_size=100, device=CPU
    )
    made.begin(20)
    return made


def test_what_was_sampled_is_put_where_the_plan_leaves_it_open() -> None:
    made = buffers()
    made.keep(StepPlan([3, 1, 2], [1, 1, 1], [9, 20, 7], sample_seqs=[2, 0]), [50, NO_TOKEN], [])
    plan = StepPlan([2, 1, 3], [1, 2, 1], [8, 22, 10], [SAMPLED, 5, 6, SAMPLED], after=1)
    assert made.fill(plan).input_ids.tolist() == [50, 5, 6, 0]
    made.keep(StepPlan([0, 2], [4, 3], [9, 10], sample_seqs=[0, 1], num_drafts=[3, 2]), [1, 2, 3, 4], [3, 1])
    plan = StepPlan([0, 2], [1, 2], [9, 9], [SAMPLED, 8, SAMPLED], after=2)
    assert made.fill(plan).input_ids.tolist() == [3, 8, 4]


@pytest.mark.parametrize(
    ("slot", "position", "sentence"),
    [
        (0, 5, "slot 0 was given at position 5, but its last one stands at -1"),
        (2, 8, "slot 2 was given at position 8, but its last one stands at 7"),
        (2, 6, "slot 2 was given at position 6, but its last one stands at 7"),
    ],
)
def test_a_token_that_was_not_sampled_just_before_is_refused(slot: int, position: int, sentence: str) -> None:
    made = buffers()
    made.keep(StepPlan([2], [1], [7], sample_seqs=[0]), [50], [])
    with pytest.raises(ValueError, match=sentence):
        made.fill(StepPlan([slot], [1], [position + 1], [SAMPLED], after=1))


def test_only_a_step_that_follows_on_another_may_leave_tokens_open() -> None:
    made = buffers()
    made.keep(StepPlan([2], [1], [7], sample_seqs=[0]), [50], [])
    with pytest.raises(ValueError, match="input_ids of a step must be 0 to 99, not -1"):
        made.fill(StepPlan([2], [1], [8], [SAMPLED]))
    with pytest.raises(ValueError, match="not -2"):
        made.fill(StepPlan([2], [1], [8], [-2], after=1))
    made.keep(StepPlan([2], [2], [8], sample_seqs=[0], num_drafts=[1]), [4, 5], [2])
    with pytest.raises(ValueError, match="slot 2 was given at position 9, but its last one stands at 8"):
        made.fill(StepPlan([2], [2], [10], [4, SAMPLED], sample_seqs=[0], num_drafts=[1], after=1))
