"""GGUF files are loaded as they are: what each block stands for is what the gguf package makes of it."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import CPU, Driver, backend_registry, make_runner
from gguf_checkpoints import Type, blocks, save_gguf
from safetensors.torch import save_file

from novainfer.fsm.messages.mode import CHECKPOINT
from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.gguf import read_gguf
from novainfer.kernels.models.registry import read_config
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights import loader
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.entries import TensorEntry
from novainfer.kernels.weights.header import check_weights
from novainfer.kernels.weights.unpack import rows_of

QWEN2 = Shape("qwen2", 8, 2, 32, 256, 160, intermediate_size=512, rope_theta=1e6)
QWEN3 = replace(QWEN2, name="qwen3", family="Qwen3", tied=False)
LLAMA = replace(QWEN2, name="llama", family="Llama", tied=False)
EXPERTS = (
    ("num_experts", 5),
    ("num_experts_per_tok", 2),
    ("moe_intermediate_size", 256),
    ("shared_expert_intermediate_size", 768),
)
BIASED = (("attention_bias", True), ("mlp_bias", True), ("rms_norm_eps", 1e-5))
QWEN2_MOE = replace(QWEN2, name="qwen2-moe", family="Qwen2Moe", tied=False, others=EXPERTS)
QWEN3_MOE = replace(
    QWEN2, name="qwen3-moe", family="Qwen3Moe", tied=False, others=(*EXPERTS[:3], ("norm_topk_prob", True))
)
NATIVE = any(kernel.name == "native" for kernel in build_registry(CPU).implementations("linear"))
PROMPT = [(7 * i + 3) % 127 for i in range(37)]


def mixed(name: str) -> Type:
    """As llama-quantize makes Q4_K_M: v and some of down, and the head or the embeddings that are it, in Q6_K."""
    if "v_proj" in name or ("down_proj" in name and "layers.0." in name) or "embed" in name or "lm_head" in name:
        return Type.Q6_K
    return Type.Q4_K


def fallback(name: str) -> Type:
    """As it makes Q4_K_M of rows that 256 does not divide: Qwen2.5-0.5B's are of 896."""
    return {Type.Q6_K: Type.Q8_0, Type.Q4_K: Type.Q5_0}[mixed(name)]


def only(kind: Type) -> Callable[[str], Type]:
    return lambda name: kind


MIXTURES: dict[str, tuple[Shape, Callable[[str], Type], str]] = {
    "Q4_K_M": (QWEN2, mixed, "Q4_K+Q6_K (gguf)"),
    "Q4_K_M of qwen3": (QWEN3, mixed, "Q4_K+Q6_K (gguf)"),
    "Q4_K_M of llama": (LLAMA, mixed, "Q4_K+Q6_K (gguf)"),
    "Q4_K_M of odd rows": (replace(QWEN2, hidden_size=224), fallback, "Q5_0+Q8_0 (gguf)"),
    "Q4_K_M of qwen2moe": (QWEN2_MOE, mixed, "Q4_K+Q6_K (gguf)"),
    "Q4_K_M of qwen3moe": (QWEN3_MOE, mixed, "Q4_K+Q6_K (gguf)"),
    "Q8_0 of qwen3moe": (QWEN3_MOE, only(Type.Q8_0), "Q8_0 (gguf)"),
    "BF16 of qwen2moe": (QWEN2_MOE, only(Type.BF16), "float32"),
    "Q5_K": (QWEN2, only(Type.Q5_K), "Q5_K (gguf)"),
    "Q8_0": (QWEN2, only(Type.Q8_0), "Q8_0 (gguf)"),
    "Q8_0 of llama": (LLAMA, only(Type.Q8_0), "Q8_0 (gguf)"),
    "Q4_0": (QWEN2, only(Type.Q4_0), "Q4_0 (gguf)"),
    "Q4_0 and Q4_1": (QWEN2, lambda name: Type.Q4_1 if "v_proj" in name else Type.Q4_0, "Q4_0+Q4_1 (gguf)"),
    "Q4_0 and Q6_K": (QWEN2, lambda name: Type.Q6_K if "v_proj" in name else Type.Q4_0, "Q4_0+Q6_K (gguf)"),
    "Q5_1": (QWEN2, only(Type.Q5_1), "Q5_1 (gguf)"),
    "F16": (QWEN2, only(Type.F16), "float32"),
    "BF16 of llama": (LLAMA, only(Type.BF16), "float32"),
    "F32 of llama with biases": (replace(LLAMA, others=BIASED), only(Type.F32), "float32"),
    "F32": (QWEN3, only(Type.F32), "float32"),
    "Q8_0 and F16": (QWEN2, lambda name: Type.F16 if "v_proj" in name else Type.Q8_0, "Q8_0 (gguf)"),
}


