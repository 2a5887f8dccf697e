"""How checkpoints that were quantised by others keep their weights: GPTQ, AWQ and compressed-tensors, without torch.

What each file format spreads over several tensors (codes, scales, zero points) becomes one entry of the weight that
they stand for, so that whoever checks or loads a checkpoint sees the weights that its config.json promises. Nothing
is taken on trust that the tensors can say themselves: a weight is quantised where the checkpoint holds codes for it.

Sources: GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it, AWQ (arXiv 2306.00978) as AutoAWQ writes it in its
"gemm" layout, compressed-tensors as llm-compressor does (docs.vllm.ai/projects/compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import ConfigReader
from novainfer.kernels.weights.entries import FLOATS, Entry, Form, GroupedEntry, TensorEntry

__all__ = ["Scheme", "resolved", "scheme_of"]

WORD_BITS = 32  # of the integers that codes are packed into
SETTING = "quantization_config"
ORDERS_KEPT = ("weight", "static")  # values of `actorder`, one the other's alias, by which features stay where they are


class Scheme(Protocol):
    """One way to keep quantised weights."""

    name: str  # for people

    def grouped(self, stem: str, parts: dict[str, TensorEntry]) -> GroupedEntry | None:
        """The weight that these tensors of a module hold, taken out of `parts`; None where it is not quantised."""


def scheme_of(config: Mapping[str, Any], path: Path) -> Scheme | None:
    """What config.json (at `path`) says of quantised weights, None without any; raises `LoadError`."""
    values = config.get(SETTING)
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise LoadError(f"{path}: {SETTING} must be an object, not {values!r}")
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in SCHEMES:
        raise LoadError(
            f"{path}: {SETTING}.quant_method {method!r} is not supported, only {', '.join(map(repr, SCHEMES))}"
        )
    return SCHEMES[method](ConfigReader(values, path, f"{SETTING}."))


def resolved(entries: Mapping[str, TensorEntry], scheme: Scheme) -> dict[str, Entry]:
    """The same with one entry for each weight that several tensors hold together; raises `LoadError`."""
    modules: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        stem, _, part = name.rpartition(".")
        modules.setdefault(stem, {})[part] = entry
    found: dict[str, Entry] = {}
    for stem, parts in modules.items():
        weight = scheme.grouped(stem, parts)
        if weight is not None:
            if (beside := parts.get("weight")) is not None:
                raise LoadError(
                    f"{beside.file}: {stem}.weight is there a second time, in codes ({next(iter(weight.parts))})"
                )
            found[f"{stem}.weight"] = weight
        found |= {f"{stem}.{part}" if stem else part: entry for part, entry in parts.items()}
    return found


class _Tensors:
    """The tensors of one module, taken one by one and compared with what they must be."""

    def __init__(self, stem: str, parts: dict[str, TensorEntry]) -> None:
        self.stem = stem
        self.parts = parts
        self.taken: dict[str, TensorEntry] = {}

    def take(self, name: str, dtypes: tuple[str, ...], num_dimensions: int | None = None) -> TensorEntry:
        """A tensor that must be there."""
        entry = self.parts.pop(name, None)
        if entry is None:
            have = ", ".join([*self.taken, *self.parts])
            raise LoadError(f"the weights hold no {self.stem}.{name}, but {have} of it: they are not whole")
        if entry.dtype not in dtypes:
            raise self.wrong(name, entry, f"has dtype {entry.dtype}, not {' or '.join(dtypes)}")
        if num_dimensions is not None and len(entry.shape) != num_dimensions:
            raise self.wrong(name, entry, f"has shape {list(entry.shape)}, not {num_dimensions} dimensions")
        self.taken[name] = entry
        return entry

    def take_shaped(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> TensorEntry:
        """A tensor of a shape that follows from others."""
        entry = self.take(name, dtypes)
        if entry.shape != shape:
            raise self.wrong(name, entry, f"has shape {list(entry.shape)}, not {list(shape)}")
        return entry

    def wrong(self, name: str, entry: TensorEntry, what: str) -> LoadError:
        return LoadError(f"{entry.file}: {self.stem}.{name} {what}")


def _packed(count: int, bits: int) -> int:
    """Words that so many codes take."""
    return -(-count * bits // WORD_BITS)


class Gptq:
    """Codes packed along the input features: `qweight` [K * bits / 32, N], and with them scales and zero points.

    Files of version 1 hold zero points less one, modulo the codes' range; "gptq_v2" holds them as they are.
    """

    name = "gptq"

    def __init__(self, config: ConfigReader) -> None:
        self.bits = _bits(config, "bits")
        self.group_size = _group_size(config)
        self.is_symmetric = config.boolean("sym", False)
        self.may_reorder = config.boolean("desc_act", False)
        version = config.values.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            raise _unsupported(config, "checkpoint_format", "'gptq' and 'gptq_v2'")
        if config.values.get("dynamic"):
            raise _unsupported(config, "dynamic", "the same bits and groups for all products")
        self.layout = version

    def grouped(self, stem: str, parts: dict[str, TensorEntry]) -> GroupedEntry | None:
        """The weight behind `qweight`, if there is one."""
        if "qweight" not in parts:
            return None
        tensors = _Tensors(stem, parts)
        codes = tensors.take("qweight", ("int32",), 2)
        columns, rows = codes.shape[0] * WORD_BITS // self.bits, codes.shape[1]
        size = _groups(self.group_size, columns, codes.file, stem)
        tensors.take_shaped("scales", FLOATS, (columns // size, rows))
        tensors.take_shaped("qzeros", ("int32",), (columns // size, _packed(rows, self.bits)))
        if self.may_reorder or "g_idx" in parts:
            tensors.take_shaped("g_idx", ("int32",), (columns,))
        # A zero point in the middle of 8 bits is 0 in signed codes; in 4 it is said as such.
        zero = None if not self.is_symmetric else 0 if self.bits == 8 else 8
        form = Form(self.bits, size, zero)
        return GroupedEntry(
            f"{stem}.weight", codes.file, f"int{self.bits}", (rows, columns), form, self.layout, tensors.taken
        )


class Awq:
    """Codes packed along the output features, eight to a word in an order of their own: `qweight` [K, N / 8]."""

    name = "awq"

    def __init__(self, config: ConfigReader) -> None:
        bits = config.values.get("bits", config.values.get("w_bit"))
        if bits != 4:
            raise _unsupported(config, "bits", "4")
        version = str(config.values.get("version", "gemm")).lower()
        if version != "gemm":
            raise _unsupported(config, "version", "'gemm'")
        self.group_size = _group_size(config)
        self.has_zeros = config.boolean("zero_point", True)

    def grouped(self, stem: str, parts: dict[str, TensorEntry]) -> GroupedEntry | None:
        """The weight behind `qweight`, if there is one."""
        if "qweight" not in parts:
            return None
        tensors = _Tensors(stem, parts)
        codes = tensors.take("qweight", ("int32",), 2)
        columns, rows = codes.shape[0], codes.shape[1] * 8
        size = _groups(self.group_size, columns, codes.file, stem)
        tensors.take_shaped("scales", FLOATS, (columns // size, rows))
        if self.has_zeros:
            tensors.take_shaped("qzeros", ("int32",), (columns // size, rows // 8))
        else:
            parts.pop("qzeros", None)  # AutoAWQ writes it all the same, and never reads it
        form = Form(4, size, None if self.has_zeros else 8)
        return GroupedEntry(f"{stem}.weight", codes.file, "int4", (rows, columns), form, "awq", tensors.taken)


class CompressedTensors:
    """Codes as int8 [N, K] ("int-quantized"), or packed along the input features into words ("pack-quantized")."""

    name = "compressed-tensors"

    def __init__(self, config: ConfigReader) -> None:
        path = config.path
        for field in ("kv_cache_scheme", "transform_config"):
            if config.values.get(field):
                raise _unsupported(config, field, "none")
        sparsity = config.values.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
            raise _unsupported(config, "sparsity_config", "none, or its format 'dense'")
        groups = config.values.get("config_groups")
        if not isinstance(groups, Mapping) or len(groups) != 1:
            raise LoadError(f"{path}: {SETTING}.config_groups must be one group for all products, not {groups!r:.200}")
        name, group = next(iter(groups.items()))
        where = f"{SETTING}.config_groups.{name}."
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise LoadError(f"{path}: {where}weights must be an object")
        layout = group.get("format") or config.values.get("format")
        if layout not in ("int-quantized", "pack-quantized"):
            raise LoadError(
                f"{path}: {SETTING}.format {layout!r} is not supported, only 'int-quantized' and 'pack-quantized'"
            )
        self.is_packed = layout == "pack-quantized"
        weights = ConfigReader(group["weights"], path, f"{where}weights.")
        if weights.values.get("type", "int") != "int":
            raise _unsupported(weights, "type", "'int'")
        if weights.values.get("dynamic"):
            raise _unsupported(weights, "dynamic", "false")
        if weights.values.get("strategy") not in ("channel", "group", "tensor"):
            raise _unsupported(weights, "strategy", "'channel', 'group' and 'tensor'")
        order = weights.values.get("actorder")
        if not (order is None or order is False or (isinstance(order, str) and order.lower() in ORDERS_KEPT)):
            raise _unsupported(weights, "actorder", "null, false, 'weight' and 'static' (groups of neighbours)")
        self.bits = _bits(weights, "num_bits")
        self.is_symmetric = weights.boolean("symmetric", True)
        self.is_per_tensor = weights.values["strategy"] == "tensor"
        self.group_size = weights.integer("group_size") if weights.values["strategy"] == "group" else None
        for field in ("input_activations", "output_activations"):
            _check_activations(group.get(field), path, f"{where}{field}")

    def grouped(self, stem: str, parts: dict[str, TensorEntry]) -> GroupedEntry | None:
        """The weight behind `weight_packed`, or a `weight` of integers, if there is one."""
        name = "weight_packed" if self.is_packed else "weight"
        if name not in parts or (not self.is_packed and parts[name].dtype != "int8"):
            return None
        tensors = _Tensors(stem, parts)
        codes = tensors.take(name, ("int32",) if self.is_packed else ("int8",), 2)
        rows, columns = codes.shape
        if self.is_packed:
            tensors.take_shaped("weight_shape", ("int64", "int32"), (2,))
            columns = columns * WORD_BITS // self.bits
        size = _groups(self.group_size, columns, codes.file, stem)
        groups = (rows, columns // size)
        if self.is_per_tensor:
            scale = tensors.take("weight_scale", FLOATS)
            if scale.shape not in ((), (1,)):
                raise tensors.wrong("weight_scale", scale, f"has shape {list(scale.shape)}, not one number")
        else:
            tensors.take_shaped("weight_scale", FLOATS, groups)
        if not self.is_symmetric:
            self._take_zeros(tensors, groups)
        zero = None if not self.is_symmetric else 0 if self.bits == 8 else 8
        layout = "packed" if self.is_packed else "integers"
        form = Form(self.bits, size, zero)
        return GroupedEntry(
            f"{stem}.weight", codes.file, f"int{self.bits}", (rows, columns), form, layout, tensors.taken
        )

    def _take_zeros(self, tensors: _Tensors, groups: tuple[int, int]) -> None:
        if self.is_per_tensor:
            zero = tensors.take("weight_zero_point", ("int8",))
            if zero.shape not in ((), (1,)):
                raise tensors.wrong("weight_zero_point", zero, f"has shape {list(zero.shape)}, not one number")
        elif self.is_packed:
            shape = (_packed(groups[0], self.bits), groups[1])
            tensors.take_shaped("weight_zero_point", ("int32",), shape)
        else:
            tensors.take_shaped("weight_zero_point", ("int8",), groups)


def _check_activations(values: Any, path: Path, where: str) -> None:
    """Activations stay as they are, or each token is rounded to INT8 as it comes."""
    if values is None:
        return
    known = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    for field, expected in known.items():
        found = values.get(field) if isinstance(values, Mapping) else values
        if where.endswith("output_activations") or found != expected:
            raise LoadError(
                f"{path}: {where}.{field} {found!r} is not supported, only INT8 for each token of the inputs as it "
                "comes (num_bits 8, strategy 'token', dynamic, symmetric), or null"
            )


SCHEMES: dict[str, type[Gptq] | type[Awq] | type[CompressedTensors]] = {
    scheme.name: scheme for scheme in (Gptq, Awq, CompressedTensors)
}


def _bits(config: ConfigReader, field: str) -> int:
    bits = config.integer(field)
    if bits not in (4, 8):
        raise _unsupported(config, field, "4 and 8")
    return bits


def _group_size(config: ConfigReader) -> int | None:
    """Features that share a scale; None: all of a row, which is written as -1."""
    if config.values.get("group_size", config.values.get("q_group_size")) == -1:
        return None
    return config.integer("group_size" if "group_size" in config.values else "q_group_size")


def _groups(size: int | None, columns: int, file: Path, stem: str) -> int:
    """The group size of a row of `columns`."""
    if not columns:
        raise LoadError(f"{file}: the codes of {stem} are of no features at all")
    if size is None:
        return columns
    if columns % size:
        raise LoadError(f"{file}: groups of {size} features do not divide the {columns} of {stem}")
    return size


def _unsupported(config: ConfigReader, field: str, supported: str) -> LoadError:
    value = config.values.get(field)
    return LoadError(f"{config.path}: {config.prefix}{field} {value!r:.200} is not supported, only {supported}")
