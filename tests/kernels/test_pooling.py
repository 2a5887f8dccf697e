"""Pooled rows: sums of the hidden states that transformers gives behind the last norm, in any chunks and company."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, load_transformers, save_checkpoint
from driver import BACKENDS, Driver, Sequence, make_runner
from safetensors.torch import save_file
from test_flight import beside_the_host

from novainfer.fsm.messages.step import StepPlan
from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.registry import read_config
from novainfer.kernels.runtime.pooling import Pooled
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.step import StepBuffers

CPU = torch.device("cpu")
SHAPE = Shape("plain", 4, 2, 16, 64, 160, num_layers=3)
PROMPTS = [[(17 * at + at * at + first) % 150 for at in range(length)] for first, length in ((3, 61), (8, 1), (5, 40))]


@pytest.fixture(scope="module", params=[*BACKENDS, "ahead"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain"))
    if request.param == "ahead":  # the way that steps take where the device computes beside its host
        return beside_the_host(make_runner(folder))
    return make_runner(folder, request.param)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """Hidden states of each prompt behind the last norm [length, hidden_size], as transformers computes them."""
    model = load_transformers(save_checkpoint(SHAPE, tmp_path_factory.mktemp("same")), torch.float32)
    with torch.inference_mode():
        return [model.model(torch.tensor([prompt])).last_hidden_state[0].double() for prompt in PROMPTS]


def add_pool(plan: StepPlan, driver: Driver, sequence: Sequence, num_tokens: int, num_pooled: int) -> None:
    """The next tokens of `sequence`, of which the last ones are pooled."""
    tokens = sequence.tokens[: sequence.num_computed + num_tokens]
    if num_pooled:
        plan.pool_seqs.append(len(plan.slots))
        plan.pool_lens.append(num_pooled)
    driver._add_row(plan, sequence, tokens)
    sequence.num_computed = len(tokens)


def numbers(found: bytes) -> torch.Tensor:
    return torch.tensor(struct.unpack(f"<{len(found) // 8}d", found), dtype=torch.float64)


def test_means_and_last_tokens_are_those_of_transformers(runner: ModelRunner, states: list[torch.Tensor]) -> None:
    """Two means in chunks, one of them of a single token, and a last token, beside a row that decodes."""
    driver = Driver(runner)
    beside, alone = driver.add(3, [4, 5, 6]), driver.add(4, [4, 5, 6])
    driver.generate([alone], 5)
    driver.step(beside)
    long, single, last = (driver.add(slot, prompt) for slot, prompt in enumerate(PROMPTS))
    total = torch.zeros(64, dtype=torch.float64)
    for at, chunk in enumerate((29, 31, 1)):
        plan = StepPlan()
        if at == 0:
            add_pool(plan, driver, single, 1, 1)
        plan.sample_seqs = [len(plan.slots)]
        driver._add_row(plan, beside, beside.tokens)
        add_pool(plan, driver, long, chunk, chunk)
        if at < 2:  # the first chunk of what is pooled by its last token asks for nothing
            add_pool(plan, driver, last, 20, at)
        done = driver._run(plan)
        beside.tokens += done.token_ids
        beside.num_computed = len(beside.tokens) - 1
        sums = [numbers(found) for found in done.pooled]
        assert len(sums) == [2, 2, 1][at]
        if at == 0:
            torch.testing.assert_close(sums.pop(0), states[1][0], rtol=1e-3, atol=1e-4)
        total += sums[0]
        if at == 1:
            torch.testing.assert_close(sums[1], states[2][-1], rtol=1e-3, atol=1e-4)
    assert beside.tokens == alone.tokens[: len(beside.tokens)]
    torch.testing.assert_close(total, states[0].sum(0), rtol=1e-3, atol=1e-3)


def test_chunks_change_a_sum_by_less_than_a_float_shows(runner: ModelRunner) -> None:
    """Rows are the same bits in every chunk, and doubles keep what their sums would lose."""
    if not runner.info.row_invariant:
        pytest.skip("rows of these kernels depend on the rows beside them")
    found = []
    for slot, chunk in enumerate((61, 20, 7)):
        driver = Driver(runner, seed=slot)
        sequence = driver.add(slot, PROMPTS[0])
        total = torch.zeros(64, dtype=torch.float64)
        while left := len(PROMPTS[0]) - sequence.num_computed:
            plan = StepPlan()
            add_pool(plan, driver, sequence, min(chunk, left), min(chunk, left))
            total += numbers(driver._run(plan).pooled[0])
        found.append(total)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-13, atol=1e-13)


def test_a_pool_beside_what_is_sampled_and_scored_has_its_own_rows(runner: ModelRunner) -> None:
    """All at once: rows of drafts, of scores, and of two pools."""
    driver = Driver(runner)
    first, second = driver.add(0, PROMPTS[0][:9]), driver.add(1, PROMPTS[2][:5])
    plan = StepPlan()
    add_pool(plan, driver, first, 9, 4)
    add_pool(plan, driver, second, 5, 5)
    expected = [numbers(found) for found in driver._run(plan).pooled]
    driver.release(first)
    driver.release(second)
    plan = StepPlan(sample_seqs=[0], num_drafts=[2])
    driver._add_row(plan, driver.add(2, []), [1, 2, 3, 4])
    add_pool(plan, driver, first, 9, 4)
    plan.score_rows, plan.score_ids, plan.score_tops = [5, 7], [1, 2], [0, 0]
    add_pool(plan, driver, second, 5, 5)
    done = driver._run(plan)
    assert len(done.scores) == 2
    for sums, alone in zip(done.pooled, expected, strict=True):
        torch.testing.assert_close(numbers(sums), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_a_decoder_saved_without_its_head_is_read(tmp_path: Path, tied: bool, architecture: str) -> None:
    """As Qwen3-Embedding is: names without a prefix, and no head even where config.json calls for one."""
    shape = replace(SHAPE, family="Qwen3", tied=tied)
    folder = save_checkpoint(shape, tmp_path)
    model = load_transformers(folder, torch.float32)
    with torch.inference_mode():
        expected = model.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1].double()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    tensors = {k.removeprefix("model."): v for k, v in model.state_dict().items() if not k.startswith("lm_head.")}
    assert "embed_tokens.weight" in tensors
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    driver, plan = Driver(make_runner(folder)), StepPlan()
    add_pool(plan, driver, driver.add(0, PROMPTS[0]), len(PROMPTS[0]), 1)
    (found,) = driver._run(plan).pooled
    torch.testing.assert_close(numbers(found), expected, rtol=1e-3, atol=1e-4)
    (folder / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(LoadError, match="is_causal false is not supported"):
        read_config(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_exact_in_doubles(dtype: torch.dtype) -> None:
    hidden = torch.randn(9, 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = Pooled(hidden, [1, 6, 2]).read()
    for sums, rows in zip(found, hidden.split([1, 6, 2]), strict=True):
        torch.testing.assert_close(numbers(sums), rows.double().sum(0), rtol=1e-15, atol=1e-15)
    assert [numbers(one).tolist() for one in Pooled(hidden, [1] * 9).read()] == hidden.double().tolist()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"pool_seqs": [1]}, "pool_seqs and pool_lens of a step must be of one length"),
        ({"pool_seqs": [2], "pool_lens": [1]}, "pool_seqs of a step must be 0 to 1, not 2"),
        ({"pool_seqs": [0], "pool_lens": [0]}, "pool_lens of a step must be 1 to 16, not 0"),
        ({"pool_seqs": [0], "pool_lens": [3]}, "a step pools more tokens of a sequence than it computes"),
        ({"pool_seqs": [0, 0], "pool_lens": [1, 1]}, "a step pools a sequence twice, or one that it samples"),
        ({"pool_seqs": [1], "pool_lens": [1]}, "a step pools a sequence twice, or one that it samples"),
        (
            {"pool_seqs": [0], "pool_lens": [2], "score_rows": [0], "score_ids": [1], "score_tops": [0]},
            "a step samples, scores and pools more positions than it holds",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused(given: dict[str, Any], sentence: str) -> None:
    buffers = StepBuffers(
        max_num_seqs=6, max_num_batched_tokens=16, max_model_len=40, block_size=4, vocab_size=100, device=CPU
    )
    buffers.begin(1)
    plan = StepPlan([0, 1], [2, 1], [9, 20], [1, 2, 3], sample_seqs=[1], **given)
    with pytest.raises(ValueError, match=sentence):
        buffers.fill(plan)