def load(path: Path, **options: Any) -> ModelRunner:
    defaults: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 256}
    defaults |= {"max_model_len": None, "registry": backend_registry("torch")}
    runner = ModelRunner.load(path, **(defaults | options))
    runner.fit(mode="fixed", num_blocks=64)
    return runner


def logits_of(runner: ModelRunner) -> tuple[list[int], torch.Tensor]:
    """Of a prefill and some greedy steps: the tokens, and logits [num_tokens, vocab_size]."""
    driver = Driver(runner, capture=True)
    (tokens,) = driver.generate([driver.add(0, PROMPT)], 8)
    return tokens, torch.stack(driver.capturing.logits)


@pytest.mark.parametrize(
    "kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K]
)
def test_blocks_of_any_bits_are_what_the_gguf_package_makes_of_them(kind: Type, tmp_path: Path) -> None:
    data = blocks((48, 512), kind, seed=1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint, found = Checkpoint(tmp_path / "m.gguf"), torch.empty(48, 512)
    checkpoint.read_into("model.layers.0.mlp.up_proj.weight", found)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    # Scales of several factors are multiplied in another order there: the last bit may differ, and no more.
    torch.testing.assert_close(found, expected, rtol=2**-22, atol=2**-24 * float(expected.abs().max()))
    checkpoint.close()


@pytest.mark.parametrize("name", MIXTURES)
def test_it_computes_what_an_unquantised_model_of_the_same_weights_does(name: str, tmp_path: Path) -> None:
    shape, type_of, precision = MIXTURES[name]
    source = save_checkpoint(shape, tmp_path / "source")
    tensors = save_gguf(source, tmp_path / "model.gguf", type_of)
    save_file(tensors, source / "model.safetensors")
    expected = logits_of(make_runner(source, dtype="float32"))
    runner = load(tmp_path / "model.gguf")
    assert runner.info.precision == precision
    if "gguf" in precision:
        assert {mode.precision for mode in runner.info.modes} == {CHECKPOINT}
    found = logits_of(runner)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=2e-4)
    given, read = read_config(source), read_config(tmp_path / "model.gguf")
    assert read == replace(
        given, dtype=None, tensors=read.tensors, rms_norm_eps=read.rms_norm_eps, eos_token_ids=read.eos_token_ids
    )
    assert {tensor.name for tensor in read.tensors} == {tensor.name for tensor in given.tensors}
    assert read.rms_norm_eps == pytest.approx(given.rms_norm_eps, rel=1e-6)  # fp32 in the file


