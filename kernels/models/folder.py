"""What a model's folder must hold, looked at without torch: before a process is started that imports it."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.gguf import GGUF, is_gguf, read_gguf

__all__ = ["read_json", "read_value", "weight_files"]

LISTED_MAX = 5  # names spelled out in an error; the rest is counted
LEVELS_MAX = 64  # that JSON is nested: a config has some five


def read_value(path: Path) -> Any:
    """What a file of JSON holds; raises `OSError`, or `ValueError` for what is none, or too deep to be written out."""
    text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text)
        is_deep = _is_deep(value)
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"it is nested more than {LEVELS_MAX} levels deep")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(LEVELS_MAX):
        outer = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [*itertools.chain.from_iterable(outer)]
    return any(isinstance(one, dict | list) for one in level)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `LoadError` naming the file when there is none."""
    try:
        value = read_value(path)
    except FileNotFoundError:
        files = sorted(file.name for file in path.parent.glob(f"*{GGUF}"))
        hint = f" ({files[0]} is a model of its own: give its path)" if files else ""
        raise LoadError(f"{path.parent} holds no {path.name}, so it is not a Hugging Face model folder{hint}") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # covers JSONDecodeError and UnicodeDecodeError
        raise LoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model, all of which are there; raises `LoadError` when some are missing.

    A GGUF file is the only one of its model, or the first of its parts.
    """
    if is_gguf(model_dir):
        return [*read_gguf(model_dir).files]
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise LoadError(f'{index} must hold a "weight_map" from tensor names to files')
        if not all(isinstance(name, str) and name.isprintable() for name in weight_map.values()):
            raise LoadError(f'{index} must hold a "weight_map" from tensor names to files')
        names = sorted(set(weight_map.values()))
        if any(not name or Path(name).name != name for name in names):
            raise LoadError(f"{index} must name files of its own folder only")
        # Not Path's own: it raises for a name that is too long for any file.
        missing = [name for name in names if not os.path.isfile(model_dir / name)]
        if missing:
            listed = ", ".join(f"{name:.100}" for name in missing[:LISTED_MAX])
            raise LoadError(
                f"{model_dir} lacks {len(missing)} of {len(names)} shards that {index.name} names: {listed}"
            )
        return [model_dir / name for name in names]
    single = model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    other = sorted(path.name for path in model_dir.glob("*.bin"))
    hint = f" ({other[0]} is a pickle file: convert it to safetensors)" if other else ""
    raise LoadError(f"{model_dir} holds no model.safetensors and no model.safetensors.index.json{hint}")
