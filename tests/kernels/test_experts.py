"""Mixtures of experts: in every mode, beside any other rows, and described by configs that do not fit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FEW_EXPERTS, Shape, greedy, load_transformers, save_checkpoint
from driver import BACKENDS, CPU, Driver, make_runner
from safetensors.torch import load_file, save_file

from novainfer.fsm.messages.mode import FAST, INT8, PLAIN, Mode
from novainfer.fsm.messages.step import NO_TOKEN
from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.registry import read_config
from novainfer.kernels.ops.linear import TorchLinear
from novainfer.kernels.ops.precision import precision_of
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights import loader
from novainfer.kernels.weights.header import check_weights

NATIVE = any(kernel.name == "native" for kernel in build_registry(CPU).implementations("linear"))
needs_native = pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
POISON = 77  # a token whose embedding is NaN
PROMPT = [(7 * i + 3) % 70 for i in range(37)]
SHARED = Shape(
    "shared",
    4,
    2,
    16,
    64,
    160,
    tied=False,
    num_layers=3,
    family="Qwen2Moe",
    others=(*FEW_EXPERTS, ("mlp_only_layers", [0])),
)


def shape(**others: Any) -> Shape:
    others = dict(FEW_EXPERTS) | others
    return Shape("routed", 4, 2, 16, 64, 160, tied=False, family="Qwen3Moe", others=tuple(others.items()))


@pytest.fixture(scope="module", params=[SHARED, shape(norm_topk_prob=True)], ids=lambda shape: shape.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param.name), torch.bfloat16)
    weights = load_file(found / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, found / "model.safetensors", {"format": "pt"})
    return found


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Those of a prefill and some greedy steps: [num_tokens, vocab_size]."""
    sampler = runner._sampler
    driver = Driver(runner, capture=True)
    driver.generate([driver.add(0, PROMPT)], 4)
    runner._sampler = sampler
    return torch.stack(driver.capturing.logits)


@pytest.mark.parametrize(
    "others",
    [
        {"num_experts": 1, "num_experts_per_tok": 1},
        {"num_experts": 5, "num_experts_per_tok": 5},
        {"num_experts": 40, "num_experts_per_tok": 1, "norm_topk_prob": True},  # most are given no row
        {"decoder_sparse_step": 2, "moe_intermediate_size": 7},
        {"mlp_only_layers": [0, 1]},
    ],
    ids=str,
)
def test_any_number_of_experts_gives_the_tokens_of_transformers(others: dict[str, Any], tmp_path: Path) -> None:
    folder = save_checkpoint(shape(**others), tmp_path)
    expected, _ = greedy(load_transformers(folder, torch.float32), PROMPT, 6)
    for backend in BACKENDS:
        driver = Driver(make_runner(folder, backend))
        assert driver.generate([driver.add(0, PROMPT)], 6) == [expected], backend


@needs_native
def test_every_mode_computes_and_the_way_back_gives_the_same_bits(folder: Path) -> None:
    runner = make_runner(folder, "native")
    found: dict[Mode, torch.Tensor] = {}
    full_bytes = runner.weight_bytes
    router = runner._decoder.layers[-1].router
    runner.switch(Mode(FAST, INT8))
    assert runner._decoder.layers[-1].router is router  # it is none of what is replaced
    for kernels, precision in ((FAST, "checkpoint"), (FAST, INT8), (PLAIN, INT8), (PLAIN, "checkpoint")) * 2:
        mode = Mode(kernels, precision)
        runner.switch(mode)
        layer = runner._decoder.layers[-1]
        assert layer.router is not None
        assert layer.experts_down is not None
        assert layer.router.precision == "checkpoint"  # a rounded router chooses others
        assert {expert.precision for expert in layer.experts_down} == {precision}
        assert (type(layer.router) is TorchLinear) == (kernels == PLAIN)
        logits = logits_of(runner)
        assert torch.equal(logits, found.setdefault(mode, logits))
        assert (runner.weight_bytes < 0.8 * full_bytes) == (precision == INT8)
    best, lean = found[Mode()], found[Mode(FAST, INT8)]
    assert not torch.equal(best, lean)
    assert (best - lean).abs().max() < 0.15 * best.abs().max()


@pytest.mark.parametrize("backend", ["torch", *(["native"] if NATIVE else [])])
def test_rounded_while_loading_it_is_what_a_switch_gives(backend: str, folder: Path) -> None:
    switched = make_runner(folder, backend)
    switched.switch(Mode(switched.mode.kernels, INT8))
    runner = make_runner(folder, backend, quantization="int8")
    assert runner.weight_bytes == switched.weight_bytes
    assert torch.equal(logits_of(runner), logits_of(switched))