@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
@pytest.mark.parametrize(
    "name", ["Q4_K_M", "Q4_K_M of odd rows", "Q8_0 of llama", "Q4_0 and Q4_1", "Q4_K_M of qwen2moe"]
)
def test_native_kernels_hold_the_same_weights(name: str, tmp_path: Path) -> None:
    shape, type_of, _ = MIXTURES[name]
    tensors = save_gguf(save_checkpoint(shape, tmp_path / "source"), tmp_path / "model.gguf", type_of)
    runner = load(tmp_path / "model.gguf", registry=build_registry(CPU))
    assert runner.info.kernels["linear"] == ("native-grouped+native" if shape.others else "native-grouped")
    decoder = runner._decoder
    products = [(decoder.head, ["model.embed_tokens" if shape.tied else "lm_head"])]
    for index, layer in enumerate(decoder.layers):
        stem = f"model.layers.{index}."
        products.append((layer.qkv, [f"{stem}self_attn.{part}_proj" for part in "qkv"]))
        if layer.down is not None:
            products.append((layer.down, [f"{stem}mlp.down_proj"]))
        else:
            gates = [f"{stem}mlp.shared_expert.{part}_proj" for part in ("gate", "up")]
            products.append((layer.shared_gate_up, gates))
            for expert, (both, down) in enumerate(zip(layer.experts_gate_up, layer.experts_down, strict=True)):
                products.append((both, [f"{stem}mlp.experts.{expert}.{part}_proj" for part in ("gate", "up")]))
                products.append((down, [f"{stem}mlp.experts.{expert}.down_proj"]))
    for linear, stems in products:
        expected = torch.cat([tensors[f"{stem}.weight"] for stem in stems])
        found = linear.rows(torch.arange(len(expected)))
        torch.testing.assert_close(found, expected, rtol=2**-21, atol=2**-20 * float(expected.abs().max()))


@pytest.mark.parametrize("first", [0, 40, 96])
def test_rows_of_interleaved_heads_lie_where_they_do_in_the_whole_wherever_a_part_begins(first: int) -> None:
    entry = TensorEntry(Path("m.gguf"), "Q8_0", (256, 256), 0, 0, interleaved_heads=8)
    rows = torch.arange(256).view(8, 16, 2)  # of each head: row i of half h is row 2 i + h
    assert rows_of(entry, first, 192).tolist() == rows.transpose(1, 2).flatten().tolist()[first:192]


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K])
def test_heads_that_are_interleaved_are_packed_some_rows_at_a_time(
    kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gguf(save_checkpoint(LLAMA, tmp_path / "source"), tmp_path / "m.gguf", only(kind))
    whole = logits_of(load(tmp_path / "m.gguf"))
    monkeypatch.setattr(loader, "part_rows", lambda in_features: 64)  # q, k and v are of 256, 64 and 64 rows
    assert torch.equal(logits_of(load(tmp_path / "m.gguf"))[1], whole[1])


@pytest.mark.parametrize(("shape", "kind"), [(QWEN2_MOE, Type.BF16), (QWEN3_MOE, Type.Q4_K), (QWEN3_MOE, Type.Q8_0)])
def test_gate_and_up_of_experts_in_one_tensor_are_what_they_are_apart(shape: Shape, kind: Type, tmp_path: Path) -> None:
    source = save_checkpoint(shape, tmp_path / "source")
    loaded = []
    for fuses_experts in (False, True):
        path = tmp_path / f"{fuses_experts}.gguf"
        save_gguf(source, path, only(kind), fuses_experts=fuses_experts)
        checkpoint = Checkpoint(path)
        rows = {name: torch.empty(checkpoint.entries[name].shape) for name in checkpoint.entries}
        for name, out in rows.items():
            checkpoint.read_into(name, out)
        checkpoint.close()
        loaded.append(rows)
    apart, fused = loaded
    assert set(apart) == set(fused)
    assert "blk.0.ffn_gate_up_exps.weight" in read_gguf(tmp_path / "True.gguf").tensors
    for name, expected in apart.items():
        assert torch.equal(fused[name], expected), name


@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
def test_a_router_in_codes_is_widened_as_its_product_must_round_no_activations(tmp_path: Path) -> None:
    source = save_checkpoint(QWEN3_MOE, tmp_path / "source")
    tensors = save_gguf(source, tmp_path / "m.gguf", only(Type.Q8_0), kept=())
    runner = load(tmp_path / "m.gguf", registry=build_registry(CPU))
    for index, layer in enumerate(runner._decoder.layers):
        assert layer.router.name == "native"
        expected = tensors[f"model.layers.{index}.mlp.gate.weight"]
        torch.testing.assert_close(layer.router.rows(torch.arange(5)), expected, rtol=2**-21, atol=0)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    shape = Shape("small", 4, 2, 16, 64, 96, intermediate_size=64)
    save_gguf(
        save_checkpoint(shape, folder / "source"),
        folder / "model.gguf",
        only(Type.Q8_0),
        change=lambda writer: (writer.add_token_list(["a", "b", "<|im_end|>"]), writer.add_token_types([1, 1, 3])),
    )
    return folder / "model.gguf"


def test_only_codes_are_counted_and_end_tokens_are_found(file: Path) -> None:
    runner = load(file)
    products = 2 * (64 * 128 + 64 * 64 + 64 * 128 + 64 * 64) + 96 * 64
    assert runner.info.weight_bytes == products + products // 32 * 4 + 4 * (2 * 128 + 5 * 64)
    assert runner.info.eos_token_ids == (2,)
    with pytest.raises(LoadError, match=r"are already: Q8_0 \(gguf\); leave the setting out"):
        load(file, quantization="int8")
    assert load(file, dtype="auto").info.dtype == "bfloat16"


def test_end_tokens_are_those_of_three_keys_and_of_known_names_that_are_no_text(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "<|im_end|>", "b", "<|eot_id|>", "<|im_start|>"])
        writer.add_token_types([1, 1, 1, 3, 3])  # one of the names is text here
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(0)
        writer.add_eom_token_id(96)  # the vocabulary ends before it

    source = save_checkpoint(Shape("ends", 4, 2, 16, 64, 96, intermediate_size=64), tmp_path / "source")
    save_gguf(source, tmp_path / "m.gguf", only(Type.Q8_0), change=change)
    assert read_config(tmp_path / "m.gguf").eos_token_ids == (0, 2, 3)


