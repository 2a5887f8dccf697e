"""What a checkpoint holds, read from the headers of its safetensors files, without torch: in milliseconds.

The format (github.com/huggingface/safetensors#format): 8 bytes little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the data. The header is read here rather than by the safetensors
package because it lets every fault be named before a byte of weights is touched, and before a process is started.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.models.folder import read_json, weight_files
from novainfer.kernels.models.gguf import is_gguf
from novainfer.kernels.models.registry import FAMILIES, read_config
from novainfer.kernels.weights.entries import FLOATS, Entry, GroupedEntry, TensorEntry
from novainfer.kernels.weights.gguf import SCHEME, gguf_entries
from novainfer.kernels.weights.schemes import resolved, scheme_of

__all__ = [
    "check_fit",
    "check_weights",
    "read_entries",
    "read_header",
    "tensor_shapes",
    "zero_biases",
]

HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors package itself
SIZE_MAX = 2**63 - 1  # of a tensor's axis, and of an offset
FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
HEAD = "lm_head.weight"
LISTED_MAX = 5  # names spelled out in an error; the rest is counted

# As torch calls them, and the bytes of an element. Whole numbers are codes, and what belongs to them.
DTYPES = {
    "F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2),
    "I8": ("int8", 1), "U8": ("uint8", 1), "I32": ("int32", 4), "I64": ("int64", 8),
}  # fmt: skip
FLOAT_NAMES = tuple(name for name, (dtype, _) in DTYPES.items() if dtype in FLOATS)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors a checkpoint of this config must hold."""
    decoder = [tensor for tensor in config.tensors if not tensor.is_per_layer]
    return {
        name: config.shape(tensor)
        for layer in (None, *range(config.num_layers))
        for tensor in (decoder if layer is None else config.layer_tensors(layer))
        for name in tensor.names(layer, config.num_experts)
    }


def read_entries(model_dir: Path) -> tuple[dict[str, Entry], str | None]:
    """A model's weights by name, and the scheme that they were quantised by, None where they were not.

    Raises `LoadError` for files that are missing or damaged, and for what a scheme does that is not supported.
    """
    if is_gguf(model_dir):
        return gguf_entries(model_dir), SCHEME
    scheme = scheme_of(read_json(model_dir / "config.json"), model_dir / "config.json")
    entries: dict[str, TensorEntry] = {}
    for file in weight_files(model_dir):
        found = read_header(file)
        if twice := entries.keys() & found.keys():
            raise LoadError(f"{file}: tensor {min(twice)} is in {entries[min(twice)].file.name}, too")
        entries |= found
    entries = _named_as_a_whole(entries)
    return (dict(entries), None) if scheme is None else (resolved(entries, scheme), scheme.name)


