"""A model's geometry, read from its Hugging Face `config.json` and `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novainfer.kernels.errors import LoadError
from novainfer.kernels.folder import read_json

__all__ = ["DTYPES", "NUM_LAYERS_MAX", "ConfigReader", "ModelConfig"]

DTYPES = ("float32", "bfloat16", "float16")
INTEGER_MAX = 2**31 - 1  # nothing in a model is larger; a damaged digit must not become a loop without end
NUM_LAYERS_MAX = 4096  # the deepest models have a few hundred


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
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    dtype: str | None  # what the config says the checkpoint holds, as torch calls it
    eos_token_ids: tuple[int, ...]


class ConfigReader:
    """Typed reads from a config's JSON; every error names the file and the field."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1 and at most `INTEGER_MAX`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.path}: {name} must be a whole number of at least 1, not {value!r}")
        if value > INTEGER_MAX:
            raise LoadError(f"{self.path}: {name} must be at most {INTEGER_MAX}, not {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise LoadError(f"{self.path}: {name} must be a number above 0, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise LoadError(f"{self.path}: {name} must be true or false, not {value!r}")
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

    def rope_theta(self, default: float) -> float:
        """The rotary base; raises for any scaling of the rotary positions, which is not built.

        transformers 5 writes `rope_parameters`; earlier versions `rope_theta` and, when scaled,
        `rope_scaling`.
        """
        parameters = self.values.get("rope_parameters") or {}
        for name in ("rope_parameters", "rope_scaling"):
            scaling = self.values.get(name)
            if scaling is None:
                continue
            if not isinstance(scaling, Mapping):
                raise LoadError(f"{self.path}: {name} must be an object, not {scaling!r}")
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            if kind != "default":
                raise LoadError(f"{self.path}: {name} of type {kind!r} is not supported, only 'default'")
        if "rope_theta" in parameters:
            return ConfigReader(parameters, self.path).number("rope_theta")
        return self.number("rope_theta", default)

    def eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The end tokens of config.json and generation_config.json together, sorted."""
        sources = {self.path: self.values}
        generation = self.path.with_name("generation_config.json")
        if generation.is_file():
            sources[generation] = read_json(generation)
        found: set[int] = set()
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
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise LoadError(f"{self.path}: {name} is missing")
        return value