def test_a_file_that_does_not_count_kv_heads_has_as_many_as_heads(tmp_path: Path) -> None:
    shape = Shape("mha", 4, 4, 16, 64, 160, family="Llama")
    source = save_checkpoint(shape, tmp_path / "source")
    no_count = lambda writer: writer.kv_data[0].pop("llama.attention.head_count_kv")  # noqa: E731
    save_gguf(source, tmp_path / "m.gguf", only(Type.F32), change=no_count)
    expected, found = logits_of(make_runner(source, dtype="float32")), logits_of(load(tmp_path / "m.gguf"))
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=2e-4)


def test_embeddings_apart_from_the_head_stay_in_codes_and_modes_leave_them_alone(tmp_path: Path) -> None:
    source = save_checkpoint(Shape("untied", 4, 2, 16, 64, 96, intermediate_size=64, tied=False), tmp_path / "source")
    embedding = save_gguf(source, tmp_path / "m.gguf", mixed_eight)["model.embed_tokens.weight"]
    runner = load(tmp_path / "m.gguf")
    layers = 2 * (64 * 128 + 64 * 64 + 64 * 128 + 64 * 64)
    eights, fours = layers + 96 * 64, 96 * 64  # the embeddings in 4 bits, with a scale and a shift
    small = 4 * (2 * 128 + 5 * 64)
    assert runner.info.weight_bytes == eights + eights // 32 * 4 + fours // 2 + fours // 32 * 8 + small
    if NATIVE:
        runner = load(tmp_path / "m.gguf", registry=build_registry(CPU))
    for mode in (*runner.info.modes[1:], runner.info.modes[0]):
        runner.switch(mode)
        ids = torch.tensor([5, 0, 95, 5])
        found = runner._decoder.embedding(ids, None, runner._decoder.ops)
        torch.testing.assert_close(found, embedding[ids], rtol=2**-21, atol=1e-6)


def mixed_eight(name: str) -> Type:
    return Type.Q4_1 if "embed" in name else Type.Q8_0


