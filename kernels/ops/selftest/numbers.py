"""What self-tests have in common: numbers to compute with, how near is near enough, and a step of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from novainfer.kernels.step import StepTensors

__all__ = ["EPS", "ROWS", "deviation", "differs", "make_step", "normal"]

TOLERANCE: dict[torch.dtype, float] = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
ROWS = (1, 2, 7, 33)
EPS = 1e-6


def deviation(got: Tensor, expected: Tensor, factor: float = 1) -> str | None:
    """How far the numbers lie from those expected, if that is more than rounding (`factor` times as much)."""
    scale = expected.float().abs().max().clamp_min(1e-30)
    error = ((got.float() - expected.float()).abs().max() / scale).item()
    if error <= factor * TOLERANCE.get(expected.dtype, 1e-9):  # nan is not
        return None
    return f"off by {error:.1e} of the largest value"


def differs(what: str, got: Tensor, expected: Tensor, factor: float = 1) -> str | None:
    """`deviation` in a phrase about `what`."""
    wrong = deviation(got, expected, factor)
    return None if wrong is None else f"{what} is {wrong}"


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normally distributed numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def make_step(
    query_lens: list[int],
    contexts: list[int],
    tables: Tensor,
    block_size: int,
    sampled: list[int] | None,
    device: torch.device,
) -> StepTensors:
    """A step of sequences whose last `query_lens` tokens are computed; `sampled` as `StepTensors.logit_rows`."""
    of_seq = [torch.arange(end - new, end) for new, end in zip(query_lens, contexts, strict=True)]
    slots = [
        table[at // block_size].long() * block_size + at % block_size for table, at in zip(tables, of_seq, strict=True)
    ]
    positions = torch.cat(of_seq).to(device)
    return StepTensors(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=torch.cat(slots).to(device),
        block_tables=tables.to(device),
        query_start=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        logit_rows=None if sampled is None else torch.tensor(sampled, dtype=torch.int64, device=device),
        num_samples=sum(query_lens) if sampled is None else len(sampled),
        max_context_len=max(contexts),
        min_query_len=min(query_lens),
        max_query_len=max(query_lens),
    )
