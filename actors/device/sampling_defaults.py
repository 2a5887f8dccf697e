"""How a model's own folder wants it to be sampled: `generation_config.json`, for requests that say nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from novainfer.fsm.messages.errors import InvalidParameter, ModelLoadError
from novainfer.fsm.messages.params import SamplingParams
from novainfer.kernels.models.folder import read_value

FILE = "generation_config.json"
# What vLLM takes from it too. `do_sample` is not among them: a temperature says what it would.
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Those of `FIELDS` that the folder's file sets; raises `ModelLoadError` for values that no request could have."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        values = read_value(path)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}", param="generation_config") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must hold a JSON object", param="generation_config")
    found = {name: values[name] for name in FIELDS if values.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidParameter as error:
        how = 'mend it, or set generation_config to "none"'
        raise ModelLoadError(f"{path}: {error.message}; {how}", param="generation_config") from None
    return found