def test_a_file_that_is_not_quantised_may_be(tmp_path: Path) -> None:
    save_gguf(save_checkpoint(QWEN2, tmp_path / "source"), tmp_path / "m.gguf", only(Type.F16))
    assert load(tmp_path / "m.gguf", quantization="int8").info.precision == "int8"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda w: w.add_string("general.architecture", "mamba"),
            "general.architecture 'mamba' is not supported, only",
        ),
        (
            lambda w: w.add_string("general.architecture", "qwen3_moe"),
            "general.architecture 'qwen3_moe' is not supported, only 'qwen2', 'qwen3', 'llama', 'qwen2moe', 'qwen3moe'",
        ),
        (
            lambda w: w.add_uint32("qwen2.attention.sliding_window", 8),
            "attention.sliding_window 8 is not supported, on",
        ),
        (lambda w: w.add_float32("qwen2.logit_scale", 0.5), "qwen2.logit_scale 0.5 is not supported, only 1.0"),
        (lambda w: w.add_float32("qwen2.rope.scaling.attn_factor", 2.0), "scaling.attn_factor 2.0 is not supported"),
        (lambda w: w.add_uint32("qwen2.block_count", 3), "do not fit its keys: 12 missing (model.layers.2."),
        (
            lambda w: w.add_uint32("qwen2.block_count", 0),
            "qwen2.block_count must be a whole number of at least 1, not 0",
        ),
        (lambda w: w.add_string("qwen2.embedding_length", "64"), "qwen2.embedding_length must be a whole number"),
        (lambda w: w.add_uint32("qwen2.embedding_length", 128), "mis-shaped (model.embed_tokens.weight [96, 64]"),
        (lambda w: w.add_uint32("qwen2.expert_count", 8), "expert_count 8 is not supported, only with 'qwen2moe', 'qw"),
        (
            lambda w: w.add_uint32("qwen2.rope.dimension_count", 8),
            "qwen2.rope.dimension_count must be 16 like the keys",
        ),
        (
            lambda w: w.add_string("qwen2.rope.scaling.type", "longrope"),
            "scaling.type 'longrope' is not supported, only",
        ),
        (
            lambda w: w.add_float32("qwen2.rope.freq_base", -1.0),
            "qwen2.rope.freq_base must be a number above 0, not -1.0",
        ),
        (lambda w: w.add_float32("qwen2.rope.freq_base", 0.5), "qwen2.rope.freq_base must be at least 1, not 0.5"),
        (lambda w: w.add_float32("qwen2.rope.scaling.factor", 0.5), "qwen2.rope.scaling.factor must be at least 1"),
        (
            lambda w: (
                w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
                w.add_float32("qwen2.rope.scaling.factor", 2.0),
            ),
            "rope_freqs.weight is not supported beside qwen2.rope.scaling.factor",
        ),
        (lambda w: w.add_uint16("split.count", 3), "split.no is missing"),
        (lambda w: w.add_uint32("general.alignment", 48), "general.alignment must be a power of 2"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.full(8, 3.0, np.float32)),
            "rope_freqs.weight is not supported",
        ),
        (lambda w: w.add_tensor("blk.0.extra.weight", np.zeros(8, np.float32)), "blk.0.extra.weight is not supported"),
        (lambda w: w.add_tensor("blk.0.attn_q.scale", np.zeros(8, np.float32)), "blk.0.attn_q.scale is not supported"),
        # names that this program has for others of the file
        (lambda w: w.add_tensor("model.norm.weight", np.zeros(64, np.float32)), "model.norm.weight is not supported"),
        (lambda w: w.add_tensor("0.attn_norm.weight", np.zeros(64, np.float32)), "0.attn_norm.weight is not supported"),
        (lambda w: w.add_tensor("blk.00.ffn_norm.weight", np.zeros(64, np.float32)), "blk.00.ffn_norm.weight is not"),
        (
            lambda w: w.add_tensor("x", np.zeros((1, 84), np.uint8), raw_dtype=Type.Q2_K),
            "x is of type Q2_K, which is not supported, only F32, F16, BF16, Q4_0, ",
        ),
        (lambda w: w.add_tensor("y", np.zeros((1, 4), np.int32)), "y is of type I32, which is not supported"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(
    change: Callable[..., None], expected: str, tmp_path: Path
) -> None:
    refused_of(Shape("bad", 4, 2, 16, 64, 96, intermediate_size=64), change, expected, tmp_path)


def refused_of(shape: Shape, change: Callable[..., None], expected: str, tmp_path: Path) -> None:
    """A file whose keys or tensors are changed is refused in a sentence."""
    source = save_checkpoint(shape, tmp_path / "source")

    def overwrite(writer: gguf.GGUFWriter) -> None:
        keys = writer.kv_data[0]
        before = dict(keys)
        keys.clear()
        change(writer)
        changed = dict(keys)
        keys.clear()
        keys.update(before | changed)

    save_gguf(source, tmp_path / "m.gguf", only(Type.Q8_0), change=overwrite)
    with pytest.raises(LoadError) as caught:
        check_weights(tmp_path / "m.gguf")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "m.gguf") in str(caught.value)


