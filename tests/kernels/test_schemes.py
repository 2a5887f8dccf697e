"""Checkpoints that were quantised by others are loaded as they are: each computes what its codes stand for."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import CPU, Driver, backend_registry, make_runner
from quantised_checkpoints import (
    awq_reference,
    compressed_reference,
    edit,
    gptq_reference,
    plain_copy,
    save_awq,
    save_compressed,
    save_gptq,
)
from safetensors.torch import load_file

from novainfer.fsm.messages.mode import CHECKPOINT
from novainfer.kernels.errors import LoadError
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights import loader
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.header import check_weights

SHAPE = Shape("source", 4, 2, 16, 64, 160, intermediate_size=96, tied=False)
PROMPT = [(7 * i + 3) % 127 for i in range(37)]
NATIVE = any(kernel.name == "native" for kernel in build_registry(CPU).implementations("linear"))

# name: writer, its options, the format's own dequantisation, what the model says of itself
FORMATS: dict[str, tuple[Callable[..., Path], dict[str, Any], Callable[..., Any], str]] = {
    "gptq": (save_gptq, {}, gptq_reference, "int4 (gptq)"),
    "gptq-asymmetric": (save_gptq, {"sym": False}, gptq_reference, "int4 (gptq)"),
    "gptq-v2": (save_gptq, {"sym": False, "checkpoint_format": "gptq_v2"}, gptq_reference, "int4 (gptq)"),
    "gptq-int8": (save_gptq, {"bits": 8, "zero_biases": True}, gptq_reference, "int8 (gptq)"),
    "gptq-int8-asymmetric": (save_gptq, {"bits": 8, "sym": False}, gptq_reference, "int8 (gptq)"),
    "gptq-by-row": (save_gptq, {"group_size": -1}, gptq_reference, "int4 (gptq)"),
    "awq": (save_awq, {}, awq_reference, "int4 (awq)"),
    "awq-symmetric": (save_awq, {"zero_point": False}, awq_reference, "int4 (awq)"),
    "w8a8": (save_compressed, {}, compressed_reference, "int8 (compressed-tensors)"),
    "w8a8-asymmetric": (save_compressed, {"symmetric": False}, compressed_reference, "int8 (compressed-tensors)"),
    "w4a16": (
        save_compressed,
        {"num_bits": 4, "strategy": "group", "group_size": 32, "layout": "pack-quantized", "activations": False},
        compressed_reference,
        "int4 (compressed-tensors)",
    ),
    "w4a16-asymmetric": (
        save_compressed,
        {
            "num_bits": 4,
            "strategy": "group",
            "group_size": 16,
            "layout": "pack-quantized",
            "activations": False,
            "symmetric": False,
        },
        compressed_reference,
        "int4 (compressed-tensors)",
    ),
    "w8a16": (
        save_compressed,
        {"layout": "pack-quantized", "activations": False, "symmetric": False},
        compressed_reference,
        "int8 (compressed-tensors)",
    ),
}


PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("source") / "model", torch.float16)


def written(name: str, source: Path, folder: Path) -> Path:
    write, options, *_ = FORMATS[name]
    return write(source, folder / name, **options)


def make_quantised(folder: Path, **options: Any) -> ModelRunner:
    """A runner on torch's kernels, in fp32."""
    defaults: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 256}
    defaults |= {"max_model_len": None, "registry": backend_registry("torch")}
    runner = ModelRunner.load(folder, **(defaults | options))
    runner.fit(mode="fixed", num_blocks=64)
    return runner


def logits_of(runner: ModelRunner) -> tuple[list[int], torch.Tensor]:
    """Of a prefill and some greedy steps: the tokens, and logits [num_tokens, vocab_size]."""
    driver = Driver(runner, capture=True)
    (tokens,) = driver.generate([driver.add(0, PROMPT)], 8)
    return tokens, torch.stack(driver.capturing.logits)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_what_the_formats_own_dequantisation_gives(name: str, source: Path, tmp_path: Path) -> None:
    check_weights_are_exact(written(name, source, tmp_path), FORMATS[name][2], source, tmp_path)


