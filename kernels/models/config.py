"""A model's geometry, read from its Hugging Face `config.json` and `generation_config.json`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.folder import read_json

__all__ = [
    "DTYPES",
    "INTEGER_MAX",
    "NUM_EXPERTS_MAX",
    "NUM_LAYERS_MAX",
    "ConfigReader",
    "ModelConfig",
    "Rope",
    "TensorSpec",
]

DTYPES = ("float32", "bfloat16", "float16")
INTEGER_MAX = 2**31 - 1  # nothing in a model is larger; a damaged digit must not become a loop without end
NUM_LAYERS_MAX = 4096  # the deepest models have a few hundred
NUM_EXPERTS_MAX = 4096  # the same of experts


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint, or the same one of each layer, or of each expert of each layer."""

    name: str  # "{layer}" and "{expert}" stand for the numbers of these
    part: str  # of the decoder, or of its layers (`Layer`)
    shape: tuple[str, ...]  # each size by its name in `ModelConfig`, or "1"
    shard_axis: int | None = None  # along which tensor parallelism cuts it; None: each device has all of it
    when: tuple[str, bool] | None = None  # it is there when this field of config.json has this value
    of_experts: bool | None = None  # it is there in layers with experts only, or in those without; None: in all

    @property
    def is_per_layer(self) -> bool:
        """Whether each layer has one."""
        return "{layer}" in self.name

    @property
    def is_per_expert(self) -> bool:
        """Whether each expert has one."""
        return "{expert}" in self.name

    def names(self, layer: int | None, num_experts: int) -> list[str]:
        """Its name in one layer, or of each expert."""
        if not self.is_per_expert:
            return [self.name.format(layer=layer)]
        return [self.name.format(layer=layer, expert=expert) for expert in range(num_experts)]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the base of their frequencies, and how these are scaled (`rope_type`)."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0  # tokens of a context before it was scaled
    attention_factor: float = 1.0  # of cosines and sines
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass must know of a model; every family maps its own config to this one."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int  # scaled, where the rotary positions are
    sliding_windows: tuple[int | None, ...]  # of each layer: the tokens that a row sees; None: its whole context
    tensors: tuple[TensorSpec, ...]  # of its checkpoint
    dtype: str | None  # what the config says the checkpoint holds, as torch calls it
    eos_token_ids: tuple[int, ...]
    has_experts: tuple[bool, ...] = ()  # of each layer: its MLP is a mixture of experts; (): none is
    num_experts: int = 0
    num_experts_per_tok: int = 0  # that a row is given to
    norm_topk_prob: bool = False  # the weights of these sum to 1
    moe_intermediate_size: int = 0  # of an expert
    shared_expert_intermediate_size: int = 0  # of the one that all rows are given to

    @property
    def q_size(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads."""
        return self.num_kv_heads * self.head_dim

    def tensor(self, part: str) -> TensorSpec | None:
        """The one tensor of a part of the decoder; None when this model has none."""
        return next((tensor for tensor in self.tensors if tensor.part == part), None)

    def shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Its shape in this model."""
        return tuple(1 if size == "1" else getattr(self, size) for size in tensor.shape)

    def layer_has_experts(self, layer: int) -> bool:
        """Whether its MLP is a mixture of experts."""
        return bool(self.has_experts) and self.has_experts[layer]

    def layer_tensors(self, layer: int) -> list[TensorSpec]:
        """Those that a layer has."""
        has_experts = self.layer_has_experts(layer)
        return [tensor for tensor in self.tensors if tensor.is_per_layer and tensor.of_experts in (None, has_experts)]


class ConfigReader:
    """Typed reads from a config's JSON; every error names the file and the field."""

    def __init__(
        self, values: Mapping[str, Any], path: Path, prefix: str = "", defaults: Mapping[str, Any] | None = None
    ) -> None:
        """`prefix` says in which object of the file the fields stand, `defaults` what one means that is not there."""
        self.values = values
        self.path = path
        self.prefix = prefix
        self.defaults = defaults or {}

    def given(self, name: str) -> Any:
        """What the file says, or what saying nothing means; None for null, and where neither says anything."""
        return self.values.get(name, self.defaults.get(name))

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum` and at most `INTEGER_MAX`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise LoadError(f"{self._where(name)} must be a whole number of at least {minimum}, not {value!r}")
        if value > INTEGER_MAX:
            raise LoadError(f"{self._where(name)} must be at most {INTEGER_MAX}, not {value}")
        return value

    def number(self, name: str, default: float | None = None, minimum: float = 0.0) -> float:
        """A finite number above 0 and not below `minimum`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise LoadError(f"{self._where(name)} must be a number above 0, not {value!r}")
        if value < minimum:
            raise LoadError(f"{self._where(name)} must be at least {minimum:g}, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise LoadError(f"{self._where(name)} must be true or false, not {value!r}")
        return value

    def must_be(self, name: str, expected: str, default: str) -> None:
        """Raise unless the field (or its default) is the one value that is supported."""
        value = self._get(name, default)
        if value != expected:
            raise LoadError(f"{self.path}: {name} {value!r} is not supported, only {expected!r}")

    def dtype(self) -> str | None:
        """The checkpoint's dtype: `dtype` since transformers 5, `torch_dtype` before, None when neither."""
        name = self.values.get("dtype", self.values.get("torch_dtype"))
        if name is None:
            return None
        dtype = str(name).removeprefix("torch.")
        if dtype not in DTYPES:
            raise LoadError(f"{self.path}: dtype {name!r} is not supported, only {', '.join(DTYPES)}")
        return dtype

    def eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The end tokens of config.json and generation_config.json together, sorted."""
        sources = {self.path: self.values}
        generation = self.path.with_name("generation_config.json")
        if generation.is_file():
            sources[generation] = read_json(generation)
        found: set[int] = set()
        if not any("eos_token_id" in source for source in sources.values()):
            sources = {self.path: self.defaults}
        for path, source in sources.items():
            ids = source.get("eos_token_id")
            for token_id in ids if isinstance(ids, list) else [ids]:
                if token_id is None:
                    continue
                if isinstance(token_id, bool) or not isinstance(token_id, int):
                    raise LoadError(f"{path}: eos_token_id must be a token id or a list of them, not {ids!r}")
                if 0 <= token_id < vocab_size:  # some checkpoints name ids that only a larger variant has
                    found.add(token_id)
        return tuple(sorted(found))

    def _get(self, name: str, default: Any) -> Any:
        value = self.given(name)
        value = default if value is None else value
        if value is None:
            raise LoadError(f"{self._where(name)} is missing")
        return value

    def _where(self, name: str) -> str:
        return f"{self.path}: {self.prefix}{name}"