FEW = (("num_experts", 5), ("num_experts_per_tok", 2), ("moe_intermediate_size", 32), ("norm_topk_prob", True))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda w: w.add_expert_count(6),
            "ffn_down_exps.weight [5, 64, 32] does not hold the weights of 6 experts (qwen3moe.expert_count)",
        ),
        (lambda w: w.add_expert_count(0), "qwen3moe.expert_count must be a whole number of at least 1, not 0"),
        (lambda w: w.add_expert_used_count(6), "expert_used_count must be at most 5 (qwen3moe.expert_count), not 6"),
        (lambda w: w.add_expert_feed_forward_length(24), "experts.0.gate_proj.weight [32, 64] instead of [24, 64]"),
        (lambda w: w.add_expert_weights_norm(False), "qwen3moe.expert_weights_norm must be True with 'qwen3moe'"),
        (lambda w: w.add_expert_weights_scale(2.5), "qwen3moe.expert_weights_scale 2.5 is not supported, only 1.0"),
        (lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "expert_gating_func 2 is not supp"),
        (lambda w: w.add_leading_dense_block_count(1), "qwen3moe.leading_dense_block_count 1 is not supported"),
        (lambda w: w.add_expert_group_count(4), "qwen3moe.expert_group_count 4 is not supported, only 0"),
        (
            lambda w: w.add_tensor("blk.0.ffn_gate_up_exps.weight", np.zeros((5, 64, 64), np.float32)),
            "blk.0.ffn_gate_exps.weight holds gate_proj of experts, which another tensor holds",
        ),
        (
            lambda w: w.add_tensor("blk.0.ffn_gate_up_exps.weight", np.zeros((5, 63, 64), np.float32)),
            "blk.0.ffn_gate_up_exps.weight [5, 63, 64] has no even number of rows for gate and up",
        ),
        (
            lambda w: w.add_tensor("model.layers.0.mlp.experts.1.up_proj.weight", np.zeros((32, 64), np.float32)),
            "model.layers.0.mlp.experts.1.up_proj.weight is not supported",
        ),
        (
            lambda w: w.add_tensor("0.ffn_up_exps.weight", np.zeros((5, 32, 64), np.float32)),
            "0.ffn_up_exps.weight is not supported",
        ),
        (
            lambda w: w.add_tensor("blk.0.ffn_up.1.weight", np.zeros((32, 64), np.float32)),  # as Mixtral's once were
            "blk.0.ffn_up.1.weight is not supported",
        ),
    ],
)
def test_experts_that_cannot_be_read_are_said_in_one_sentence(
    change: Callable[..., None], expected: str, tmp_path: Path
) -> None:
    refused_of(Shape("bad", 4, 2, 16, 64, 96, tied=False, family="Qwen3Moe", others=FEW), change, expected, tmp_path)


