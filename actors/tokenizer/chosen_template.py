"""A chat template that the operator has chosen, to be used in the place of the model's."""

from __future__ import annotations

from pathlib import Path

from novainfer.fsm.messages.errors import ModelLoadError

TEMPLATE_BYTES_MAX = 1 << 20  # the longest that come with models have some 20 kB


def read_template(path: str | Path) -> str:
    """The template in this file; raises `ModelLoadError` with one sentence where it is none."""
    from jinja2 import TemplateError

    from novainfer.actors.tokenizer.template import ChatTemplate

    try:
        with Path(path).open("rb") as file:
            data = file.read(TEMPLATE_BYTES_MAX + 1)
        if len(data) > TEMPLATE_BYTES_MAX:
            raise ModelLoadError(
                f"chat_template {path} has more than {TEMPLATE_BYTES_MAX} bytes: it is no template of chats",
                param="chat_template",
            )
        text = data.decode("utf-8")
        ChatTemplate({}).compile(text)
    except (OSError, UnicodeDecodeError, TemplateError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())[:300]
        raise ModelLoadError(f"chat_template {path} cannot be used: {reason}", param="chat_template") from None
    return text
