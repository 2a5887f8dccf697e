"""The tokenizer of the demo model carries any text, and its chat template is Qwen2's."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from novainfer.fsm.parsing.formats import HERMES, MARKERS, THINK, formats_of
from novainfer.kernels.demo import model_path
from tools.demo import corpus, thoughts, tooling
from tools.demo.batches import CALLS, SKILLS, batches, encode
from tools.demo.train import SEED, VOCAB_SIZE
from tools.demo.vocabulary import CONTEXT, SPECIAL_TOKENS, train_tokenizer, with_markers


@cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


@cache
def _raw() -> Tokenizer:
    return Tokenizer.from_file(str(model_path() / "tokenizer.json"))


@pytest.mark.slow
def test_the_shipped_tokenizer_is_what_the_script_trains() -> None:
    trained = json.loads(with_markers(train_tokenizer(SEED, vocab_size=VOCAB_SIZE)).to_str())
    assert trained == json.loads((model_path() / "tokenizer.json").read_text(encoding="utf-8"))


def test_every_byte_has_a_token() -> None:
    vocabulary = _raw().get_vocab()
    assert len(vocabulary) == VOCAB_SIZE
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)


@given(st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_any_text_comes_back_as_its_nfc_form(text: str) -> None:
    import unicodedata

    ids = _tokenizer().encode(text, add_special_tokens=False)
    assert _tokenizer().decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_numbers_are_split_into_digits() -> None:
    assert _raw().encode("12345", add_special_tokens=False).tokens == ["1", "2", "3", "4", "5"]


def test_special_tokens_are_last_single_and_named_as_in_qwen2() -> None:
    tokenizer = _tokenizer()
    for i, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(token, add_special_tokens=False) == [VOCAB_SIZE - len(SPECIAL_TOKENS) + i]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token is None
    assert tokenizer.model_max_length == CONTEXT


def test_markers_stand_before_them_and_are_text() -> None:
    tokenizer = _tokenizer()
    first = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(MARKERS)
    for i, marker in enumerate(MARKERS):
        assert tokenizer.encode(marker, add_special_tokens=False) == [first + i]
        assert tokenizer.decode([first + i], skip_special_tokens=True) == marker


def test_the_format_of_its_answers_is_found_in_its_template() -> None:
    found = formats_of(_tokenizer().chat_template, _raw().token_to_id)
    assert (found.tool_calls, found.reasoning) == (HERMES, THINK)
    assert list(found.marker_ids) == list(MARKERS)


def test_special_tokens_are_left_out_of_decoded_text_on_request() -> None:
    ids = _tokenizer().encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False)
    assert _tokenizer().decode(ids, skip_special_tokens=True) == "user\nhi"


def test_the_chat_template_renders_as_qwen2_does() -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendered = _tokenizer().apply_chat_template(chat, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    )
    own_system = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert _tokenizer().apply_chat_template(own_system, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_corpus_renders_conversations_as_the_template_does() -> None:
    turns = [("What is 1 + 1?", "1 + 1 = 2."), ("Bye", "Goodbye!")]
    chat = [message for user, reply in turns for message in (_message("user", user), _message("assistant", reply))]
    assert corpus.render(turns, corpus.DEFAULT_SYSTEM).text() == _tokenizer().apply_chat_template(chat, tokenize=False)


def test_the_corpus_renders_tools_calls_and_thoughts_as_the_template_does() -> None:
    rng = random.Random(4)
    for at in range(200):
        messages, tools = tooling.chat(rng, is_thinking=at % 2 == 1)
        chat = [_message(role, content) for role, content in messages]
        expected = _tokenizer().apply_chat_template(chat, tools=tools, tokenize=False)
        assert corpus.render_chat(messages, corpus.DEFAULT_SYSTEM, tools).text() == expected


def test_calls_and_thoughts_of_a_message_are_rendered_as_the_model_writes_them() -> None:
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}} for city in ("Köln", "Oslo")
    ]
    told = [
        _message("user", "Hi"),
        {"role": "assistant", "content": "", "reasoning_content": "Two.", "tool_calls": calls},
    ]
    written = "\n".join(
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Köln", "Oslo")
    )
    results = [_message("tool", "rain"), _message("tool", "sun")]
    said = [_message("user", "Hi"), _message("assistant", thoughts.thoughtful("Two.", written))]
    rendered = [_tokenizer().apply_chat_template([*chat, *results], tokenize=False) for chat in (told, said)]
    assert rendered[0] == rendered[1]
    assert rendered[0].endswith(
        f"</think>\n\n{written}<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nsun\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("switch", "opened"), [({}, ""), ({"enable_thinking": False}, ""), ({"enable_thinking": True}, "<think>\n")]
)
def test_thoughts_are_opened_where_they_are_asked_for(switch: dict[str, bool], opened: str) -> None:
    text = _tokenizer().apply_chat_template(
        [_message("user", "Hi")], tokenize=False, add_generation_prompt=True, **switch
    )
    assert text.endswith(f"<|im_start|>assistant\n{opened}")


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        (None, "{}"),
        ({"type": "object"}, "{}"),
        ({"properties": {"a": True, "b": {"type": ["string", "null"]}, "c": {"enum": [1]}}},
         '{"a": "any", "b": ["string", "null"], "c": "any"}'),
    ],
)  # fmt: skip
def test_a_tool_with_any_parameters_is_listed(parameters: Any, told: str) -> None:
    function = {"name": "f"} | ({} if parameters is None else {"parameters": parameters})
    tools = [{"type": "function", "function": function}]
    text = _tokenizer().apply_chat_template([_message("user", "Hi")], tools=tools, tokenize=False)
    assert f'\n\n# Tools\n{{"name": "f", "arguments": {told}}}<|im_end|>' in text


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_pieces_encoded_one_by_one_give_the_tokens_of_the_whole() -> None:
    for document in itertools.islice(corpus.documents(11, drill_mix=SKILLS[0][1]), 400):
        ids, weights = encode(_raw(), document)
        assert ids == _raw().encode(document.text(), add_special_tokens=False).ids
        assert len(ids) == len(weights)
        assert any(weights)


def test_batches_are_the_same_for_a_seed_and_their_targets_are_the_next_tokens() -> None:
    def first() -> Any:
        source = batches(_raw(), 3, tokens_per_batch=2048, context=CONTEXT, share_long=0.04)
        return next(itertools.islice(source, random.Random(1).randrange(5), None))

    batch, again = first(), first()
    assert batch.input_ids.equal(again.input_ids)
    flat = batch.input_ids.flatten()
    # A target is the token after its place, except that padding may have cut nothing: rows are whole documents.
    assert flat[batch.places + 1].equal(batch.targets)
    assert batch.input_ids.numel() <= 2048
    assert batch.places.unique().numel() == batch.places.numel()


def test_a_place_is_in_a_batch_as_often_as_it_weighs() -> None:
    source = batches(_raw(), 3, tokens_per_batch=2048, context=CONTEXT, share_long=0.0, mixes=CALLS)
    found = [batch.places.bincount() for batch in itertools.islice(source, 20)]
    assert {int(count) for counts in found for count in counts} == {0, 1, 5}