def test_sizes_that_files_of_experts_leave_out_are_what_llama_cpp_takes_them_for(tmp_path: Path) -> None:
    sizes = (("moe_intermediate_size", 32), ("shared_expert_intermediate_size", 64))
    shape = Shape("old", 4, 2, 16, 64, 96, False, family="Qwen2Moe", intermediate_size=64, others=(*FEW[:2], *sizes))
    source = save_checkpoint(shape, tmp_path / "source")
    before = lambda writer: [  # noqa: E731
        writer.kv_data[0].pop(f"qwen2moe.expert_{name}feed_forward_length") for name in ("", "shared_")
    ]
    save_gguf(source, tmp_path / "m.gguf", only(Type.Q8_0), change=before)
    check_weights(tmp_path / "m.gguf")
    config = read_config(tmp_path / "m.gguf")
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (32, 64)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96},
        {"rope_type": "linear", "factor": 2.0},
    ],
)
def test_scaled_positions_are_those_of_the_same_fields_in_config_json(rope: dict[str, Any], tmp_path: Path) -> None:
    shape = Shape("scaled", 4, 2, 16, 64, 96, intermediate_size=64)
    source = save_checkpoint(shape, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    theta = config.pop("rope_parameters", config)["rope_theta"]
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": rope | {"rope_theta": theta}}))

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_float32("qwen2.rope.scaling.attn_factor", 1.0)  # says what is so without it

    save_gguf(source, tmp_path / "m.gguf", only(Type.F32), change=change)
    found, expected = read_config(tmp_path / "m.gguf"), read_config(source)
    assert found.rope == expected.rope
    assert found.max_position_embeddings == expected.max_position_embeddings != config["max_position_embeddings"]


@pytest.mark.parametrize(
    ("kind", "factor", "expected"),
    [
        (None, 4.0, "linear"),
        ("linear", 4.0, "linear"),
        (None, 0.0, "default"),
        (None, None, "default"),
        ("none", 4.0, "default"),
    ],
)
def test_a_factor_without_a_type_is_linear_as_llama_cpp_has_it(
    kind: str | None, factor: float | None, expected: str, tmp_path: Path
) -> None:
    source = save_checkpoint(Shape("scaled", 4, 2, 16, 64, 96, intermediate_size=64), tmp_path / "source")

    def change(writer: gguf.GGUFWriter) -> None:
        if kind is not None:
            writer.add_string("qwen2.rope.scaling.type", kind)
        if factor is not None:
            writer.add_rope_scaling_factor(factor)

    save_gguf(source, tmp_path / "m.gguf", only(Type.F32), change=change)
    found, scale = read_config(tmp_path / "m.gguf"), 4 if expected == "linear" else 1
    assert (found.rope.rope_type, found.rope.factor) == (expected, scale)
    assert found.max_position_embeddings == 256 * scale


def test_llama_3s_factors_are_those_of_its_fields(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    shape = replace(LLAMA, rope=(*rope.items(), ("original_max_position_embeddings", 8192)), rope_theta=500_000.0)
    source = save_checkpoint(shape, tmp_path / "source")
    frequencies = 500_000.0 ** (-np.arange(0, 32, 2) / 32)
    lengths = 2 * np.pi / frequencies
    smooth = (8192 / lengths - 1) / 3
    factors = np.where(lengths < 2048, 1, np.where(lengths > 8192, 32, 1 / ((1 - smooth) / 32 + smooth)))
    change = lambda writer: writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))  # noqa: E731
    save_gguf(source, tmp_path / "m.gguf", only(Type.Q8_0), change=change)
    assert read_config(tmp_path / "m.gguf").rope == read_config(source).rope


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model as one file, and in three parts."""
    folder = tmp_path_factory.mktemp("parts")
    source = save_checkpoint(Shape("split", 4, 2, 16, 64, 512, intermediate_size=64), folder / "source")
    save_gguf(source, folder / "whole.gguf", only(Type.Q8_0))
    num_tensors = len(read_gguf(folder / "whole.gguf").tensors)

    def in_three(writer: gguf.GGUFWriter) -> None:
        writer.split_max_tensors = -(-num_tensors // 3)

    save_gguf(source, folder / "m.gguf", only(Type.Q8_0), change=in_three)
    return folder


def test_a_model_in_parts_computes_what_it_does_as_one_file(parts: Path) -> None:
    first = parts / "m-00001-of-00003.gguf"
    check_weights(first)
    assert len({tensor.file for tensor in read_gguf(first).tensors.values()}) == 3
    tokens, logits = logits_of(load(first))
    expected_tokens, expected = logits_of(load(parts / "whole.gguf"))
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)
    checkpoint = Checkpoint(first)
    assert [file.name for file in checkpoint.identities] == [f"m-0000{at}-of-00003.gguf" for at in (1, 2, 3)]
    checkpoint.close()


@pytest.mark.parametrize(
    ("change", "given", "expected"),
    [
        (lambda first, second, third: None, 2, "is part 2 of 3 (split.count): give the first one"),
        (lambda first, second, third: third.unlink(), 1, "m-00003-of-00003.gguf cannot be read: No such file"),
        (lambda first, second, third: cut(third), 1, "m-00003-of-00003.gguf was cut off: "),
        (lambda first, second, third: shutil.copy(second, third), 1, "split.count must be 2 and 3, not (1, 3)"),
        (lambda first, second, third: first.rename(first.with_name("m.gguf")), 0, "end with -00001-of-00003.gguf"),
        (lambda first, second, third: replaced(first, b"split.tensors.count", 1), 1, "split.tensors.count is "),
        (lambda first, second, third: as_part(third, second), 1, "is in a part before it, too"),
    ],
)
def test_parts_that_do_not_make_one_model_are_said_in_one_sentence(
    change: Callable[..., None], given: int, expected: str, parts: Path, tmp_path: Path
) -> None:
    files = [tmp_path / f"m-0000{at}-of-00003.gguf" for at in (1, 2, 3)]
    for file in files:
        shutil.copy(parts / file.name, file)
    change(*files)
    with pytest.raises(LoadError) as caught:
        check_weights(files[given - 1] if given else tmp_path / "m.gguf")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def replaced(file: Path, key: bytes, more: int) -> None:
    """The number of this key, made larger in place."""
    data = bytearray(file.read_bytes())
    at = data.index(key) + len(key) + 4  # its type
    data[at] += more
    file.write_bytes(data)


def as_part(file: Path, of: Path) -> None:
    """The tensors of another part, with this one's number."""
    shutil.copy(of, file)
    replaced(file, b"split.no", 1)


