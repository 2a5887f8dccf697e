"""What names a device so that another process can make it: the model's settings, or a factory that a test brings.

A spec comes from the code that builds the engine, never from the network.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import msgspec

from novainfer.actors.device.device import Device, ModelDevice, ModelSettings

Progress = Callable[[int, int], None]


class ModelSpec(msgspec.Struct, frozen=True, tag="model"):
    """The device that runs a model."""

    settings: ModelSettings

    def prepare(self) -> None:
        """Find the models' folders, once for all processes: a hub may be asked for them, which takes its time."""
        self.settings.location.path()
        if self.settings.draft is not None:
            self.settings.draft.path()

    def make(self, on_progress: Progress | None = None, weights_fd: int | None = None) -> Device:
        """A new device; `weights_fd` is a memfd in which processes share their packed weights."""
        return ModelDevice(self.settings, on_progress, weights_fd)

    def without_graphs(self) -> ModelSpec:
        """The same device, which captures no CUDA graphs."""
        return ModelSpec(msgspec.structs.replace(self.settings, enforce_eager=True))


class FactorySpec(msgspec.Struct, frozen=True, tag="factory"):
    """A device for tests: what the function "module:name" returns for `arguments`, which must be plain data."""

    target: str
    arguments: dict[str, Any] = {}

    def prepare(self) -> None:
        """Nothing to find."""

    def make(self, on_progress: Progress | None = None, weights_fd: int | None = None) -> Device:
        """A new device."""
        module, _, name = self.target.partition(":")
        return cast(Device, getattr(import_module(module), name)(**self.arguments))

    def without_graphs(self) -> FactorySpec:
        """The same, which is told so."""
        return FactorySpec(self.target, {**self.arguments, "graphs": False})


DeviceSpec = ModelSpec | FactorySpec
