"""Writes a random checkpoint with exactly the shape of a known model, for benchmarks: `make_checkpoint(...)`.

The weights mean nothing (normal, standard deviation 0.02, as the models were initialised; norms 1), so the
text is noise; the time and the memory are the real model's. Tensors are generated and written one at a
time.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from novainfer.kernels.demo import model_path
from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.models.family import ModelFamily
from novainfer.kernels.models.registry import LLAMA, QWEN2, QWEN3, QWEN3_MOE, read_config
from novainfer.kernels.weights.header import tensor_shapes

__all__ = ["SHAPES", "make_checkpoint"]

STD = 0.02  # initializer_range of Qwen2
DEEP_DEMO = "demo-48-layers"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen2's own pattern (tokenizer.json of Qwen2.5): contractions, words, single digits, punctuation, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _shape(
    family: ModelFamily, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int,
    context: int, *, tied: bool, **others: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    } | others


# As the config.json of Qwen/Qwen2.5-0.5B and so on has them: hidden size, intermediate size, layers, heads, key heads,
# vocabulary, context.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _shape(QWEN2, 896, 4864, 24, 14, 2, 151_936, 32_768, tied=True),
    "qwen2.5-1.5b": _shape(QWEN2, 1536, 8960, 28, 12, 2, 151_936, 32_768, tied=True),
    "qwen3-0.6b": _shape(QWEN3, 1024, 3072, 28, 16, 8, 151_936, 40_960, tied=True, head_dim=128),
    "qwen3-1.7b": _shape(QWEN3, 2048, 6144, 28, 16, 8, 151_936, 40_960, tied=True, head_dim=128),
    "deepseek-r1-distill-qwen-1.5b": _shape(
        QWEN2, 1536, 8960, 28, 12, 2, 151_936, 131_072, tied=False, rope_theta=10_000.0
    ),
    "llama-3.2-1b": _shape(
        LLAMA,
        2048,
        8192,
        16,
        32,
        8,
        128_256,
        131_072,
        tied=True,
        head_dim=64,
        rope_theta=500_000.0,
        rms_norm_eps=1e-05,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen3-30b-a3b": _shape(
        QWEN3_MOE,
        2048,
        6144,
        48,
        32,
        4,
        151_936,
        40_960,
        tied=False,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "moe-1b": _shape(  # its experts and how many are active in proportion, in 2 GB
        QWEN3_MOE,
        1024,
        3072,
        12,
        16,
        2,
        32_768,
        40_960,
        tied=True,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=384,
        norm_topk_prob=True,
    ),
    "47m": _shape(QWEN2, 512, 2048, 8, 8, 2, 32_768, 4096, tied=True),  # 94 MB: enough to see in a process's memory
    "tiny": _shape(QWEN2, 64, 160, 2, 4, 2, 512, 2048, tied=True),
    "tiny-qwen3": _shape(QWEN3, 64, 160, 2, 4, 2, 512, 2048, tied=True, head_dim=32),
    "tiny-moe": _shape(
        QWEN3_MOE,
        64,
        160,
        2,
        4,
        2,
        512,
        2048,
        tied=True,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    ),
    "tiny-llama": _shape(LLAMA, 64, 160, 2, 4, 2, 512, 2048, tied=False),
}


def make_checkpoint(like: str, out_dir: Path, *, seed: int = 0) -> Path:
    """Write config, bf16 weights and a byte-level tokenizer of the named shape to `out_dir`; gives `out_dir`.

    Raises ValueError, naming the known shapes, when `like` is none of them. `DEEP_DEMO` is no shape: it speaks.
    """
    if like not in (*SHAPES, DEEP_DEMO):
        raise ValueError(f"there is no shape {like!r}; known shapes: {', '.join((*SHAPES, DEEP_DEMO))}")
    out_dir.mkdir(parents=True, exist_ok=True)
    if like == DEEP_DEMO:
        return _deepen(model_path(), out_dir)
    values = _config(like)
    _write_json(out_dir / "config.json", values)
    _write_json(out_dir / "generation_config.json", {"eos_token_id": values["eos_token_id"], "do_sample": False})
    config = read_config(out_dir)
    _write_weights(out_dir / "model.safetensors", config, seed)
    _write_tokenizer(out_dir, config.vocab_size)
    return out_dir


def _deepen(source: Path, out_dir: Path) -> Path:
    """The model in `source` with layers behind its own that add nothing: it says the same, and takes eight times as
    long, as a model does for which a draft is worth its while.
    """
    config = json.loads((source / "config.json").read_text())
    last, num_layers = config["num_hidden_layers"] - 1, 8 * config["num_hidden_layers"]
    tensors = load_file(source / "model.safetensors")
    prefix = f"model.layers.{last}."
    for name in [name for name in tensors if name.startswith(prefix)]:
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        for layer in range(last + 1, num_layers):
            copy = torch.zeros_like(tensors[name]) if adds else tensors[name].clone()
            tensors[name.replace(prefix, f"model.layers.{layer}.")] = copy
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(out_dir / "config.json", config | {"num_hidden_layers": num_layers, "max_window_layers": num_layers})
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, out_dir / name)
    return out_dir


def _config(like: str) -> dict[str, Any]:
    return {
        "bos_token_id": 256,
        "eos_token_id": 258,
        "hidden_act": "silu",
        "initializer_range": STD,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    } | SHAPES[like]


def _write_weights(path: Path, config: ModelConfig, seed: int) -> None:
    """safetensors by hand: its package wants all tensors in memory at once."""
    shapes = tensor_shapes(config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * torch.bfloat16.itemsize
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # data starts at a multiple of 8, as the format asks
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for chunk in _random_chunks(shapes, seed):
            file.write(chunk.view(torch.uint8).numpy().data)


def _random_chunks(shapes: dict[str, tuple[int, ...]], seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chunk_elements = 16 * 1024 * 1024  # 64 MB of fp32 at once
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        for begin in range(0, count, chunk_elements):
            size = min(chunk_elements, count - begin)
            if "norm" in name:
                yield torch.ones(size, dtype=torch.bfloat16)
            else:
                yield torch.empty(size).normal_(0.0, STD, generator=generator).bfloat16()


def _write_tokenizer(out_dir: Path, vocab_size: int) -> None:
    """One token per byte, then Qwen2's special tokens; the other ids are words that no text is encoded to.

    They decode to text, so that what a random model generates streams like an answer.
    """
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS]
    symbols += [_word(i) for i in range(vocab_size - len(symbols))]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(out_dir / "tokenizer.json"))
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32_768,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _word(index: int) -> str:
    """A space (as byte-level BPE writes it) and the index in letters."""
    letters = ""
    while index or not letters:
        index, digit = divmod(index, 26)
        letters = chr(ord("a") + digit) + letters
    return "\u0120" + letters


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """`python -m novainfer.bench.make_checkpoint SHAPE FOLDER`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("like", choices=sorted((*SHAPES, DEEP_DEMO)))
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_checkpoint(arguments.like, arguments.out_dir, seed=arguments.seed))


if __name__ == "__main__":
    main()
