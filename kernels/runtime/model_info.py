"""What a loaded model is, for those who plan its steps and for people."""

from __future__ import annotations

from dataclasses import dataclass

from novainfer.fsm.messages.mode import Mode
from novainfer.kernels.weights.sharing import Weights

__all__ = ["ModelInfo"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Sizes, precision, and what computes it: all that stays as it was loaded."""

    architecture: str
    dtype: str  # "float32", "bfloat16", "float16"
    precision: str  # of the weights of products, and what they were quantised by: "bfloat16", "int8", "int4 (gptq)"
    device: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int  # tokens
    block_size: int  # tokens
    eos_token_ids: tuple[int, ...]  # config.json and generation_config.json together
    kv_bytes_per_block: int
    weight_bytes: int
    num_parameters: int
    kernels: dict[str, str]  # operation -> names of the implementations in use
    failed_kernels: dict[str, str]  # operation and name -> why its self-test failed; others compute in their place
    row_invariant: bool
    modes: tuple[Mode, ...]  # what `switch` can be asked for, best first (kernels/runtime/modes.py)
    weights: Weights  # in this process's own memory, or shared: packed by this process, or mapped as found
