"""A tokenizer and a template of the shape of DeepSeek-R1-Distill-Qwen's: Qwen's bytes, another class, a first token.

Its model is Qwen2's. Its tokenizer_config.json names LlamaTokenizerFast, its tokenizer.json puts a control token before
plain text, and its template writes that token itself, drops what an earlier answer thought, and opens `<think>`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from novainfer.actors.tokenizer.tokenizer import HFTokenizer
from novainfer.fsm.messages.events import Chat

DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"
BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TEMPLATE = (
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages if message['role'] == 'system' -%}"
    "{%- set ns.system = ns.system + message['content'] -%}{%- endfor -%}"
    "{{ bos_token }}{{ ns.system }}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '<｜User｜>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{%- set content = message['content'] -%}"
    "{%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}"
    "{{ '<｜Assistant｜>' + content + eos_token }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\nTwo."},
    {"role": "user", "content": "And é?"},
]


def as_token(content: str) -> dict[str, object]:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distilled")
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (END, BEGIN)])
    shown = (USER, ASSISTANT, "<think>", "</think>")  # they are no special tokens: a reader sees them
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in shown])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": as_token(BEGIN),
        "eos_token": as_token(END),
        "pad_token": as_token(END),
        "unk_token": None,
        "legacy": True,
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_chats_are_rendered_and_tokenised_as_in_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = HFTokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    try:
        (ids,) = ours.encode_batch([Chat(messages=MESSAGES)])
    finally:
        ours.close()
    text = b"".join(map(ours.vocabulary().bytes_of, ids)).decode()
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == f"{BEGIN}Be brief.{USER}1 + 1?{ASSISTANT}\n\nTwo.{END}{USER}And é?{ASSISTANT}<think>\n"
    assert ids == theirs(text, add_special_tokens=False).input_ids
    begin = theirs.convert_tokens_to_ids(BEGIN)
    assert ids.count(begin) == 1  # written by the template, and not once more by the tokenizer
    assert theirs.convert_tokens_to_ids("<think>") in ids


def test_plain_text_begins_with_the_token_that_the_model_begins_with(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = HFTokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    try:
        found = ours.encode_batch(["Once upon", Chat(messages=MESSAGES[:2]), "a time"])
    finally:
        ours.close()
    assert found[0] == theirs("Once upon").input_ids
    assert found[2] == theirs("a time").input_ids
    assert [ids.count(theirs.bos_token_id) for ids in found] == [1, 1, 1]


def test_no_tokenizer_brings_torch_into_the_process(folder: Path, tmp_path: Path) -> None:
    """That of another class, and one that is vocab.json and merges.txt alone."""
    model = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = (" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from novainfer.actors.tokenizer.tokenizer import load_tokenizer; "
        "found = [load_tokenizer(Path(path)).encode_batch(['Once upon a time'])[0] for path in sys.argv[1:]]; "
        "print(found[0][1:] == found[1] == found[2], 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder, tmp_path, DEMO], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True False\n"


def test_a_template_may_think_or_not_as_the_request_says(folder: Path, tmp_path: Path) -> None:
    """As Qwen3's does: what it looks at comes with the request."""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    template = (
        "{%- set ns = namespace(last=none) -%}"
        "{%- for message in messages[::-1] -%}{%- if ns.last is none and message.role == 'user' -%}"
        "{%- set ns.last = messages|length - 1 - loop.index0 -%}{%- endif -%}{%- endfor -%}"
        "{%- for message in messages -%}<{{ message.role }}>"
        "{%- if message.role == 'assistant' and loop.index0 < ns.last -%}"
        "{{ message.content.split('</think>')[-1].lstrip('\\n') }}"
        "{%- else -%}{{ message.content }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<assistant>"
        "{%- if enable_thinking is defined and enable_thinking is false -%}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
        "{%- endif -%}"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) | {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = HFTokenizer(tmp_path)
    try:
        found = tokenizer.encode_batch(
            [Chat(messages=MESSAGES, template_kwargs=kwargs) for kwargs in ({}, {"enable_thinking": False})]
        )
    finally:
        tokenizer.close()
    vocabulary = tokenizer.vocabulary()
    texts = [b"".join(map(vocabulary.bytes_of, ids)).decode() for ids in found]
    start = "<system>Be brief.<user>1 + 1?<assistant>Two.<user>And é?<assistant>"
    assert texts == [start, start + "<think>\n\n</think>\n\n"]
