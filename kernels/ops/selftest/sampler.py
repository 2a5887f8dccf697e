"""Proves what draws tokens, in each way of sampling."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from novainfer.fsm.messages.step import NO_TOKEN, SeqParams
from novainfer.kernels.masks import Masks, packed_mask
from novainfer.kernels.ops.selftest.numbers import normal
from novainfer.kernels.sampling.sampler import TorchSampler
from novainfer.kernels.sampling.verify import Positions, Sampled

__all__ = ["check_sampler"]

VOCAB_SIZE = 1300  # of the logits that a sampler is proved on


def check_sampler(sampler: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Each way of sampling, three steps of each: apart, as drafts that are right, and a step computed again.

    With masks of some rows, and without any.
    """
    if sampler is TorchSampler:
        return None  # it is what the others are compared with
    prompt = [5, 9, 5, 700]
    ways = [
        SeqParams(slot=0),
        SeqParams(slot=0, logprobs=3),
        SeqParams(slot=0, temperature=1.0),
        SeqParams(slot=0, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, logprobs=0),
        SeqParams(slot=0, temperature=1.0, top_p=0.95),
        SeqParams(slot=0, temperature=1.3, top_k=300, min_p=0.01),
        SeqParams(slot=0, temperature=0.2, presence_penalty=0.5, frequency_penalty=5.0, num_prompt_tokens=2),
        SeqParams(slot=0, min_position=6, stop_token_ids=[17, 40], banned_token_ids=[3], logit_bias={40: 50.0}),
        SeqParams(slot=0, temperature=1.0, allowed_token_ids=list(range(0, VOCAB_SIZE, 3))),
    ]
    rows = [msgspec.structs.replace(row, slot=slot, token_ids=prompt) for slot, row in enumerate(ways)]
    # A row's logits stay, so that penalties decide what is next.
    logits = normal((len(rows), VOCAB_SIZE), 60, dtype, device).repeat_interleave(3, dim=0) * 3
    logits[4 * 3 + 2, 800] = torch.nan
    slots = [row.slot for row in rows for _ in range(3)]
    positions = [len(prompt) + step for _ in rows for step in range(3)]
    every = list(range(len(slots)))
    first, second, third = every[::3], every[1::3], every[2::3]

    def run(
        kernel: Any, *steps: list[int], drafts: list[int] | None = None, masks: dict[int, Any]
    ) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = [(NO_TOKEN, None)] * len(every)
        drawing = kernel.over(VOCAB_SIZE, len(rows), 16, device)
        for row in rows:
            drawing.admit(row)
        for step in steps:
            masked = [number for number, i in enumerate(step) if i in masks]
            own = Masks(masked, np.stack([masks[step[number]] for number in masked])) if masked else None
            at = Positions([slots[i] for i in step], [positions[i] for i in step], drafts or [], own)
            sampled: Sampled = drawing.draw(logits[step], at).read()
            for number, i in enumerate(step):
                found[i] = sampled.token_ids[number], sampled.logprobs[number] if sampled.logprobs else None
        return found

    # Allowed are multiples of odd numbers, so that a mask of another row, or shifted by a word, is another.
    masks = {i: packed_mask(range(i % 3, VOCAB_SIZE, 3 + 2 * (i % 5)), VOCAB_SIZE) for i in (*first, *third)}
    masks[third[1]] = packed_mask([], VOCAB_SIZE)
    wrong = None
    for own, how in (({}, "drawn"), (masks, "masked")):
        expected = run(TorchSampler, first, second, third, masks=own)
        drafts = [NO_TOKEN if i % 3 == 2 else expected[i][0] for i in every]
        for steps, given, more in (
            ((first, second, third), None, ""),
            ((first, second, second, third), None, " again"),
            ((every,), drafts, " behind drafts"),
        ):
            wrong = wrong or _other_draws(run(sampler, *steps, drafts=given, masks=own), expected, how + more)
    return wrong


def _other_draws(got: list[tuple[int, Any]], expected: list[tuple[int, Any]], how: str) -> str | None:
    for i, ((token_id, logprobs), (right, right_logprobs)) in enumerate(zip(got, expected, strict=True)):
        what = f"step {i % 3} of way {i // 3} of sampling, {how},"
        if token_id != right:
            return f"{what} gives token {token_id} in the place of {right}"
        if (logprobs is None) != (right_logprobs is None):
            return f"{what} gives log probabilities where there are none, or none where there are"
        if logprobs is not None:
            if logprobs[1] != right_logprobs[1]:
                return f"{what} finds other tokens most likely"
            values, right_values = ([own[0], *own[2]] for own in (logprobs, right_logprobs))
            if not torch.allclose(torch.tensor(values), torch.tensor(right_values), rtol=0, atol=1e-4):
                return f"{what} gives other log probabilities"
    return None
