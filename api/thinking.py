"""What thinks before it answers: how long, and what is held to a grammar behind it."""

from __future__ import annotations

import msgspec

from novainfer.fsm.messages.errors import UnsupportedParameter
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.structured import Thoughts
from novainfer.fsm.parsing.formats import CLOSE_THINK, OPEN_THINK, THINK, Formats

SPELLED = "this model's thoughts end with text, and not with a token of its own, so they cannot be bounded"


def with_thoughts(params: SamplingParams, formats: Formats, *, is_chat: bool) -> SamplingParams:
    """`params`, knowing what closes the thoughts of a model that has any, where something depends on it.

    A budget bounds thoughts behind any prompt; a grammar begins behind them in the answer to a chat. Raises
    `UnsupportedParameter` where a budget cannot be kept to.
    """
    budget = params.thinking_token_budget
    is_needed = budget is not None or (params.structured_outputs is not None and is_chat)
    if not is_needed or params.thoughts is not None or formats.reasoning != THINK:
        return params
    close_id = formats.marker_ids.get(CLOSE_THINK)
    if close_id is None:
        if budget is not None:
            raise UnsupportedParameter(f"thinking_token_budget: {SPELLED}", param="thinking_token_budget")
        return params
    open_id = formats.marker_ids.get(OPEN_THINK)
    return msgspec.structs.replace(params, thoughts=Thoughts(open_id=open_id, close_id=close_id, budget=budget))