@needs_native
def test_a_switch_that_ended_half_way_leaves_experts_of_two_kinds_that_compute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folder, "native")
    before = logits_of(runner)
    layer = runner._decoder.layers[-1]
    kernel = build_registry(CPU).implementations("linear", INT8)[0]
    assert layer.experts_down is not None
    old = layer.experts_down[3]
    layer.experts_down[3] = kernel.pack(old.rows(torch.arange(old.out_features)), None)
    cache = runner._decoder.attention
    assert cache is not None
    runner._modes.attach(cache)
    assert type(runner._decoder.compute).__name__ == "OpByOpForward"
    assert (logits_of(runner) - before).abs().max() < 0.1 * before.abs().max()


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_row_has_the_same_bits_beside_any_others(quantization: str, folder: Path) -> None:
    """Others that go to its experts, and that are more than a tile, or end an expert's rows elsewhere."""
    runner = make_runner(folder, "native", quantization=quantization, num_blocks=160)
    draw = random.Random(0)
    alone = Driver(runner, capture=True)
    first = alone.add(0, PROMPT)
    for _ in range(3):
        alone.step(first)
    for others in (1, 3, 5):
        driver = Driver(runner, capture=True)
        sequence = driver.add(0, PROMPT)
        beside = [
            driver.add(1 + i, [draw.randrange(70) for _ in range(draw.randint(1, 40))]) for i in range(others)
        ]  # fmt: skip
        for step in range(3):
            driver.step(*beside[: others - 1], sequence, *beside[others - 1 :])
            got = driver.capturing.logits[others * (step + 1) + step - 1]
            assert torch.equal(got, alone.capturing.logits[step])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_nan_takes_no_other_along(backend: str, folder: Path) -> None:
    runner = make_runner(folder, backend)
    healthy = Driver(runner)
    expected = healthy.generate([healthy.add(0, PROMPT)], 3)[0]
    driver = Driver(runner)
    poisoned, well = driver.add(1, [9] * 17 + [POISON] + [9] * 12), driver.add(0, PROMPT)
    assert driver.step((poisoned, 9), well) == expected[:1]
    assert driver.step(poisoned, well) == [NO_TOKEN, expected[1]]
    assert driver.generate([well], 1)[0] == expected[2:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_that_all_share_does_not_vanish_where_its_share_is_no_number(backend: str, tmp_path: Path) -> None:
    found = save_checkpoint(SHARED, tmp_path)
    weights = load_file(found / "model.safetensors")
    weights["model.layers.1.mlp.shared_expert_gate.weight"][0, 3] = float("nan")
    save_file(weights, found / "model.safetensors", {"format": "pt"})
    driver = Driver(make_runner(found, backend))
    assert driver.step(driver.add(0, PROMPT)) == [NO_TOKEN]


@needs_native
def test_drafts_change_nothing_but_the_number_of_steps(folder: Path) -> None:
    runner = make_runner(folder, "native")
    alone = Driver(runner)
    expected = alone.generate([alone.add(0, PROMPT)], 6)[0]
    driver = Driver(runner)
    sequence = driver.add(0, PROMPT)
    driver.step(sequence)
    wrong = (expected[3] + 1) % 70
    assert driver.verify([sequence], [[expected[1], expected[2], wrong]]) == [3]
    driver.step(sequence)
    assert sequence.tokens[len(PROMPT) :][:5] == expected[:5]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_experts_per_tok": 8}, "num_experts_per_tok (8) must be at most num_experts (7)"),
        ({"num_experts": 5}, "num_experts is 5, but the weights have 7 experts"),
        ({"num_experts": 9}, "num_experts is 9, but the weights have 7 experts"),
        ({"num_experts": 10**6}, "num_experts must be at most 4096, not 1000000"),
        ({"num_experts": 0}, "num_experts must be a whole number of at least 1, not 0"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers must list layers from 0 to 2, not [3]"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must list layers from 0 to 2, not 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number of at least 1, not 0"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, not 'yes'"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported with Qwen2MoeForCausalLM"),
        (
            {"moe_intermediate_size": 25},
            "mis-shaped (model.layers.1.mlp.experts.0.gate_proj.weight [24, 64] instead of",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported, only"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_named(values: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = save_checkpoint(SHARED, tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(LoadError) as caught:
        check_weights(folder)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [SHARED, shape(norm_topk_prob=True)], ids=lambda shape: shape.name)
def test_weights_of_experts_stay_as_they_are_unless_the_config_says_that_they_sum_to_1(
    shape: Shape, tmp_path: Path
) -> None:
    folder = save_checkpoint(shape, tmp_path)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    given = values.pop("norm_topk_prob")
    path.write_text(json.dumps(values))
    assert not read_config(folder).norm_topk_prob
    path.write_text(json.dumps(values | {"norm_topk_prob": given}))
    assert read_config(folder).norm_topk_prob == given


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = save_checkpoint(SHARED, tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"1 missing \(model.layers.2.mlp.experts.3.up_proj.weight\)"):
        check_weights(folder)


def test_experts_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(SHARED, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    weights["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(7, 48, 64)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"layers.1.mlp.experts.gate_up_proj holds all experts in one tensor, which is"):
        check_weights(folder)


def test_the_memory_that_is_needed_counts_every_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint(SHARED, tmp_path)
    monkeypatch.setattr(loader, "free_bytes", lambda device: 1000)
    angles = 3 * 4 * 256 * SHARED.head_dim
    sizes = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()}
    for quantization in (None, "int8"):
        with pytest.raises(LoadError) as caught:
            ModelRunner.load(
                folder, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=None, quantization=quantization
            )
        if quantization is None:
            assert f"({4 * sum(sizes.values()) + angles} and 1000 bytes)" in str(caught.value)
        else:
            int8 = precision_of("int8")
            of_expert = 7 * (2 * int8.weight_bytes(24, 64, torch.float32) + int8.weight_bytes(64, 24, torch.float32))
            exact = 4 * sum(
                size for name, size in sizes.items() if name.endswith(("mlp.gate.weight", "expert_gate.weight"))
            )
            assert 2 * of_expert + exact < int(str(caught.value).split("(")[1].split()[0]) < 4 * sum(sizes.values())
