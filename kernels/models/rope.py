"""Rotary positions as config.json wants them, scaled for long contexts or not: `rope_parameters`, `rope_scaling`.

Field names, defaults and order of precedence are those of transformers (modeling_rope_utils.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import INTEGER_MAX, ConfigReader, Rope

__all__ = ["ROPE_TYPES", "max_positions", "read_rope"]

THETA = 10_000.0  # transformers' default_theta
SHARED = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Each type that can be computed, and the fields it has beside the shared ones.
ROPE_TYPES: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip


def read_rope(config: ConfigReader, max_position_embeddings: int) -> Rope:
    """transformers 5 writes `rope_parameters`; earlier versions `rope_theta` and, when scaled, `rope_scaling`.

    Raises `LoadError` for a type that is not built, and for a field that its type does not have.
    """
    given = {
        name: config.values[name]
        for name in ("rope_scaling", "rope_parameters")
        if config.values.get(name) not in (None, {})
    }
    name, values = next(iter(given.items()), ("rope_parameters", {}))
    if not isinstance(values, Mapping):
        raise LoadError(f"{config.path}: {name} must be an object, not {values!r}")
    fields = ConfigReader(values, config.path, f"{name}.")
    _refuse_partial(config)
    rope_type = values.get("rope_type", values.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise LoadError(
            f"{config.path}: {name}.rope_type {rope_type!r} is not supported, only {', '.join(map(repr, ROPE_TYPES))}"
        )
    _refuse_others(fields, rope_type)
    # Below 1, later pairs of a head would turn faster: nothing has that, and far below they are no numbers any more.
    theta = fields.number("rope_theta", config.number("rope_theta", THETA, minimum=1.0), minimum=1.0)
    if rope_type == "default":
        return Rope(theta)
    factor = fields.number("factor", minimum=1.0)
    original = max_position_embeddings
    if rope_type != "linear":  # a field beside the object goes before the one in it
        original = config.integer(
            "original_max_position_embeddings",
            fields.integer("original_max_position_embeddings", max_position_embeddings),
        )
    if rope_type == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise LoadError(f"{config.path}: {name}.high_freq_factor ({high}) must be above low_freq_factor ({low})")
        return Rope(theta, rope_type, factor, original, low_freq_factor=low, high_freq_factor=high)
    if rope_type == "yarn":
        if theta <= 1:
            raise LoadError(f"{config.path}: rope_theta must be above 1 for {name} of type 'yarn', not {theta}")
        return Rope(
            theta,
            rope_type,
            factor,
            original,
            attention_factor=_attention_factor(fields, factor),
            beta_fast=fields.number("beta_fast", 32.0),
            beta_slow=fields.number("beta_slow", 1.0),
            truncate=fields.boolean("truncate", True),
        )
    return Rope(theta, rope_type, factor, original)


def max_positions(config: ConfigReader, rope: Rope, max_position_embeddings: int) -> int:
    """How many tokens a context may have, scaling included: as vLLM counts them."""
    scaled = {"yarn": rope.original_max_positions * rope.factor, "linear": max_position_embeddings * rope.factor}
    positions = int(min(scaled.get(rope.rope_type, max_position_embeddings), 2.0 * INTEGER_MAX))
    if positions > INTEGER_MAX:
        raise LoadError(f"{config.path}: the factor {rope.factor} of rope scaling gives more than {INTEGER_MAX} tokens")
    return positions


def _attention_factor(fields: ConfigReader, factor: float) -> float:
    """What cosines and sines are multiplied by (arXiv 2309.00071, section 3.4; DeepSeek's two mscales)."""
    if fields.values.get("attention_factor") is not None:
        return fields.number("attention_factor")

    def mscale(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if fields.values.get("mscale") and fields.values.get("mscale_all_dim"):
        return mscale(fields.number("mscale")) / mscale(fields.number("mscale_all_dim"))
    return mscale()


def _refuse_others(fields: ConfigReader, rope_type: str) -> None:
    known = SHARED | ROPE_TYPES[rope_type]
    for name in fields.values:
        if name not in known:
            raise LoadError(
                f"{fields.path}: {fields.prefix}{name} is not supported with rope_type {rope_type!r}, only "
                f"{', '.join(sorted(known))}"
            )
    _refuse_partial(fields)


def _refuse_partial(fields: ConfigReader) -> None:
    value = fields.values.get("partial_rotary_factor")
    if value not in (None, 1.0):
        raise LoadError(f"{fields.path}: {fields.prefix}partial_rotary_factor {value!r} is not supported, only 1.0")
