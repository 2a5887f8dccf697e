"""A sequence whose numbers are none gets no token, and neither the others of its step nor later ones see of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import BACKENDS, Driver, make_runner
from safetensors.torch import load_file, save_file

from novainfer.fsm.messages.mode import PRECISIONS, Mode
from novainfer.fsm.messages.step import NO_TOKEN

POISON = 77  # a token whose embedding is NaN
SHAPE = Shape("poisoned", 4, 2, 24, 96, 160, tied=False)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = save_checkpoint(SHAPE, tmp_path_factory.mktemp("poisoned"), getattr(torch, request.param))
    weights = load_file(found / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, found / "model.safetensors", {"format": "pt"})
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_sequence_itself_gets_no_token(backend: str, precision: str, folder: Path) -> None:
    runner = make_runner(folder, backend, num_blocks=16)
    runner.switch(Mode(runner.mode.kernels, precision))
    prompt = [3, 1, 4, 1, 5] * 4
    healthy = Driver(runner)
    expected = healthy.generate([healthy.add(0, prompt)], 3)[0]
    driver = Driver(runner)
    poisoned, well = driver.add(1, [9] * 17 + [POISON] + [9] * 12), driver.add(0, prompt)
    assert driver.step((poisoned, 9), well) == expected[:1]
    assert driver.step(poisoned, well) == [NO_TOKEN, expected[1]]
    driver.release(poisoned)
    # Its blocks go to another one, which fills only a part of them.
    later = driver.add(2, prompt)
    later.blocks = [driver.free.pop(), driver.free.pop()][::-1]
    assert driver.step(later, well) == [expected[0], expected[2]]
    assert driver.generate([later], 2)[0] == expected[1:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_that_is_it_ends_nothing_before_it(backend: str, folder: Path) -> None:
    """Its keys and values lie behind the position that refuses it, and the next step writes over them."""
    runner = make_runner(folder, backend)
    alone = Driver(runner)
    expected = alone.generate([alone.add(0, [5, 6, 7])], 6)[0]
    assert POISON not in expected
    driver = Driver(runner)
    sequence = driver.add(0, [5, 6, 7])
    driver.step(sequence)
    assert driver.verify([sequence], [[expected[1], POISON, expected[3]]]) == [2]
    assert driver.verify([sequence], [[POISON, POISON]]) == [1]
    assert driver.verify([sequence], [[expected[4]]]) == [2]
    assert sequence.tokens[3:] == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_before_it_are_computed_as_without_it(backend: str, folder: Path) -> None:
    """A chunk holds them together, and the last keys and values of the chunk are NaN."""
    runner = make_runner(folder, backend)
    prompt = [3, 1, 4, 1, 5] * 4
    logits = []
    for behind in ([9, 9, 9], [POISON, 9, 9]):
        driver = Driver(runner, capture=True)
        sequence = driver.add(0, prompt + behind)
        driver.step(sequence)
        # The same blocks, without what lay behind: what the chunk has written of the tokens before it.
        before = driver.add(1, [*prompt, 8])
        before.blocks, before.num_computed = list(sequence.blocks), len(prompt)
        driver.step(before)
        logits.append(driver.capturing.logits[-1])
    assert torch.isfinite(logits[0]).all()
    if runner.info.row_invariant:
        assert torch.equal(logits[0], logits[1])
    else:
        torch.testing.assert_close(logits[0], logits[1], rtol=0.05, atol=0.05)
