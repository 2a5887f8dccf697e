"""Where a model lies on disk, found once, off the loop: a hub id may take minutes to fetch."""

from __future__ import annotations

import threading
from pathlib import Path

from novainfer.fsm.errors import ModelLoadError

DEMO_MODEL = "demo"  # the model that ships with NovaInfer


class ModelLocation:
    """What a user calls a model: "demo", a directory, or a hub id. `path` may be asked from any thread."""

    def __init__(self, name: str | Path) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._why_not: str | None = None

    def path(self) -> Path:
        """The model's directory; raises `ModelLoadError` with one sentence when there is none. Looked for once."""
        with self._lock:
            if self._path is None and self._why_not is None:
                try:
                    self._path = self._find()
                except ModelLoadError as error:
                    self._why_not = error.message
            if self._path is None:
                raise ModelLoadError(self._why_not or "", param="model")
            return self._path

    def _find(self) -> Path:
        if self.name == DEMO_MODEL:
            from novainfer.kernels.demo import model_path

            return model_path()
        from novainfer.kernels.errors import LoadError
        from novainfer.kernels.hub import resolve_model

        try:
            return resolve_model(self.name)
        except LoadError as error:
            raise ModelLoadError(str(error), param="model") from error
