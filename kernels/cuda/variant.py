"""One way in which a Triton function is compiled: what is launched and what `novainfer bench cuda-compile` reports on.

A module of `kernels/cuda` that launches functions chooses their constants in one place, and lists with
`variants(capability)` what it would launch for the models and settings that people use, made by that same place: so
the report is about the code that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Config", "Variant"]


@dataclass(frozen=True, slots=True)
class Config:
    """How a function is launched: its compile-time constants, and the shape of its programs."""

    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    arguments: Mapping[str, Any] = field(init=False, repr=False, compare=False)  # keywords of a launch

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", {**self.constants, **self.options})

    @property
    def options(self) -> dict[str, Any]:
        """Those that are the compiler's."""
        # Said, because Triton means to change its default: products and sums are contracted, as nvcc does it.
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class Variant:
    """A function with the types of its arguments and one configuration."""

    name: str  # for people: the function and what is special here ("decode bf16 d128 g6")
    function: Any  # what `@triton.jit` gives
    signature: Mapping[str, str]  # of each argument that is no constant, in their order: "*bf16", "i32", "fp32"
    config: Config
    aligned: frozenset[str] = field(default_factory=frozenset)  # integers that are multiples of 16; pointers are
    needs_mma: bool = False  # it must reach the tensor cores
    needs_own_mma: bool = False  # by the instructions of its generation: sm_90's are twice as fast as those before
    registers_max: int = 255  # a thread may use so many
    shared_bytes_max: int = 227 * 1024  # a block may use so much (sm_90: 227 KiB)