def _named_as_a_whole(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Those of a decoder saved without its head, as models that embed are, have names without `model.`.

    Where config.json calls for a head all the same (Qwen3-Embedding-8B), it is the embeddings: no vector needs one.
    """
    if "embed_tokens.weight" not in entries:
        return entries
    named = {name if name == HEAD else f"model.{name}": entry for name, entry in entries.items()}
    return {HEAD: entries["embed_tokens.weight"], **named}


def zero_biases(config: ModelConfig, entries: Mapping[str, Entry]) -> list[str]:
    """Biases of quantised products that the model does not have: tools for GPTQ write them, and they must be 0."""
    expected = tensor_shapes(config)
    weights = {name for name, entry in entries.items() if isinstance(entry, GroupedEntry)}
    return [
        name
        for name in entries
        if name not in expected and name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in weights
    ]


def check_fit(model_dir: Path, config: ModelConfig, entries: Mapping[str, Entry]) -> None:
    """Raise `LoadError` listing missing, unexpected and mis-shaped tensors, unless there are none.

    The head of a checkpoint with tied embeddings may be there or not.
    """
    _check_experts(model_dir, config, entries)
    expected = tensor_shapes(config)
    ignored = {tensor.name for tensor in FAMILIES[config.architecture].tensors if tensor.part == "head"}
    ignored.update(zero_biases(config, entries))
    missing = [name for name in expected if name not in entries]
    unexpected = [
        name
        for name in entries
        if name not in expected and name not in ignored and not name.endswith("rotary_emb.inv_freq")
    ]
    misshaped = [
        f"{name} {list(entries[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in entries and entries[name].shape != shape
    ]
    faults = [
        f"{len(names)} {kind} ({', '.join(names[:LISTED_MAX])}{', …' if len(names) > LISTED_MAX else ''})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", misshaped))
        if names
    ]
    if faults:
        config_name = "its keys" if is_gguf(model_dir) else "config.json"
        raise LoadError(f"the weights in {model_dir} do not fit {config_name}: {'; '.join(faults)}")
    for name in expected:
        entry = entries[name]
        if isinstance(entry, TensorEntry) and entry.dtype not in FLOATS:
            dtype = next(name for name, (dtype, _) in DTYPES.items() if dtype == entry.dtype)
            raise _wrong_dtype(entry.file, name, dtype)


def _check_experts(model_dir: Path, config: ModelConfig, entries: Mapping[str, Entry]) -> None:
    """A wrong number of experts in one sentence, instead of some thousand tensors that are missing or too many."""
    for tensor in config.tensors:
        if tensor.is_per_expert:
            name = re.escape(tensor.name).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"(\d+)")
            found = {int(match[1]) for match in map(re.compile(name).fullmatch, entries) if match is not None}
            if found and max(found) + 1 != config.num_experts:
                raise LoadError(
                    f"{model_dir / 'config.json'}: num_experts is {config.num_experts}, but the weights have "
                    f"{max(found) + 1} experts"
                )
            fused = next((name for name in entries if name.endswith(FUSED_EXPERTS)), None)
            if fused is not None and not found:
                raise LoadError(
                    f"{model_dir}: {fused} holds all experts in one tensor, which is not supported, only one for each"
                )


def check_weights(model_dir: Path) -> None:
    """Raise `LoadError` unless the headers of a model's weights are whole, and hold the tensors of its config.json."""
    check_fit(model_dir, read_config(model_dir), read_entries(model_dir)[0])


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file by name; raises `LoadError` when it is cut off, or no safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
                raise LoadError(f"{file} is no safetensors file, or it was cut off: its header is not complete")
            header = json.loads(handle.read(length))
    except OSError as error:
        raise LoadError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise LoadError(f"{file} is corrupt: its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise LoadError(f"{file} is corrupt: its header is no JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, 8 + length, size) for name, value in header.items()}
    in_order = sorted((entry.begin, entry.end, name) for name, entry in entries.items() if entry.begin < entry.end)
    for (_, end, name), (begin, _, other) in itertools.pairwise(in_order):
        if begin < end:
            raise LoadError(f"{file} is corrupt: {name} and {other} lie over each other")
    return entries


def _entry(file: Path, name: str, value: Any, base: int, size: int) -> TensorEntry:
    if not name.isprintable():  # it is told to people, in one line
        raise LoadError(f"{file} is corrupt: {name!r:.100} is no name of a tensor")
    try:
        dtype_name, sizes, offsets = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError):
        raise LoadError(f"{file} is corrupt: the header entry of {name} is not complete") from None
    if not isinstance(dtype_name, str) or not dtype_name.isprintable():
        raise LoadError(f"{file} is corrupt: the dtype of {name} must be a name, not {dtype_name!r:.100}")
    if not _are_sizes(sizes) or not _are_sizes(offsets) or len(offsets) != 2:
        raise LoadError(
            f"{file} is corrupt: the shape of {name} must be a list of whole numbers, and its data_offsets two of them"
        )
    dtype, item_bytes = DTYPES.get(dtype_name, (None, 0))
    if dtype is None:
        raise _wrong_dtype(file, name, dtype_name)
    shape, (begin, end) = tuple(sizes), (base + offset for offset in offsets)
    if end > size:
        raise LoadError(f"{file} was cut off: {name} should end at byte {end}, but the file has {size} bytes")
    if end - begin != math.prod(shape) * item_bytes:
        raise LoadError(f"{file} is corrupt: {name} {list(shape)} does not fit its byte range")
    return TensorEntry(file, dtype, shape, begin, end)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= SIZE_MAX for value in values)


def _wrong_dtype(file: Path, name: str, dtype: str) -> LoadError:
    return LoadError(f"{file}: {name} has dtype {dtype:.100}, but only {', '.join(FLOAT_NAMES)} are supported")
