"""From what a user calls a model to a folder or a GGUF file on disk: a path, or an id of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.gguf import GGUF, is_gguf

__all__ = ["is_hub_id", "resolve_model"]

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
SHOWN_MAX = 300  # letters of a name in an error
FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]  # weights, configs, tokenizer, chat template


def is_hub_id(name: str | Path) -> bool:
    """Whether `name` is no folder here and has the form of a hub id."""
    if isinstance(name, Path) or os.path.exists(os.path.expanduser(name)):
        return False
    return HUB_ID.fullmatch(name) is not None and not name.startswith((".", "~"))


def resolve_model(name: str | Path, what: str = "model") -> Path:
    """The folder of a model, or its GGUF file; an id such as "Qwen/Qwen2.5-0.5B-Instruct" is fetched, once.

    `what` is what errors call it: "tokenizer", or some words for a model.

    Raises `LoadError` with one sentence when there is no such folder and the hub does not give one.
    """
    # Not Path's own: they raise for a name that no file can have, and for a home that is not there.
    path = Path(os.path.expanduser(name))
    called = f"{what} {name!s:.{SHOWN_MAX}}"
    if os.path.isdir(path) or is_gguf(path):
        return path
    if os.path.exists(path):
        file = "tokenizer.json" if what == "tokenizer" else "config.json"
        raise LoadError(f"{called} is a file; the folder that holds {file} is needed, or a {GGUF} file")
    if path.suffix == GGUF:
        raise LoadError(f"{called} is not there")
    if not is_hub_id(name):
        raise LoadError(f"{called} is neither a folder here nor a hub id of the form organisation/name")
    # Imported here: time that a local folder need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(str(name), allow_patterns=FILES))
    except GatedRepoError:
        reason = "access to it must be asked for at huggingface.co, and HF_TOKEN set"
    except RepositoryNotFoundError:
        reason = "the Hugging Face hub has no such repository, or HF_TOKEN does not open it"
    except LocalEntryNotFoundError:
        reason = "it is not in the local cache, and the Hugging Face hub cannot be reached"
    except Exception as error:  # the hub client lets its HTTP library's and the system's errors through
        text = " ".join(str(error).split())[:300] or type(error).__name__
        reason = f"the Hugging Face hub did not give it ({text})"
    raise LoadError(f"{called} is not a folder here, and {reason}")
