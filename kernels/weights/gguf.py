"""The tensors of a GGUF file by the names of a Hugging Face checkpoint, without torch.

llama.cpp rotates the two numbers of a pair that stand side by side; for architectures that pair the halves of a head
its converter leaves rows as they are, but for "llama" it interleaves those of q and k: they are put back when read.
It stacks the weights of all experts of a layer in one tensor, and with `--fuse-gate-up-exps` each expert's gate and up,
the gate first: here each is a weight of its own, where it lies.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.gguf import Gguf, GgufTensor, read_gguf
from novainfer.kernels.weights.entries import Entry, Form, GroupedEntry, TensorEntry

__all__ = ["SCHEME", "gguf_entries"]

SCHEME = "gguf"
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# What the blocks of each type hold (kernels/weights/ggml.py): codes of 5 and 6 bits are kept in 8.
FORMS = {
    "Q4_0": Form(4, 32, 8), "Q4_1": Form(4, 32, None), "Q4_K": Form(4, 32, None),
    "Q5_0": Form(8, 32, 0), "Q5_1": Form(8, 32, None), "Q5_K": Form(8, 32, None),
    "Q6_K": Form(8, 16, 0), "Q8_0": Form(8, 32, 0),
}  # fmt: skip
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]*)\.)?([a-z_]+)\.(weight|bias)")  # of two layers, or none: no two are one
STACKED = {
    "ffn_gate_exps": ("gate_proj",), "ffn_up_exps": ("up_proj",), "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}  # fmt: skip
ONE_ROW = "ffn_gate_inp_shexp"  # written as a vector
DERIVED = ("rope_freqs.weight",)  # read with the config, whose fields say the same
INTERLEAVED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}  # of "llama": how many heads


def gguf_entries(path: Path) -> dict[str, Entry]:
    """Where each tensor lies; raises `LoadError` as `read_gguf` does."""
    gguf = read_gguf(path)
    entries: dict[str, Entry] = {}
    for name, tensor in gguf.tensors.items():
        if name in DERIVED:
            continue
        match = NAME.fullmatch(name)
        layer, part, kind = match.groups() if match is not None else (None, "", "")
        if layer is not None and kind == "weight" and part in STACKED:
            projections = STACKED[part]
            weights = iter(_unstacked(gguf, name, tensor, len(projections)))
            for expert, projection in itertools.product(range(tensor.shape[0]), projections):
                known = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
                if known in entries:
                    raise LoadError(f"{tensor.file}: {name} holds {projection} of experts, which another tensor holds")
                entries[known] = _entry(gguf, name, known, next(weights))
            continue
        if layer is not None and part in LAYER_NAMES:
            known = f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
        elif layer is None and part in NAMES:
            known = f"{NAMES[part]}.{kind}"
        else:
            raise LoadError(
                f"{tensor.file}: {name} is not supported, only tensors that the architectures read here have"
            )
        entries[known] = _entry(gguf, name, known, tensor)
    return entries


def _unstacked(gguf: Gguf, name: str, tensor: GgufTensor, parts: int) -> list[GgufTensor]:
    """The weights of each expert, `parts` of them: one behind the other, as they lie in whole rows."""
    key = f"{gguf.text('general.architecture')}.expert_count"
    count = gguf.integer(key, 0, minimum=0)
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        raise LoadError(
            f"{gguf.path}: {name} {list(tensor.shape)} does not hold the weights of {count} experts ({key})"
        )
    _, rows, columns = tensor.shape
    if rows % parts:
        raise LoadError(f"{gguf.path}: {name} {list(tensor.shape)} has no even number of rows for gate and up")
    size = (tensor.end - tensor.begin) // (count * parts)
    begins = range(tensor.begin, tensor.end, size)
    shape = (rows // parts, columns)
    return [GgufTensor(tensor.type, shape, tensor.file, begin, begin + size) for begin in begins]


def _entry(gguf: Gguf, name: str, known: str, tensor: GgufTensor) -> Entry:
    part, heads = name.split(".")[-2] if "." in name else "", 0
    architecture = gguf.text("general.architecture")
    if architecture == "llama" and part in INTERLEAVED:
        heads = gguf.integer(f"llama.{INTERLEAVED[part]}", gguf.integer("llama.attention.head_count"))
        if tensor.shape[0] % (2 * heads):
            raise LoadError(f"{gguf.path}: {name} {list(tensor.shape)} does not have an even size for {heads} heads")
    shape = (1, *tensor.shape) if part == ONE_ROW and len(tensor.shape) == 1 else tensor.shape
    entry = TensorEntry(tensor.file, FLOATS.get(tensor.type, tensor.type), shape, tensor.begin, tensor.end, heads)
    if tensor.type in FLOATS:
        return entry
    if len(tensor.shape) != 2:
        raise LoadError(f"{gguf.path}: {name} {list(tensor.shape)} is of type {tensor.type}, but is no matrix")
    form = FORMS[tensor.type]
    return GroupedEntry(known, tensor.file, tensor.type, tensor.shape, form, tensor.type, {"weight": entry})
