"""Writes docs/reference.md: every field of SamplingParams, EngineConfig and ServerSettings.

python docs/reference.py            # write it
python docs/reference.py --check    # exit code 1 when it is out of date

Types and defaults are those of the records, flags and their sentences those of `novainfer serve`. What a field may hold
is what the record itself says when it is given something else.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from novainfer import EngineConfig, InvalidParameter, SamplingParams
from novainfer.server.settings import LogSettings, ServerSettings
from novainfer.setting import Setting, schema_of, settings_of

PAGE = Path(__file__).resolve().parent / "reference.md"
SCHEMA = PAGE.with_name("config.schema.json")
WRONG: tuple[Any, ...] = (
    -1e30,
    1e30,
    -(10**30),
    2**62,
    10**30,
    [-1],
    ["x"] * 1000,
    {1: 1e9},
    "",
    "nonsense",
    -1.0,
    object(),
)

SAMPLING = {
    "n": "Answers to the prompt.",
    "temperature": "Logits are divided by it; below 1e-5 the likeliest token is taken always.",
    "top_p": "Draw from the likeliest tokens that have this probability together; 1 is off.",
    "top_k": "Draw from so many of the likeliest tokens; 0 or -1 is off.",
    "min_p": "Leave out tokens below this share of the likeliest one's probability; 0 is off.",
    "repetition_penalty": "Logits of tokens in prompt and answer are divided by it (multiplied, below 0); 1 is off.",
    "presence_penalty": "Taken from the logit of each token that the answer holds.",
    "frequency_penalty": "Taken from a token's logit as often as the answer holds it.",
    "seed": "The same seed gives the same tokens; choice i has seed + i; None draws one below 2**53 and returns it.",
    "max_tokens": "Longest answer in tokens; None: as many as the context holds.",
    "min_tokens": "The answer does not end before so many tokens.",
    "stop": "Strings of at most 256 characters that end the answer; it does not hold them.",
    "stop_token_ids": "Tokens that end the answer; at most 262,144, as in every list of ids.",
    "include_stop_str_in_output": "Keep the string that ended the answer.",
    "ignore_eos": "Go on after the end of the sequence.",
    "logprobs": "Return each token's log probability, and those of so many of the likeliest; None: neither.",
    "prompt_logprobs": "The same of each token of the prompt, behind those before it.",
    "logit_bias": "Added to the logits of these token ids; at most 1,024.",
    "allowed_token_ids": "No other token is drawn.",
    "banned_token_ids": "These tokens are not drawn.",
    "mark_token_ids": "`Delta.marks` tells where these tokens stand in the text.",
    "banned_sequences": "A token that would complete one of these lists of token ids is not drawn.",
    "bad_words": "Words that are not written, as the tokenizer would write them.",
    "skip_special_tokens": "Leave control tokens out of the text.",
    "truncate_prompt_tokens": "Keep so many tokens of a longer prompt, its last ones; -1: as many as have room.",
    "timeout_s": "Deadline in seconds for the whole request, its time in the queue included.",
    "priority": "What waits runs by it, the lower number first, where scheduling_policy is priority.",
    "cache_salt": "Prefixes are found in the prefix cache by requests with the same salt only.",
    "session_id": "The conversation: what its requests have computed is kept between them, where sessions are.",
    "max_queue_s": "Seconds that the request waits for room in a full queue; None: it is refused at once.",
    "pooling": "How the prompt becomes a vector, in the place of an answer: see `Engine.embed`.",
    "structured_outputs": "What the answer is held to: a JSON schema, a regular expression, choices, a grammar, tags.",
    "thinking_token_budget": "Tokens after which a model's thoughts are closed, and its answer follows.",
    "thoughts": "What opens and closes thoughts, where something depends on it: the engine says so itself.",
}
# Other fields that a value needs to be tried alone.
NEEDED: dict[str, dict[str, Any]] = {
    "num_kv_blocks": {"kv_cache_capacity_mode": "fixed"},
    "min_tokens": {"max_tokens": None},
}


def page() -> str:
    """The page as the code has it now."""
    return "\n".join(
        [
            "# Reference",
            "",
            "Every field of the two records that a program hands over. A value that cannot be used raises",
            "`InvalidParameter`, which names the field. `make docs` writes this page from the code.",
            "",
            "## SamplingParams",
            "",
            "How the tokens of a request are chosen, and where it ends. The HTTP API has the same names in its bodies",
            "([what differs](server.md#fields)).",
            "",
            "| field | type | default | may be | what it does |",
            "| --- | --- | --- | --- | --- |",
            *(_row(SamplingParams, field, SAMPLING[field.name]) for field in msgspec.structs.fields(SamplingParams)),
            "",
            "## EngineConfig",
            "",
            "How an engine is built: a keyword of `EngineConfig` and `LLM`, a flag of `novainfer serve`, `chat` and",
            "`generate`.",
            "",
            "| field | type | default | may be | what it does |",
            "| --- | --- | --- | --- | --- |",
            *(
                _row(EngineConfig, field, _engine(setting))
                for field, setting in zip(msgspec.structs.fields(EngineConfig), settings_of(EngineConfig), strict=True)
            ),
            "",
            "## ServerSettings",
            "",
            "What `novainfer serve` has beside those of its engine. Each flag, of these and of the engine's, is a line",
            "of the file for `--config` (`max-num-seqs: 64`; its schema is [config.schema.json](config.schema.json))",
            "and an environment variable (`NOVAINFER_MAX_NUM_SEQS`), too: [which goes first](server.md#settings).",
            "",
            "| flag | type | default | may be | what it does |",
            "| --- | --- | --- | --- | --- |",
            *(
                _row(record, field, _sentence(setting), name=setting.flag)
                for record in (ServerSettings, LogSettings)
                for field, setting in zip(msgspec.structs.fields(record), settings_of(record), strict=True)
                if setting.flag
            ),
            "",
        ]
    )


def _row(record: Any, field: Any, meaning: str, *, name: str = "") -> str:
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    cells = [
        f"`{name or field.name}`",
        f"`{_type(get_type_hints(record)[field.name])}`",
        f"`{default!r}`",
        _bounds(record, field.name),
        meaning,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(kind: Any) -> str:
    if get_origin(kind) is not None and str(get_origin(kind)) == "typing.Literal":
        return " | ".join(map(repr, get_args(kind)))
    if type(None) in get_args(kind):
        return " | ".join([*(_type(one) for one in get_args(kind) if one is not type(None)), "None"])
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return text.replace("typing.", "").replace("pathlib.", "").replace("NoneType", "None")


def _bounds(record: Any, name: str) -> str:
    """What the record demands of the field, in its own words; of one that may be an object, what that has."""
    kinds = get_args(get_type_hints(record)[name])
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return (
                f"an object with {', '.join(f'`{field.name}`' for field in msgspec.structs.fields(kind))}; or as JSON"
            )
    said: list[str] = []
    for wrong in WRONG:
        try:
            record(**{**NEEDED.get(name, {}), name: wrong})
        except InvalidParameter as error:
            what = error.message.rpartition(", not ")[0] or error.message
            what = what.partition(", and ")[0].removeprefix(f"{name} must be ").removeprefix(f"{name} ")
            what = re.sub(rf"^{name}\[.*?\] must be", "each", what)
            is_type = error.message.startswith(f"{name}: expected")
            if error.param == name and not is_type and "one of" not in what and what not in said:
                said.append(what)
    return "; ".join(said)


def _engine(setting: Setting) -> str:
    flag = f" `{setting.flag}`" if setting.flag else ""
    return f"{_sentence(setting)}{flag}"


def _sentence(setting: Setting) -> str:
    unset = f" None: {setting.unset}." if setting.unset and setting.default is None else ""
    return f"{setting.text}{unset}"


def schema() -> str:
    """What a file for `--config` may hold of settings."""
    title = "novainfer --config: settings of the engine and of the server"
    return json.dumps(schema_of(title, EngineConfig, ServerSettings, LogSettings), indent=2) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(any(made() != path.read_text(encoding="utf-8") for path, made in ((PAGE, page), (SCHEMA, schema))))
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
