"""The draft model: guesses as it alone would, whatever its cache has missed, and never changes what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Shape, save_checkpoint
from driver import Driver, Sequence, backend_registry, make_runner

from novainfer.fsm.messages.step import SeqParams, StepPlan
from novainfer.kernels.errors import LoadError
from novainfer.kernels.runtime.proposer import LATE_STEPS, Proposer
from novainfer.kernels.runtime.runner import DRAFT_FAILURES_MAX, GIVEN_UP, ModelRunner

SHAPE = Shape("plain", 4, 2, 16, 64, 160, eos_token_id=3)
SMALLER = Shape("smaller", 2, 1, 16, 32, 160, num_layers=1, eos_token_id=3)
OTHER = Shape("other", 2, 1, 16, 32, 170, num_layers=1)
PROMPT = [7, 8, 9, 10, 11] * 5
K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SMALLER, tmp_path_factory.mktemp("smaller"))


def drafting(folder: Path, draft: Path, backend: str = "torch", **options: Any) -> ModelRunner:
    return make_runner(folder, backend, draft_dir=draft, num_speculative_tokens=K, **options)


def alone(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """What a model says when it is asked greedily."""
    driver = Driver(make_runner(folder, "torch"))
    return driver.generate([driver.add(0, prompt)], num_tokens)[0]


def check_drafts(driver: Driver, draft: Path, *rows: Sequence) -> None:
    """The drafts of the last step are what the draft model says behind all tokens so far, and it has computed those."""
    proposer = driver.runner._proposer
    assert proposer is not None
    assert driver.last.draft_error is None
    for row, drafts in zip(rows, driver.last.draft_token_ids, strict=True):
        assert proposer._tokens[row.slot, : len(row.tokens)].tolist() == row.tokens
        left = [max(len(row.tokens) - at * driver.block_size, 0) for at in range(len(row.blocks))]
        assert proposer._drafted[row.blocks].tolist() == [min(count, driver.block_size) for count in left]
        assert drafts == alone(draft, row.tokens, K)


def test_drafts_are_what_the_draft_model_says_alone(folder: Path, smaller: Path) -> None:
    """From the end of the prompt on, over the edges of blocks, for several rows, with drafts taken and refused."""
    driver = Driver(drafting(folder, smaller), num_drafts=K)
    first, second = driver.add(0, PROMPT), driver.add(2, [5, 6], SeqParams(slot=0, temperature=1.0, seed=4))
    driver.step((first, 11))
    driver.step(first, second)
    check_drafts(driver, smaller, first, second)
    for step in range(12):
        drafts = driver.last.draft_token_ids if step % 3 else [[1, 2], [3]]  # what is verified need not be its own
        driver.verify([first, second], drafts)
        check_drafts(driver, smaller, first, second)


def test_drafts_beyond_the_blocks_of_a_sequence_lie_in_blocks_of_its_slot(folder: Path, smaller: Path) -> None:
    driver = Driver(drafting(folder, smaller), num_drafts=K)
    rows = [driver.add(slot, PROMPT[:14]) for slot in (0, 2, 1)]
    driver.step(*rows)
    check_drafts(driver, smaller, *rows)
    proposer = driver.runner._proposer
    assert proposer is not None
    tables, num_blocks = proposer._buffers.block_table, len(proposer._drafted)
    scratch = [{int(block) for block in tables[slot] if block >= num_blocks} for slot in range(3)]
    assert all(scratch)
    assert len(set.union(*scratch)) == sum(map(len, scratch))
    for _ in range(20):  # at every place in a block
        driver.step(*rows)
        check_drafts(driver, smaller, *rows)


def test_a_model_that_drafts_for_itself_is_always_right(folder: Path) -> None:
    for backend in ("torch", "native"):
        driver = Driver(drafting(folder, folder, backend), num_drafts=K)
        row = driver.add(0, PROMPT)
        driver.step(row)
        while len(row.tokens) < len(PROMPT) + 60:
            assert driver.verify([row], driver.last.draft_token_ids) == [K + 1]
        assert row.tokens[len(PROMPT) :][:60] == alone(folder, PROMPT, 60)


@pytest.mark.parametrize("row", [
    SeqParams(slot=0),
    SeqParams(slot=0, temperature=1.0, seed=9, logprobs=1),
    SeqParams(slot=0, temperature=0.7, seed=9, frequency_penalty=0.6, num_prompt_tokens=len(PROMPT)),
], ids=["greedy", "random", "penalties"])  # fmt: skip
def test_what_is_said_does_not_depend_on_the_draft_model(folder: Path, smaller: Path, row: SeqParams) -> None:
    plain = Driver(make_runner(folder, "native"))
    expected = plain.generate([plain.add(0, PROMPT, row)], 40)[0]
    driver = Driver(drafting(folder, smaller, "native"), num_drafts=K)
    found = driver.add(0, PROMPT, row)
    driver.step(found)
    while len(found.tokens) < len(PROMPT) + 40:
        driver.verify([found], driver.last.draft_token_ids)
    assert found.tokens[len(PROMPT) :][:40] == expected


def test_it_catches_up_on_what_it_did_not_compute(folder: Path, smaller: Path) -> None:
    """Steps in which no drafts were wanted, a prefix that another sequence has computed, blocks back from the host."""
    runner = drafting(folder, smaller)
    driver = Driver(runner, num_drafts=0)
    first = driver.add(0, PROMPT)
    driver.num_drafts = K
    driver.step((first, 20))
    driver.num_drafts = 0
    driver.step(first)
    driver.generate([first], 7)
    assert driver.last.draft_token_ids == []
    driver.num_drafts = K
    driver.step(first)
    check_drafts(driver, smaller, first)
    driver.num_drafts = 0
    driver.generate([first], 2)
    sharing = driver.share(1, [*PROMPT, 40, 41], first)
    driver.num_drafts = K
    driver.step(sharing, first)
    check_drafts(driver, smaller, sharing, first)
    runner.execute(StepPlan(swap_out_blocks=[], swap_in_blocks=[]))
    kept = runner._proposer
    assert kept is not None
    assert kept._drafted[first.blocks[0]] == 16
    kept.follow(StepPlan(swap_in_blocks=[first.blocks[0]]))
    assert kept._drafted[first.blocks[0]] == 0
    driver.step(first)
    check_drafts(driver, smaller, first)
    assert kept._drafted[first.blocks[0]] == 16  # though it has the block behind it
    kept._drafted[first.blocks[0]] = 0
    kept._drafted[first.blocks[1]] = 16
    runner.execute(StepPlan(copy_from_blocks=[0], copy_to_blocks=[first.blocks[1]]))  # and nothing is computed
    assert kept._drafted[first.blocks[1]] == 0
    driver.step(first)
    check_drafts(driver, smaller, first)
    assert kept._drafted[first.blocks[0]] == 16


@pytest.mark.parametrize("is_same", [False, True])
@pytest.mark.parametrize("length", [25, 17, 31], ids="{} tokens".format)
def test_of_rows_that_share_their_last_block_those_are_drafted_that_go_on_alike(
    folder: Path, smaller: Path, is_same: bool, length: int
) -> None:
    """Two choices of one prompt: where what they say first differs, it must not be written into one cell."""
    driver, prompt = Driver(drafting(folder, smaller), num_drafts=K), (2 * PROMPT)[:length]
    seeds = (0, 0) if is_same else (0, 1)
    rows = [
        driver.add(slot, prompt, SeqParams(slot=slot, temperature=2.0, seed=seed)) for slot, seed in enumerate(seeds)
    ]
    first, second = rows
    driver._grow(first, length)
    second.blocks, second.num_computed = list(first.blocks), length - 1
    driver.step(first, second)
    assert (first.tokens[-1] == second.tokens[-1]) == is_same
    expected = [alone(smaller, row.tokens, K) for row in rows]  # [42, 42, 77]; [42, 42, 42] where the other is read
    assert driver.last.draft_token_ids == [expected[0], expected[1] if is_same else []]
    second.blocks[1:], second.num_sent_blocks = [driver.free.pop()], 1
    copied = StepPlan(copy_from_blocks=[first.blocks[1]], copy_to_blocks=[second.blocks[1]])
    driver.runner.execute(copied)
    for _ in range(3):
        driver.step(first, second)
        check_drafts(driver, smaller, first, second)


def test_a_block_of_another_owner_holds_nothing_of_the_last_one(folder: Path, smaller: Path) -> None:
    driver = Driver(drafting(folder, smaller, num_blocks=16), num_drafts=K)
    first = driver.add(0, PROMPT)
    driver.step(first)
    blocks = list(first.blocks)
    driver.release(first)
    second = driver.add(0, [50, 51, 52])
    second.blocks = blocks[:1]
    for _ in range(20):  # it grows into another one
        driver.step(second)
        check_drafts(driver, smaller, second)
    assert blocks[1] in second.blocks


def test_what_a_slot_was_given_late_is_not_taken_for_its_next_owners(folder: Path, smaller: Path) -> None:
    """Of steps without drafts the tokens are noted later; by then the slot may have another owner."""
    driver = Driver(drafting(folder, smaller), num_drafts=K)
    proposer = driver.runner._proposer
    assert proposer is not None
    first, other, third = driver.add(0, PROMPT), driver.add(1, PROMPT[:4]), driver.add(2, [5, 6])
    driver.step((other, 1), first, third)
    driver.num_drafts = 0
    for step in range(LATE_STEPS + 3):
        driver.step((other, 1), first, third) if step < 3 else driver.step(first, third)
    assert len(proposer._late_tokens) == 3
    driver.release(first)
    driver.num_drafts = K
    second = driver.add(0, [*range(20, 80), *range(20, 80)])
    driver.step(second)
    check_drafts(driver, smaller, second)
    driver.step(other, third)
    check_drafts(driver, smaller, other, third)


def test_more_than_a_step_holds_is_caught_up_in_several(folder: Path, smaller: Path) -> None:
    driver = Driver(drafting(folder, smaller, max_num_batched_tokens=16), num_drafts=0)
    first = driver.add(0, PROMPT)
    driver.num_drafts = K  # so that its tokens are told; it is first asked when all of them are there
    driver.step((first, 16))
    driver.step(first)
    assert driver.last.draft_token_ids == []
    driver.step(first)
    check_drafts(driver, smaller, first)


def test_what_several_rows_catch_up_on_is_no_more_than_a_step_holds(folder: Path, smaller: Path) -> None:
    driver = Driver(drafting(folder, smaller, max_num_batched_tokens=40), num_drafts=K)
    first, second = driver.add(0, PROMPT), driver.add(1, PROMPT[::-1])
    driver.step((first, 20))
    driver.step((second, 20))
    driver.step(first, second)
    assert driver.last.draft_error is None
    assert [len(drafts) for drafts in driver.last.draft_token_ids] == [K, 0]
    driver.step(first, second)
    check_drafts(driver, smaller, first, second)


def test_no_draft_goes_beyond_a_context(folder: Path, smaller: Path) -> None:
    driver = Driver(drafting(folder, smaller, max_model_len=32), num_drafts=K)
    first = driver.add(0, PROMPT)
    found = []
    for _ in range(8):
        driver.step(first)
        found.append([len(drafts) for drafts in driver.last.draft_token_ids])
    assert len(first.tokens) == 33
    assert found == [[K], [K], [K], [K], [2], [1], [], []]


def test_an_error_of_the_draft_model_costs_drafts_and_no_tokens(
    folder: Path, smaller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(folder, PROMPT, 8)
    runner = drafting(folder, smaller)
    driver = Driver(runner, num_drafts=K)
    first = driver.add(0, PROMPT)
    proposer = runner._proposer
    assert proposer is not None

    def fail(plan: StepPlan) -> list[int]:
        raise RuntimeError("planted")

    for round_ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(proposer, "_compute", fail)
            driver.step(first)
        assert (driver.last.draft_error, driver.last.draft_token_ids) == ("RuntimeError: planted", [])
        assert driver.last.draft_s > 0  # it took its time all the same
        if round_ == 0:
            driver.step(first)
            check_drafts(driver, smaller, first)
    monkeypatch.setattr(proposer, "_compute", fail)
    for _ in range(DRAFT_FAILURES_MAX - 1):
        driver.step(first)
    assert "given up" in (driver.last.draft_error or "")
    driver.step(first)
    assert (driver.last.draft_error, driver.last.draft_token_ids) == (GIVEN_UP, [])
    driver.step(first)
    driver.step(first)
    assert first.tokens[len(PROMPT) :] == expected
    # Another cache is the target's alone.
    assert runner.fit(mode="fixed", num_blocks=16) == 16
    monkeypatch.setattr(
        "novainfer.kernels.runtime.cache.free_bytes", lambda device: 16 * runner.info.kv_bytes_per_block
    )
    assert runner.fit(mode="fixed", num_blocks=16) == 16
    assert Driver(runner).generate([driver.add(0, PROMPT)], 8) == [expected]


def test_drafts_for_a_slot_whose_tokens_were_not_given_are_an_error(folder: Path, smaller: Path) -> None:
    driver = Driver(drafting(folder, smaller))
    first = driver.add(0, PROMPT)
    driver.step(first)
    driver.num_drafts = K
    driver.step(first)
    assert "whose tokens so far were not given" in (driver.last.draft_error or "")


def test_a_draft_model_must_have_the_tokenizer_of_its_target(folder: Path, smaller: Path, tmp_path: Path) -> None:
    other = save_checkpoint(OTHER, tmp_path / "other")
    with pytest.raises(LoadError, match=r"a vocabulary of 170 tokens, and the model it drafts for one of 160"):
        drafting(folder, other)
    folders = []
    for name, ids in (("one", (0, 1)), ("two", (1, 0))):
        made = save_checkpoint(SMALLER, tmp_path / name)
        given = {"model": {"vocab": {"a": ids[0], "b": ids[1]}}, "added_tokens": [{"id": 2, "content": "<s>"}]}
        (made / "tokenizer.json").write_text(json.dumps(given))
        folders.append(made)
    with pytest.raises(LoadError, match=r"their tokenizer\.json give tokens other ids"):
        drafting(*folders)
    drafting(folders[0], folders[0]).close()
    (folders[0] / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(LoadError, match=r"one/tokenizer\.json cannot be read: RecursionError"):
        drafting(*folders)


def test_its_cache_counts_among_what_fits(folder: Path, smaller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner.load(
        folder, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, draft_dir=smaller,
        num_speculative_tokens=K, registry=backend_registry("torch"),
    )  # fmt: skip
    proposer = runner._proposer
    assert proposer is not None
    both = runner.info.kv_bytes_per_block + proposer.bytes_per_block
    assert proposer.scratch_bytes == 2 * 2 * proposer.bytes_per_block
    monkeypatch.setattr("novainfer.kernels.runtime.cache.free_bytes", lambda device: proposer.scratch_bytes + 6 * both)
    with pytest.raises(LoadError, match="at most 6 blocks fit"):
        runner.fit(mode="fixed", num_blocks=7)
    assert runner.fit(mode="fixed", num_blocks=6) == 6


def test_a_draft_model_that_cannot_compute_is_told_before_the_first_request(
    folder: Path, smaller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(proposer: Proposer, plan: StepPlan) -> list[int]:
        raise RuntimeError("planted")

    monkeypatch.setattr(Proposer, "_compute", fail)
    with pytest.raises(LoadError, match="the draft model proposes nothing: RuntimeError: planted"):
        drafting(folder, smaller)
