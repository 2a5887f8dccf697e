"""What an engine's answers depend on, as one short text: two that have the same give the same tokens."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec

from novainfer.actors.device.location import ModelLocation
from novainfer.config import EngineConfig
from novainfer.model import ModelInfo

WHOLE_BYTES = 64 << 20  # files of so many bytes are read whole: tokenizers and settings; of larger ones both ends
END_BYTES = 1 << 16


def fingerprint(config: EngineConfig, info: ModelInfo, version: str, *, has_model: bool) -> str:
    """Of the checkpoint, of how it is computed, and of the version that computes it; blocks, it reads files.

    What an engine promises to change nothing is no part of it: the batch, chunks of prompts, the prefix cache,
    preemption, speculation and the process that computes.
    """
    computed = (version, info.vocab_size, info.dtype, info.precision, info.device, info.kv_cache_dtype)
    how = (sorted(info.kernels.items()), info.modes[0], info.num_threads, sorted(info.sampling_defaults.items()))
    digest = blake2b(msgspec.json.encode((computed, how, info.formats)), digest_size=16)
    if has_model:
        for name in (config.model, config.tokenizer):
            if name is not None:
                _add_files(digest, ModelLocation(name).path())
        if config.chat_template is not None:
            _add_files(digest, Path(config.chat_template))
    return digest.hexdigest()


def _add_files(digest: blake2b, path: Path) -> None:
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            if size <= WHOLE_BYTES:
                digest.update(opened.read())
            else:
                digest.update(opened.read(END_BYTES))
                opened.seek(-END_BYTES, 2)
                digest.update(opened.read())
