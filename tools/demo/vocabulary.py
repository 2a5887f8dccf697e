"""The tokenizer: byte-level BPE with Qwen2's splitting, trained on the demo corpus."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tools.demo.corpus import DEFAULT_SYSTEM, END, END_OF_TEXT, START, documents

__all__ = ["CHAT_TEMPLATE", "CONTEXT", "SPECIAL_TOKENS", "save_tokenizer", "train_tokenizer"]

CONTEXT = 2048
SPECIAL_TOKENS = (END_OF_TEXT, START, END)

# Qwen2's own pattern: contractions, words with one leading mark, single digits, punctuation, line ends, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\n" + DEFAULT_SYSTEM + "<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
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


def _without_specials(text: str) -> list[str]:
    for special in SPECIAL_TOKENS:
        text = text.replace(special, "\0")
    return [piece for piece in text.split("\0") if piece]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
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
