"""Models whose files are damaged, or lie, are loaded and asked: one sentence, or a right run, whatever it is."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FEW_EXPERTS, Shape, save_checkpoint
from driver import CPU, Driver
from gguf import GGMLQuantizationType as Type
from gguf_checkpoints import HALVES, save_gguf
from quantised_checkpoints import save_awq, save_compressed, save_gptq
from safetensors.torch import load_file, save_file

from novainfer.fsm.messages.step import NO_TOKEN
from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.gguf import TYPES, read_gguf
from novainfer.kernels.ops.registry import Registry
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner

DENSE = Shape("dense", 4, 2, 16, 64, 96, intermediate_size=64)
SIZES = (("moe_intermediate_size", 32), ("shared_expert_intermediate_size", 64))
ROUTED = replace(DENSE, name="routed", tied=False, family="Qwen2Moe", others=(*FEW_EXPERTS, *SIZES))
PACKED = {"num_bits": 4, "strategy": "group", "group_size": 32, "layout": "pack-quantized", "symmetric": False}
FOLDERS: dict[str, tuple[Shape, Callable[..., Path] | None, dict[str, Any]]] = {
    "unquantised": (DENSE, None, {}),
    "experts": (ROUTED, None, {}),
    "gptq": (DENSE, save_gptq, {}),
    "gptq of whole rows": (DENSE, save_gptq, {"bits": 8, "sym": False, "group_size": -1}),
    "awq": (DENSE, save_awq, {}),
    "w8a8": (DENSE, save_compressed, {}),
    "w4a16": (DENSE, save_compressed, PACKED | {"activations": False}),
}
CASES = 50  # of each
LONGEST = 4096
SCALE = "a scale of its codes is not a finite number"
NUMBERS = (math.nan, math.inf, -math.inf, 0.0, -1.0, 60_000.0)
VALUES = (
    None, 0, 1, 3, 40, -1, 2**31 - 1, 10**30, 1e30, 1e-30, math.inf, math.nan, True, False, "32", "yarn", [], [1], {},
)  # fmt: skip
DTYPES = (torch.int8, torch.int32, torch.int64, torch.float16, torch.float64, torch.bool)
ROPES = [
    {"rope_type": kind, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": 16}
    for kind in ("yarn", "linear", "longrope")
    for theta in (1e4, 1e-30, "x")
    for factor in (4.0, 0.5, "4", math.inf)
]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(CPU)


def asked(path: Path, registry: Registry) -> str | None:
    """Load a model and compute two steps: the sentence that says why not, or None."""
    try:
        runner = ModelRunner.load(
            path, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=None, registry=registry
        )
        if runner.info.max_model_len > LONGEST:
            return None  # as the file says; but room for it would take seconds to make
        runner.fit(mode="fixed", num_blocks=-(-runner.info.max_model_len // runner.info.block_size))
    except LoadError as error:
        return str(error)
    if runner.info.max_model_len > 5:
        driver = Driver(runner)
        sequence = driver.add(0, [1, 2, 3, 4])
        (token,) = driver.step(sequence)
        assert token == NO_TOKEN or 0 <= token < runner.info.vocab_size
        if token != NO_TOKEN:
            driver.step(sequence)
    return None


def check(said: str | None, must_fail: bool) -> None:
    """A sentence is one, and damaged scales are told."""
    assert said is None or ("\n" not in said and len(said) < 700)
    assert not must_fail or (said is not None and SCALE in said)


def change_setting(config: dict[str, Any], draw: random.Random) -> None:
    """Another value of a field at any depth, another way to scale positions, or a field less."""
    at = config
    if draw.random() < 0.2:
        at["rope_parameters"] = draw.choice(ROPES)
        return
    while isinstance(at[key := draw.choice(list(at))], dict) and at[key] and draw.random() < 0.9:
        at = at[key]
    if draw.random() < 0.1:
        del at[key]
    elif type(at[key]) is int and draw.random() < 0.5:
        at[key] = draw.choice([at[key] + 1, at[key] - 1, 2 * at[key], -at[key], str(at[key])])
    else:
        at[key] = draw.choice(VALUES)


def change_tensor(tensors: dict[str, torch.Tensor], draw: random.Random) -> bool:
    """Another number, shape, dtype or name; whether a scale is no number any more."""
    scales = [name for name in tensors if name.endswith(("scales", "weight_scale"))]
    name = draw.choice(scales if scales and draw.random() < 0.4 else list(tensors))
    tensor, kind = tensors.pop(name), draw.randrange(4)
    if kind == 0 and tensor.is_floating_point():
        value = draw.choice(NUMBERS)
        tensor.view(-1)[draw.randrange(tensor.numel())] = value
        tensors[name] = tensor
        return name in scales and not math.isfinite(value)
    if kind == 1:
        tensors[name] = draw.choice([tensor[:-1], tensor[:0], tensor[None], tensor.reshape(-1), tensor.reshape(-1)[0]])
    elif kind == 2:
        tensors[name] = tensor.to(draw.choice(DTYPES))
    elif kind == 3:
        tensors[draw.choice([name.replace("layers.1", "layers.9"), f"{name}\n", "x"])] = tensor
    return False


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, registry: Registry, tmp_path: Path) -> None:
    shape, quantise, options = FOLDERS[name]
    folder = save_checkpoint(shape, tmp_path / "source")
    folder = folder if quantise is None else quantise(folder, tmp_path / "quantised", **options)
    assert asked(folder, registry) is None
    config, weights = folder / "config.json", folder / "model.safetensors"
    settings, whole, draw, refused = config.read_text(), weights.read_bytes(), random.Random(0), 0
    for _ in range(CASES):
        tensors, fields, must_fail = load_file(weights), json.loads(settings), False
        if draw.random() < 0.5:
            change_setting(fields, draw)
        else:
            must_fail = change_tensor(tensors, draw)
        config.write_text(json.dumps(fields))
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, weights)
        said = asked(folder, registry)
        check(said, must_fail)
        refused += said is not None
        weights.write_bytes(whole)
    assert CASES // 3 < refused < CASES


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.F16], ids=lambda kind: kind.name)
def test_gguf_files(kind: Type, registry: Registry, tmp_path: Path) -> None:
    source, path = save_checkpoint(ROUTED, tmp_path / "source"), tmp_path / "model.gguf"
    save_gguf(source, path, lambda name: kind)
    assert asked(path, registry) is None
    whole, tensors, draw, refused = path.read_bytes(), read_gguf(path).tensors, random.Random(0), 0
    header = min(tensor.begin for tensor in tensors.values())
    in_codes = [tensor for tensor in tensors.values() if tensor.type == kind.name]
    for _ in range(CASES):
        damaged, must_fail = bytearray(whole), False
        if draw.random() < 0.4:  # a number in 16 bits that is none
            tensor = draw.choice(in_codes)
            size = TYPES[kind.value][2]
            at = draw.randrange(tensor.begin, tensor.end, size) + draw.choice(HALVES.get(kind, (0,)))
            damaged[at : at + 2] = draw.choice((b"\x00\x7c", b"\x00\xfc", b"\xff\x7f"))
            must_fail = kind in HALVES
        else:
            at = draw.randrange(header - 4)
            damaged[at : at + 4] = struct.pack("<I", draw.choice([0, 1, 7, 32, 10, 2**20, 2**31 - 1, 2**32 - 1]))
        path.write_bytes(damaged)
        said = asked(path, registry)
        check(said, must_fail)
        refused += said is not None
    assert CASES // 3 < refused < CASES
