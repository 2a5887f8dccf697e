"""Where a model or a tokenizer lies on disk, found once, off the loop: a hub id may take minutes to fetch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

from novainfer.fsm.messages.errors import ModelLoadError
from novainfer.fsm.schedule.speculative_config import PARAM

DEMO_MODEL = "demo"  # the model that ships with NovaInfer
DEMO_DRAFT = "demo-draft"  # and the one that drafts for it
SHIPPED = (DEMO_MODEL, DEMO_DRAFT)
VOCABULARY_FILES = ("tokenizer.json", "vocab.json")


class ModelSizes(NamedTuple):
    """Of a model: ids of its vocabulary, and the tokens of the longest context that it was made for."""

    vocab_size: int
    max_model_len: int


class ModelLocation:
    """What a user calls a model: "demo", "demo-draft", a directory, or a hub id. `path` may be asked from any thread.

    `setting` is what errors blame: "model", "tokenizer", or "speculative_config" for the model that drafts.
    """

    def __init__(self, name: str | Path, setting: str = "model") -> None:
        self.name = name
        self._setting = setting
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._why_not: str | None = None

    def path(self) -> Path:
        """The directory; raises `ModelLoadError` with one sentence when there is none. Looked for once."""
        with self._lock:
            if self._path is None and self._why_not is None:
                try:
                    self._path = self._find()
                except ModelLoadError as error:
                    self._why_not = error.message
            if self._path is None:
                raise ModelLoadError(self._why_not or "", param=self._setting)
            return self._path

    def check(self) -> None:
        """Raise `ModelLoadError` when a file is missing, or a header of weights damaged, before anything is started.

        A hub id is left to `path`, which may have to fetch it.
        """
        from novainfer.kernels.errors import LoadError
        from novainfer.kernels.weights.header import check_weights
        from novainfer.kernels.weights.hub import is_hub_id

        if self.name in SHIPPED or is_hub_id(self.name):
            return
        path = self.path()
        if self._setting == "tokenizer":
            check_vocabulary(path)
            return
        try:
            check_weights(path)
        except LoadError as error:
            said = f"{PARAM}: {error}" if self._setting == PARAM else str(error)
            raise ModelLoadError(said, param=self._setting) from None

    def sizes(self) -> ModelSizes:
        """What its own files say, without its weights; raises `ModelLoadError`."""
        from novainfer.kernels.errors import LoadError
        from novainfer.kernels.models.registry import read_config

        try:
            config = read_config(self.path())
        except LoadError as error:
            raise ModelLoadError(str(error), param=self._setting) from None
        return ModelSizes(config.vocab_size, config.max_position_embeddings)

    def _find(self) -> Path:
        if self.name in SHIPPED:
            from novainfer.kernels.demo import draft_path, model_path

            return model_path() if self.name == DEMO_MODEL else draft_path()
        from novainfer.kernels.errors import LoadError
        from novainfer.kernels.weights.hub import resolve_model

        try:
            return resolve_model(self.name, f"{PARAM}: the draft model" if self._setting == PARAM else self._setting)
        except LoadError as error:
            raise ModelLoadError(str(error), param=self._setting) from error


def check_vocabulary(path: Path) -> None:
    """Raise `ModelLoadError` when this folder holds no tokenizer; transformers would make an empty one of it."""
    if path.is_dir() and not any((path / name).exists() for name in VOCABULARY_FILES):
        names = " nor ".join(VOCABULARY_FILES)
        raise ModelLoadError(f"there is no tokenizer in {path}: neither {names}", param="tokenizer")
