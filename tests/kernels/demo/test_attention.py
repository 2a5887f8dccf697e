"""What training computes block by block is the attention of transformers, gradients included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from novainfer.kernels.demo import draft_path
from tools.demo import attention
from tools.demo.batches import Batch
from tools.demo.train import loss_of_replies


def _loss_and_gradient(model: Any, batch: Batch, *, autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    loss = loss_of_replies(model, batch, autocast=autocast)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


def _models(folder: Path) -> tuple[Any, Any]:
    plain, blocks = (Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    attention.use_blocks(blocks)
    return plain, blocks


@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-5), (True, 0.06)])
def test_a_step_of_training_is_the_same_in_blocks_of_queries(autocast: bool, tolerance: float) -> None:
    plain, blocks = _models(draft_path())
    torch.manual_seed(1)
    for length in (5, 128, 300):  # less than a block, one, and two and a part
        ids = torch.randint(0, 1000, (2, length))
        places = torch.tensor([0, 3, length - 2, length, 2 * length - 2])
        batch = Batch(ids, ids.flatten()[places + 1], places)
        (loss, gradient), (wanted_loss, wanted) = (
            _loss_and_gradient(model, batch, autocast=autocast) for model in (blocks, plain)
        )
        assert loss == pytest.approx(wanted_loss.item(), rel=tolerance)
        assert (gradient - wanted).norm() <= tolerance * wanted.norm()


def test_a_mask_is_refused() -> None:
    _, blocks = _models(draft_path())
    with pytest.raises(ValueError, match="padded on the right"):
        blocks.model(input_ids=torch.zeros((1, 4), dtype=torch.int64), attention_mask=torch.ones(1, 1, 4, 4))