def test_a_file_that_was_cut_off_is_told_wherever_that_was(file: Path, tmp_path: Path) -> None:
    whole, path = file.read_bytes(), tmp_path / "cut.gguf"
    header = min(tensor.begin for tensor in read_gguf(file).tensors.values())
    for length in (*range(0, header, 7), header, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(LoadError, match=r"cut\.gguf (is no GGUF file|was cut off|is corrupt)"):
            check_weights(path)


def test_any_damage_to_the_header_gives_one_sentence_or_changes_nothing_that_is_read(
    file: Path, tmp_path: Path
) -> None:
    whole, path = file.read_bytes(), tmp_path / "damaged.gguf"
    header = min(tensor.begin for tensor in read_gguf(file).tensors.values())
    draw = random.Random(0)
    lengths = [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(whole), len(whole) + 1]
    refused = accepted = 0
    for _ in range(500):
        damaged = bytearray(whole)
        if draw.random() < 0.5:
            damaged[draw.randrange(header)] ^= 1 << draw.randrange(8)
        else:
            at = draw.randrange(header - 8)
            damaged[at : at + 8] = struct.pack("<Q", draw.choice(lengths))
        path.write_bytes(damaged)
        try:
            check_weights(path)
        except LoadError as error:
            refused += "\n" not in str(error)
        else:
            accepted += 1
    assert refused + accepted == 500
    assert 300 < refused < 500


def test_files_that_are_none_and_folders_that_hold_one_are_told(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for version, what in ((1, "version 1"), (3 << 24, "big-endian")):
        path.write_bytes(b"GGUF" + struct.pack("<I", version) + file.read_bytes()[8:])
        with pytest.raises(LoadError, match=f"{what} is not supported, only little-endian GGUF of version 2 or 3"):
            read_gguf(path)
    shutil.copy(file, path)
    with pytest.raises(LoadError, match=r"holds no config\.json.* \(m\.gguf is a model of its own: give its path\)"):
        check_weights(tmp_path)
    check_weights(path)
