"""The speculative configuration: vLLM's spelling and defaults, and errors that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.schedule.speculative_config import SpeculativeConfig


@pytest.mark.parametrize(
    ("given", "method", "bounds"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3}, "ngram", (5, 5)),
        ('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}', "ngram", (4, 4)),
        ({"num_speculative_tokens": 3, "prompt_lookup_min": 2}, "ngram", (2, 2)),
        ({"num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}, "ngram", (2, 4)),
        ({"model": "[ngram]", "num_speculative_tokens": 3}, "ngram", (5, 5)),
        ('{"model": "/some/folder", "num_speculative_tokens": 3}', "draft_model", (None, None)),
    ],
)
def test_what_is_left_out_is_as_in_vllm(given: Any, method: str, bounds: tuple[int | None, int | None]) -> None:
    found = SpeculativeConfig.of(given)
    assert found.method == method
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == bounds
    assert SpeculativeConfig.of(found) is found


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "ngram"}, "missing required field `num_speculative_tokens`"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be between 1 and 64, not 0"),
        ({"num_speculative_tokens": "3"}, r"Expected `int`, got `str` - at `\$.num_speculative_tokens`"),
        ({"num_speculative_tokens": 3, "method": "eagle"}, "method must be 'ngram' or 'draft_model', not 'eagle'"),
        ({"num_speculative_tokens": 3, "k": 1}, "unknown field `k`"),
        ({"num_speculative_tokens": 3, "method": "draft_model"}, "needs a model"),
        ({"num_speculative_tokens": 3, "method": "ngram", "model": "x"}, "takes no model, not 'x'"),
        ({"num_speculative_tokens": 3, "model": "x", "prompt_lookup_max": 3}, 'belong to method "ngram"'),
        ({"num_speculative_tokens": 3, "prompt_lookup_max": 0}, "prompt_lookup_max must be between 1 and 32, not 0"),
        ({"num_speculative_tokens": 3, "prompt_lookup_min": -1}, "prompt_lookup_m.. must be between 1 and 32, not -1"),
        (
            {"num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"prompt_lookup_min \(4\) must be at most prompt_lookup_max \(3\)",
        ),
        ("ngram", "it must be a JSON object"),
        ("[1]", "Expected `object`, got `array`"),
        (7, "Expected `object`, got `int`"),
    ],
)
def test_what_is_wrong_is_said(given: Any, sentence: str) -> None:
    with pytest.raises(InvalidParameter, match=sentence) as caught:
        SpeculativeConfig.of(given)
    assert caught.value.param == "speculative_config"
    assert caught.value.message.startswith("speculative_config: ")
