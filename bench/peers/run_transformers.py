"""transformers' `generate` as a system under test: `python -m … MODEL_DIR`.

At its best on a CPU: the checkpoint's own dtype, scaled-dot-product attention, one padded batch, inference mode.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # it loses most to spinning threads when the machine is shared

import sys
import time
from typing import Any

from .child import Memory, Timeline, resident, serve


class Transformers:
    """A model and `generate`; greedy, EOS ignored."""

    name = "transformers"

    def __init__(self, model: str) -> None:
        import transformers

        self.version: str = transformers.__version__
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", attn_implementation="sdpa"
        ).eval()
        # No end-of-sequence token: every request makes all its tokens.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.facts: dict[str, Any] = {"dtype": str(self._model.dtype).removeprefix("torch.")}
        self._weight_bytes = sum(p.nbytes for p in self._model.parameters())

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Timeline]:
        """One batch, padded on the left to the longest."""
        import torch
        from transformers import StoppingCriteriaList

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        times_s: list[float] = []
        started = time.perf_counter()

        def note(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times_s.append(time.perf_counter() - started)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([note]),
            )
        made = out.shape[1] - longest
        assert made == max_tokens == len(times_s), f"{made} tokens were made, {len(times_s)} were seen"
        ones = [1] * made
        return [Timeline(num_prompt_tokens=len(p), times_s=list(times_s), counts=ones) for p in prompts]

    def memory(self) -> Memory:
        """Resident bytes; the cache of `generate` lives within a call only."""
        memory = resident()
        memory.weight_bytes = self._weight_bytes
        return memory


def main() -> None:
    """Imports first, and then the clock of the load."""
    started = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM, "transformers imports its parts when they are asked for"
    import_s = time.perf_counter() - started
    torch.set_grad_enabled(False)
    serve(lambda: Transformers(sys.argv[1]), import_s=import_s)


if __name__ == "__main__":
    main()
