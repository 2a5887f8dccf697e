"""How a model wants its vectors made: `modules.json` and what it names (sentence-transformers), or a GGUF's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from novainfer.fsm.messages.errors import ModelLoadError
from novainfer.fsm.messages.pooling import ModelPooling, PoolingKind
from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.folder import read_value
from novainfer.kernels.models.gguf import is_gguf, read_gguf

MODULES = "modules.json"
MODES: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean"}  # its words, and ours
# In older files each way has a switch of its own; those of `MODES`:
SWITCHES = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
BEFORE_MODES = "pooling_mode_"  # what the names of all switches begin with
GGUF_KINDS: dict[int, PoolingKind] = {1: "mean", 3: "last"}  # llama.cpp's numbers; 0 is none


def pooling_defaults(folder: Path) -> ModelPooling:
    """What the folder says; of one that says nothing, the last token, normalised, as it is with decoders.

    Raises `ModelLoadError` for files that cannot be read. What they ask for and we do not compute is no error of a
    model that also writes: `refusal` says it to those who ask for a vector.
    """
    if is_gguf(folder):
        return _of_gguf(folder)
    path = folder / MODULES
    if not path.is_file():
        return ModelPooling()
    kind, normalize, refusal = None, False, ""
    for module in _read(path, list):
        name = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if name == "Pooling":
            config = folder / str(module.get("path", "")) / "config.json"
            modes = _modes(_read(config, dict))
            kind = MODES.get(modes[0]) if len(modes) == 1 else None
            if kind is None:
                what = " and ".join(modes) or "no way"
                refusal = f"{config} pools by {what}, and this server by {' or '.join(MODES)} only"
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            refusal = f"{path} names a module of type {name or 'none'!r}, which this server does not compute"
    return ModelPooling(kind=kind or "last", normalize=normalize, refusal=refusal)


def _of_gguf(path: Path) -> ModelPooling:
    try:
        values = read_gguf(path).values
    except LoadError as error:
        raise ModelLoadError(str(error), param="model") from None
    key = f"{values.get('general.architecture')}.pooling_type"
    wanted = values.get(key, 0)
    if not wanted:
        return ModelPooling()
    if (kind := GGUF_KINDS.get(wanted)) is None:
        known = " or ".join(f"{number} ({kind})" for number, kind in GGUF_KINDS.items())
        return ModelPooling(refusal=f"{path}: {key} is {wanted!r:.100}, and this server pools by {known} only")
    return ModelPooling(kind=kind)


def _modes(config: dict[str, Any]) -> list[str]:
    """Its ways of pooling, in its own words."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return [str(one) for one in mode] if isinstance(mode, list) else str(mode).split("+")
    on = [name for name, value in config.items() if name.startswith(BEFORE_MODES) and value is True]
    return [SWITCHES.get(name, name.removeprefix(BEFORE_MODES)) for name in on]


def _read(path: Path, kind: type) -> Any:
    try:
        value = read_value(path)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}", param="model") from None
    if not isinstance(value, kind):
        what = "list" if kind is list else "object"
        raise ModelLoadError(f"{path} must hold a JSON {what}", param="model")
    return value
