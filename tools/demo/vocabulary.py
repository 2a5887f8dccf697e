"""The tokenizer: byte-level BPE with Qwen2's splitting, trained on the demo corpus."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from novainfer.fsm.parsing.formats import MARKERS
from tools.demo.corpus import DEFAULT_SYSTEM, END, END_OF_TEXT, START, documents

__all__ = ["CHAT_TEMPLATE", "CONTEXT", "SPECIAL_TOKENS", "save_tokenizer", "train_tokenizer", "with_markers"]

CONTEXT = 2048
SPECIAL_TOKENS = (END_OF_TEXT, START, END)

# Qwen2's own pattern: contractions, words with one leading mark, single digits, punctuation, line ends, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# As Qwen2's, with the calls and thoughts of Qwen3. A tool is its description and, behind it, the shape of its call with
# types for values: what is read before a name tells what it is for, and what follows a name is what a call copies.
# Without `enable_thinking` nothing about thoughts is written.
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set first, rest = messages[0]['content'], messages[1:] %}"
    "{% else %}"
    "{% set first, rest = '" + DEFAULT_SYSTEM + "', messages %}"
    "{% endif %}"
    "{{ '<|im_start|>system\\n' + first }}"
    "{% if tools %}{{ '\\n\\n# Tools' }}{% for tool in tools %}{% set function = tool['function'] %}"
    "{% if function['description'] %}{{ '\\n' ~ function['description'] }}{% endif %}"
    "{{ '\\n{\"name\": ' ~ (function['name'] | tojson) ~ ', \"arguments\": {' }}"
    "{% for name, schema in ((function['parameters'] or {})['properties'] or {}).items() %}"
    "{{ (', ' if not loop.first else '') ~ (name | tojson) ~ ': ' ~ ((schema['type'] or 'any') | tojson) }}"
    "{% endfor %}{{ '}}' }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% for message in rest %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or rest[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or rest[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['reasoning_content'] %}"
    "{{ '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' }}"
    "{% endif %}"
    "{% if message['tool_calls'] %}{{ message['content'] }}{% else %}{{ '' + message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ ('\\n' if message['content'] or not loop.first else '') ~ '<tool_call>\\n' }}"
    "{{ '{\"name\": ' ~ (call['function']['name'] | tojson) ~ ', \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) ~ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% if enable_thinking %}{{ '<think>\\n' }}{% endif %}"
    "{% endif %}"
)


def train_tokenizer(seed: int, *, vocab_size: int, num_documents: int = 12_000) -> Tokenizer:
    """A tokenizer of that many tokens, the 256 bytes and the special tokens among them."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (
        piece
        for document in itertools.islice(documents(seed), num_documents)
        for piece in _without_specials(document.text())
    )
    tokenizer.train_from_iterator(texts, trainer)
    # As in Qwen2 the special tokens come after the ordinary ones.
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def with_markers(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with tokens for thoughts and calls, in the places of the last merges: its size stays the same."""
    content = json.loads(tokenizer.to_str())
    merges, vocabulary = content["model"]["merges"], content["model"]["vocab"]
    for _ in MARKERS:
        del vocabulary["".join(merges.pop())]
    content["added_tokens"] = []
    made = Tokenizer.from_str(json.dumps(content))
    # Of text, not control: what leaves out special tokens keeps them, as with Qwen3.
    made.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    made.add_special_tokens(list(SPECIAL_TOKENS))
    return made


def _without_specials(text: str) -> list[str]:
    for special in SPECIAL_TOKENS:
        text = text.replace(special, "\0")
    return [piece for piece in text.split("\0") if piece]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(token_id): {
            "content": token.content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token.special,
        }
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [START, END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": CONTEXT,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