def test_zero_points_of_0_are_what_gptq_stores_as_the_largest_code(source: Path, tmp_path: Path) -> None:
    folder = written("gptq-asymmetric", source, tmp_path)
    edit(folder, tensor_with("q_proj.qzeros", lambda zeros: torch.full_like(zeros, -1)))
    check_weights_are_exact(folder, gptq_reference, source, tmp_path)


@pytest.mark.parametrize(("name", "field"), [("gptq-asymmetric", "sym"), ("w8a8", "symmetric"), ("w4a16", "symmetric")])
def test_a_setting_that_is_left_out_means_what_its_format_says(
    name: str, field: str, source: Path, tmp_path: Path
) -> None:
    """GPTQ: shifts for each group, whatever they are. compressed-tensors: symmetric, without zero points."""
    folder = written(name, source, tmp_path)

    def without(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        group = settings.get("config_groups", {}).get("group_0", {})
        del (settings if field in settings else group["weights"])[field]

    edit(folder, without)
    check_weights_are_exact(folder, FORMATS[name][2], source, tmp_path)


def check_weights_are_exact(folder: Path, reference: Callable[..., Any], source: Path, tmp_path: Path) -> None:
    plain = load_file(plain_copy(folder, tmp_path / "plain", reference, source) / "model.safetensors")
    checkpoint = Checkpoint(folder)
    for weight, expected in plain.items():
        found = torch.empty(expected.shape)
        checkpoint.read_into(weight, found)
        # Whole numbers of 9 bits times scales of 11: fp32 rounds neither the product nor the two that are added.
        assert torch.equal(found, expected), weight
    checkpoint.close()


@pytest.mark.parametrize("name", FORMATS)
def test_it_computes_what_an_unquantised_model_of_the_same_weights_does(
    name: str, source: Path, tmp_path: Path
) -> None:
    folder, (_, _, reference, precision) = written(name, source, tmp_path), FORMATS[name]
    expected = logits_of(make_runner(plain_copy(folder, tmp_path / "plain", reference, source), dtype="float32"))
    runner = make_quantised(folder)
    assert runner.info.precision == precision
    assert {mode.precision for mode in runner.info.modes} == {CHECKPOINT}
    found = logits_of(runner)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
@pytest.mark.parametrize("name", FORMATS)
def test_native_kernels_hold_the_same_weights(name: str, source: Path, tmp_path: Path) -> None:
    folder, reference = written(name, source, tmp_path), FORMATS[name][2]
    plain = plain_copy(folder, tmp_path / "plain", reference, source)
    runner = make_quantised(folder, registry=build_registry(CPU))
    assert runner.info.kernels["linear"] == "native+native-grouped"
    assert runner.info.kernels["forward"] == "native"
    tensors = load_file(plain / "model.safetensors")
    for index, layer in enumerate(runner._decoder.layers):
        for product, stems in PRODUCTS.items():
            expected = torch.cat([tensors[f"model.layers.{index}.{stem}.weight"] for stem in stems])
            found = getattr(layer, product).rows(torch.arange(len(expected)))
            # code * scale + shift may be rounded once or twice
            torch.testing.assert_close(found, expected, rtol=2**-22, atol=2**-20 * float(expected.abs().max()))
    # Activations are rounded to INT8: the logits are near, and no more can be asked of them.
    found, expected = logits_of(runner)[1][0], logits_of(make_runner(plain, dtype="float32"))[1][0]
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.999


@pytest.mark.parametrize("name", ["gptq", "awq", "w8a8", "w4a16-asymmetric"])
def test_products_are_packed_some_rows_at_a_time(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(name, source, tmp_path)
    whole = logits_of(make_quantised(folder))
    monkeypatch.setattr(loader, "part_rows", lambda in_features: 64)  # q, k and v are of 64, 32 and 32 rows
    assert torch.equal(logits_of(make_quantised(folder))[1], whole[1])


@pytest.mark.parametrize("left", ["v_proj", "self_attn"])
def test_what_a_checkpoint_leaves_unquantised_stays_as_it_is(left: str, source: Path, tmp_path: Path) -> None:
    folder = save_gptq(source, tmp_path / "part", skip=lambda stem: left in stem)
    plain = plain_copy(folder, tmp_path / "plain", gptq_reference, source)
    found, expected = logits_of(make_quantised(folder)), logits_of(make_runner(plain, dtype="float32"))
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def test_weights_of_a_tied_head_stay_too_and_only_codes_are_counted(source: Path, tmp_path: Path) -> None:
    tied = save_checkpoint(Shape("tied", 4, 2, 16, 64, 160, intermediate_size=96), tmp_path / "tied", torch.float16)
    runner = make_quantised(save_gptq(tied, tmp_path / "gptq"))
    assert runner.info.kernels["linear"] == "torch+torch-grouped"
    products = 2 * (64 * 128 + 64 * 64 + 64 * 192 + 96 * 64)
    biases, norms, head = 2 * 128, 5 * 64, 160 * 64
    # Half a byte for a code; a scale and a zero point, as a shift, for each 32 of them.
    assert runner.info.weight_bytes == products // 2 + products // 32 * 8 + 4 * (biases + norms + head)


def test_processes_share_what_one_has_packed(source: Path, tmp_path: Path) -> None:
    folder = written("gptq-asymmetric", source, tmp_path)
    fd = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
    try:
        first, second = (make_quantised(folder, weights_fd=fd) for _ in range(2))
        assert (first.info.weights, second.info.weights) == ("packed", "mapped")
        own = logits_of(make_quantised(folder))[1]
        for runner in (first, second):
            assert torch.equal(logits_of(runner)[1], own)
        # The same files read by another rule are other weights.
        config = folder / "config.json"
        config.write_text(config.read_text().replace("gptq", "gptq_v2").replace('"gptq_v2", "bits"', '"gptq", "bits"'))
        assert make_quantised(folder, weights_fd=fd).info.weights == "own"
    finally:
        os.close(fd)


@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
def test_it_goes_to_plainer_kernels_and_comes_back(source: Path, tmp_path: Path) -> None:
    runner = make_quantised(written("gptq", source, tmp_path), registry=build_registry(CPU))
    first = logits_of(runner)
    best, *others = runner.info.modes
    for mode in (*others, best):
        runner.switch(mode)
        assert logits_of(runner)[0] == first[0]


def test_a_model_too_big_for_the_memory_counts_its_codes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written("gptq", source, tmp_path)
    needed = make_quantised(folder).info.weight_bytes
    monkeypatch.setattr(loader, "free_bytes", lambda device: needed + 4 * 3 * 256 * 16 - 1)
    with pytest.raises(LoadError, match=r"GiB for its weights in int4 \(gptq\) and its positions"):
        make_quantised(folder)
    monkeypatch.setattr(loader, "free_bytes", lambda device: needed + 4 * 3 * 256 * 16 + 4096)
    make_quantised(folder)


def settings_with(**values: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, settings: settings.update(values)


def group_with(part: str, **values: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        group = settings["config_groups"]["group_0"]
        group[part] = (group[part] or {}) | values

    return change


def tensor_with(name: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., None]:
    def change(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        name_of = next(found for found in tensors if found.endswith(name))
        made = make(tensors.pop(name_of))
        if made is not None:
            tensors[name_of] = made

    return change


def with_another_last(zeros: torch.Tensor) -> torch.Tensor:
    """Only the zero point of the last group of the last row is another one."""
    zeros = zeros.clone()
    zeros[-1, -1] ^= 1 << 28
    return zeros


def with_last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The last number is another one."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


def unquantised_beside(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """A weight as it was, beside its codes."""
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64)


def without_order(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """Features were reordered, and no tensor says how."""
    settings["desc_act"] = True
    for name in [name for name in tensors if name.endswith("g_idx")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("gptq", settings_with(quant_method="fp8"), "quant_method 'fp8' is not supported, only 'gptq', 'awq', 'comp"),
        ("gptq", settings_with(bits=3), "quantization_config.bits 3 is not supported, only 4 and 8"),
        ("gptq", settings_with(bits="4"), "quantization_config.bits must be a whole number"),
        ("gptq", settings_with(group_size=40), "groups of 40 features do not divide the "),
        ("gptq", settings_with(group_size=0), "group_size must be a whole number of at least 1, not 0"),
        ("gptq", settings_with(group_size=16), ".scales has shape [3, 64], not [6, 64]"),
        ("gptq", settings_with(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not supported, only 'gptq'"),
        ("gptq", settings_with(checkpoint_format="gptq_v2"), "qzeros are not all 8, though quantization_config.sym"),
        ("gptq", tensor_with("q_proj.qzeros", with_another_last), "q_proj.qzeros are not all 8, though quantization_"),
        ("gptq", settings_with(dynamic={"-:.*": {}}), "quantization_config.dynamic {'-:.*': {}} is not supported"),
        ("gptq", tensor_with("q_proj.scales", lambda scales: None), "hold no model.layers.0.self_attn.q_proj.scales"),
        ("gptq", tensor_with("q_proj.qzeros", lambda zeros: zeros[:1]), "qzeros has shape [1, 8], not [2, 8]"),
        ("gptq", tensor_with("o_proj.qweight", lambda codes: codes.float()), "qweight has dtype float32, not int32"),
        (
            "gptq",
            tensor_with("g_idx", lambda order: order.flip(0)),
            "not in the order of their groups (g_idx, desc_act)",
        ),
        ("gptq", without_order, "hold no model.layers.0.mlp.down_proj.g_idx, but qweight, scales, qzeros of it"),
        ("gptq", tensor_with("down_proj.qweight", lambda codes: codes[:8]), "down_proj.scales has shape [3, 64], not"),
        ("gptq", tensor_with("norm.weight", lambda weight: weight.int()), "has dtype I32, but only F32, BF16, F16 are"),
        ("gptq-int8", tensor_with("o_proj.bias", lambda bias: bias + 1), "o_proj.bias is not 0, and Qwen2ForCausalLM"),
        ("awq", settings_with(bits=8), "quantization_config.bits 8 is not supported, only 4"),
        ("awq", settings_with(version="gemv"), "quantization_config.version 'gemv' is not supported, only 'gemm'"),
        ("awq", settings_with(group_size=40), "groups of 40 features do not divide"),
        ("w8a8", settings_with(format="float-quantized"), "format 'float-quantized' is not supported, only 'int-q"),
        ("w8a8", settings_with(config_groups={}), "config_groups must be one group for all products, not {}"),
        ("w8a8", settings_with(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme {'num_bits': 8} is not supported"),
        ("w8a8", settings_with(transform_config={"R1": {}}), "transform_config {'R1': {}} is not supported, only none"),
        ("w8a8", group_with("weights", type="float"), "group_0.weights.type 'float' is not supported, only 'int'"),
        ("w8a8", group_with("weights", strategy="block"), "weights.strategy 'block' is not supported, only 'channel'"),
        ("w8a8", group_with("weights", actorder="group"), "weights.actorder 'group' is not supported, only null, "),
        ("w8a8", group_with("weights", actorder=True), "weights.actorder True is not supported, only null, "),
        ("w4a16", group_with("weights", actorder="dynamic"), "weights.actorder 'dynamic' is not supported, only null"),
        ("w4a16", group_with("weights", actorder="wieght"), "weights.actorder 'wieght' is not supported, only null, "),
        ("w4a16", group_with("weights", actorder=0), "weights.actorder 0 is not supported, only null, false"),
        ("w4a16", group_with("weights", actorder=["weight"]), "weights.actorder ['weight'] is not supported, only"),
        ("w8a8", group_with("output_activations", num_bits=8), "output_activations.num_bits 8 is not supported, only"),
        ("w8a8", group_with("input_activations", dynamic=False), "input_activations.dynamic False is not supported"),
        ("w8a8", group_with("input_activations", num_bits=4), "input_activations.num_bits 4 is not supported"),
        ("w8a8", tensor_with("weight_scale", lambda scale: scale[:3]), ".weight_scale has shape [3, 1], not ["),
        ("w4a16", tensor_with("weight_shape", lambda shape: shape + 1), ".weight_shape says ["),
        ("w4a16", group_with("weights", num_bits=8), "groups of 32 features do not divide the 48 of model.layers.0"),
        ("gptq-int8", tensor_with("k_proj.qweight", lambda codes: codes[:0]), "k_proj are of no features at all"),
        ("w8a8", tensor_with("q_proj.weight", lambda codes: codes[:, :0]), "q_proj are of no features at all"),
        ("gptq", unquantised_beside, "model.layers.0.mlp.up_proj.weight is there a second time, in codes (qweight)"),
        ("awq", unquantised_beside, "model.layers.0.mlp.up_proj.weight is there a second time, in codes (qweight)"),
        ("w4a16", unquantised_beside, "mlp.up_proj.weight is there a second time, in codes (weight_packed)"),
        ("gptq", tensor_with("up_proj.scales", with_last(math.nan)), "up_proj is damaged: a scale of its codes is not"),
        ("awq", tensor_with("o_proj.scales", with_last(math.inf)), "o_proj is damaged: a scale of its codes is not"),
        ("w8a8", tensor_with("weight_scale", with_last(-math.inf)), "_proj is damaged: a scale of its codes is not"),
        ("w4a16", tensor_with("weight_scale", with_last(math.nan)), "_proj is damaged: a scale of its codes is not"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(
    name: str, change: Callable[..., None], expected: str, source: Path, tmp_path: Path
) -> None:
    folder = written(name, source, tmp_path)
    edit(folder, change)
    with pytest.raises(LoadError) as caught:
        make_quantised(folder)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "the weights hold no" in str(caught.value)


@pytest.mark.parametrize("order", [None, False, "weight", "static", "Static"])
def test_features_that_stay_in_their_order_are_read_however_they_were_quantised(
    order: str | bool | None, source: Path, tmp_path: Path
) -> None:
    folder = written("w4a16", source, tmp_path)
    edit(folder, group_with("weights", actorder=order))
    check_weights(folder)


def test_nothing_is_quantised_twice(source: Path, tmp_path: Path) -> None:
    folder = written("w8a8", source, tmp_path)
    with pytest.raises(LoadError, match=r"are already: int8 \(compressed-tensors\); leave the setting out"):
        make_quantised(folder, quantization="int4")
    make_quantised(folder, quantization="none")


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16-asymmetric"])
def test_any_damage_to_the_settings_gives_one_sentence_or_changes_nothing(
    name: str, source: Path, tmp_path: Path
) -> None:
    folder = written(name, source, tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    draw = random.Random(0)
    values = [None, 0, 1, 3, 8, -1, 10**30, 1e30, True, False, "x", "channel", [], [1], {}, {"a": []}]
    refused = accepted = 0
    for _ in range(150):
        settings = json.loads(json.dumps(config["quantization_config"]))
        at = settings
        while (key := draw.choice(list(at))) in ("config_groups", "group_0", "weights") and draw.random() < 0.8:
            at = at[key]
        at[key] = draw.choice(values)
        path.write_text(json.dumps(config | {"quantization_config": settings}))
        try:
            check_weights(folder)
        except LoadError as error:
            refused += "\n" not in str(error) and str(folder) in str(error)
        else:
            accepted += 1
    assert refused + accepted == 150
    assert refused > 60
