"""Whether the prompts of one request could ever wait in the queue together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from novainfer.actors.admission import estimate_tokens
from novainfer.actors.device.wire import UNENCODABLE
from novainfer.config import EngineConfig
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import Chat
from novainfer.fsm.messages.params import SamplingParams
from novainfer.prompt import PromptLike


def check_room(config: EngineConfig, prompts: Sequence[PromptLike], params: SamplingParams) -> list[int]:
    """Raise `InvalidParameter`, naming `prompt` or `n`, when the queue is too small for them even while it is empty.

    All of them ask for admission at once. One alone is always let in. Returns about how many tokens each has.
    """
    num_tokens = [_num_tokens(prompt) for prompt in prompts]
    if len(prompts) < 2:
        return num_tokens
    waits = params.max_queue_s is not None
    most = config.max_num_queued_reqs + (config.max_num_overflow_reqs if waits else 0)
    total = len(prompts) * params.n
    if total > most:
        what = f"{len(prompts)} prompts" + (f" with n={params.n} are {total} requests" if params.n > 1 else "")
        param = "prompt" if params.n == 1 or len(prompts) > most else "n"
        fits = f"send at most {max(most // params.n, 1)} prompts at once"
        raise InvalidParameter(f"{param}: {what}, and the queue holds {most} requests: {fits}", param=param)
    most = config.max_num_queued_tokens * (2 if waits else 1)  # as many on the overflow list
    if (total := sum(num_tokens)) > most:
        what = f"prompt: these have some {total} tokens, and the queue holds {most} tokens"
        raise InvalidParameter(f"{what}: send fewer prompts at once", param="prompt")
    return num_tokens


def _num_tokens(prompt: PromptLike) -> int:
    """About how many tokens a prompt has, whatever form it is in; what is no prompt is refused later."""
    found: Any = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, dict) else prompt
    if isinstance(found, str | Chat):
        with suppress(*UNENCODABLE):
            return estimate_tokens(found)
        return 0
    return len(found) if isinstance(found, list) else 0
