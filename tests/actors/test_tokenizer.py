"""The demo model's tokenizer: every text comes back from its tokens' bytes, and a bad prompt spoils only itself."""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
import unicodedata
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from novainfer.actors.tokenizer.chosen_template import read_template
from novainfer.actors.tokenizer.tokenizer import HFTokenizer, encode_jobs, load_tokenizer
from novainfer.engine import error_of
from novainfer.fsm.messages.errors import EngineOverloaded, ModelLoadError
from novainfer.fsm.messages.events import Chat, Encode, Encoded, EncodeFailed, End
from novainfer.fsm.text import TextAssembler, Vocabulary

DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"
HELLO = Chat(messages=[{"role": "user", "content": "Hello"}])


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer(DEMO)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: HFTokenizer) -> Vocabulary:
    return tokenizer.vocabulary()


def ids_of(tokenizer: HFTokenizer, prompt: str | Chat) -> list[int]:
    (found,) = tokenizer.encode_batch([prompt])
    assert isinstance(found, list), found
    return found


def refusal_of(tokenizer: HFTokenizer, prompt: str | Chat) -> str:
    (found,) = tokenizer.encode_batch([prompt])
    assert isinstance(found, str), found
    return found


def bytes_of(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return b"".join(map(vocabulary.bytes_of, ids))


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        " two  spaces ",
        "naïve café",
        "日本語のテキスト",
        "👩‍👩‍👧 family",
        "\t\r\n\x00\x7f",
        "3 + 4 = 7",
    ],
)
def test_a_text_is_the_bytes_of_its_tokens(tokenizer: HFTokenizer, vocabulary: Vocabulary, text: str) -> None:
    assert bytes_of(vocabulary, ids_of(tokenizer, text)).decode() == text


def test_a_long_token_whose_id_another_one_has_too_counts_for_the_fewest_tokens_of_a_text(tmp_path: Path) -> None:
    folder = copy_of_demo(tmp_path)
    settings = json.loads((folder / "tokenizer.json").read_text())
    model = settings["model"]
    doubled = ["a" * 2**n for n in range(7)]
    first = len(model["vocab"]) + len(settings["added_tokens"])
    model["vocab"] = {token: at for token, at in model["vocab"].items() if token not in doubled[1:]}
    model["vocab"] |= {token: first + at for at, token in enumerate(doubled[1:])}
    model["merges"] = [[token, token] for token in doubled[:-1]]
    longest = settings["added_tokens"][0] | {"id": model["vocab"][doubled[-1]], "content": "<x>", "special": True}
    settings["added_tokens"].append(longest)
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = HFTokenizer(folder)
    assert len(ids_of(tokenizer, doubled[-1] * 4)) == tokenizer.tokens_min(doubled[-1] * 4) == 4


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_so_is_every_normalised_text(text: str) -> None:
    tokenizer, vocabulary = _shared()
    text = unicodedata.normalize("NFC", text)  # Qwen2's tokenizer normalises
    assert bytes_of(vocabulary, ids_of(tokenizer, text)).decode() == text


_SHARED: list[tuple[HFTokenizer, Vocabulary]] = []


def _shared() -> tuple[HFTokenizer, Vocabulary]:
    if not _SHARED:
        tokenizer = HFTokenizer(DEMO)
        _SHARED.append((tokenizer, tokenizer.vocabulary()))
    return _SHARED[0]


def test_the_table_of_bytes_gives_what_the_tokenizer_decodes(tokenizer: HFTokenizer, vocabulary: Vocabulary) -> None:
    rng = random.Random(7)
    plain = [i for i in range(len(vocabulary.token_bytes)) if i not in vocabulary.special_ids]
    for _ in range(50):
        ids = [rng.choice(plain) for _ in range(30)]
        assembler = TextAssembler(vocabulary, [])
        text = "".join(assembler.push(i) for i in ids) + assembler.flush()
        assert text == tokenizer._tokenizer.decode(ids)


def test_a_token_of_characters_that_are_no_bytes_stands_for_its_own_text(
    tokenizer: HFTokenizer, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    others = ["\u4e2d\u6587", "a b", "\u0120\u4e2d", "\n", "\u00c3 \u00a9"]
    folder = copy_of_demo(tmp_path)
    settings = json.loads((folder / "tokenizer.json").read_text())
    first = len(settings["model"]["vocab"])  # the ids of added tokens go on behind them
    settings["model"]["vocab"] |= {token: first + at for at, token in enumerate(others)}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with_others = HFTokenizer(folder)
    found, rng = with_others.vocabulary(), random.Random(7)
    assert [found.bytes_of(first + at) for at in range(len(others))] == [token.encode() for token in others]
    halves = [i for i, data in enumerate(vocabulary.token_bytes) if data in (b"\xc3", b"\xa9", b"\xe4", b" ")]
    assert len(halves) == 4
    for _ in range(50):
        ids = [rng.choice([*halves, *range(first, first + len(others))]) for _ in range(20)]
        assembler = TextAssembler(found, [])
        text = "".join(assembler.push(i) for i in ids) + assembler.flush()
        assert text == with_others._tokenizer.decode(ids)
    text = "".join(others)
    assert ids_of(with_others, text) == ids_of(tokenizer, text)
    assert with_others.tokens_min(text) == tokenizer.tokens_min(text)


def test_every_byte_has_a_token(vocabulary: Vocabulary) -> None:
    assert {bytes([i]) for i in range(256)} <= set(vocabulary.token_bytes)


def test_control_tokens_stand_for_their_own_text(tokenizer: HFTokenizer, vocabulary: Vocabulary) -> None:
    names = {vocabulary.bytes_of(i) for i in vocabulary.special_ids}
    assert {b"<|im_start|>", b"<|im_end|>", b"<|endoftext|>"} <= names
    config = json.loads((DEMO / "config.json").read_text())
    assert config["eos_token_id"] in vocabulary.special_ids
    (end,) = ids_of(tokenizer, "<|im_end|>")
    assert end in vocabulary.special_ids


def test_a_chat_is_rendered_by_the_models_template(tokenizer: HFTokenizer, vocabulary: Vocabulary) -> None:
    text = bytes_of(vocabulary, ids_of(tokenizer, HELLO)).decode()
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    expected = tokenizer._tokenizer.apply_chat_template(HELLO.messages, tokenize=False, add_generation_prompt=True)
    assert text == expected


def test_a_chat_can_go_on_with_its_last_message(tokenizer: HFTokenizer, vocabulary: Vocabulary) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hel"}]
    chat = Chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert bytes_of(vocabulary, ids_of(tokenizer, chat)).decode().endswith("<|im_start|>assistant\nHel")


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], [{"content": "no role"}], [{"role": "user", "content": 5}], [], ["not a message"]],
    ids=repr,
)
def test_messages_that_the_template_cannot_render_are_refused_in_a_sentence(
    tokenizer: HFTokenizer, messages: list[dict[str, object]]
) -> None:
    refusal = refusal_of(tokenizer, Chat(messages=messages))
    assert refusal.startswith("the chat template cannot render these messages: ")
    assert "\n" not in refusal


def test_half_a_surrogate_pair_is_refused_in_words(tokenizer: HFTokenizer) -> None:
    assert refusal_of(tokenizer, "ab\ud800cd") == "the prompt is not valid Unicode: it holds half of a surrogate pair"
    chat = Chat(messages=[{"role": "user", "content": "\udfff"}])
    assert "surrogate" in refusal_of(tokenizer, chat)


def test_one_bad_prompt_spoils_only_itself(tokenizer: HFTokenizer) -> None:
    prompts: list[str | Chat] = ["one", "\ud800", HELLO, Chat(messages=[{"role": "user"}]), "two"]
    found = tokenizer.encode_batch(prompts)
    assert found[0] == ids_of(tokenizer, "one")
    assert isinstance(found[1], str)
    assert found[2] == ids_of(tokenizer, HELLO)
    assert isinstance(found[3], str)
    assert found[4] == ids_of(tokenizer, "two")


def test_a_text_beyond_the_context_is_tokenised_without_a_word_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = HFTokenizer(DEMO)
    (ids,) = tokenizer.encode_batch(["word " * 5000])
    assert len(ids) >= 5000
    assert capfd.readouterr().err == ""


def test_nothing_to_encode_is_nothing(tokenizer: HFTokenizer) -> None:
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode_batch([""]) == [[]]


def test_jobs_are_answered_in_order_and_name_the_field_at_fault(tokenizer: HFTokenizer) -> None:
    jobs = [Encode(4, "one"), Encode(5, "\ud800"), Encode(6, Chat(messages=[{"role": "user"}]))]
    one, two, three = encode_jobs(tokenizer, list(jobs))
    assert one == Encoded(4, ids_of(tokenizer, "one"))
    assert isinstance(two, EncodeFailed)
    assert isinstance(three, EncodeFailed)
    assert (two.stream_id, two.param) == (5, "prompt")
    assert (three.stream_id, three.param) == (6, "messages")


def test_a_chat_that_cannot_be_rendered_just_now_may_be_sent_again(tokenizer: HFTokenizer) -> None:
    tokenizer.close()  # its processes: a new one will be needed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        text, chat = encode_jobs(tokenizer, [Encode(4, "one"), Encode(5, HELLO)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert text == Encoded(4, ids_of(tokenizer, "one"))
    assert isinstance(chat, EncodeFailed)
    assert (chat.stream_id, chat.param) == (5, None)
    error = error_of(End(error=chat.message, code=chat.code, param=chat.param), retry_after_s=2.0)
    assert isinstance(error, EngineOverloaded)
    assert error.status == 503
    assert "cannot be started: Too many open files: try again" in error.message


def copy_of_demo(folder: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def test_without_a_chat_template_a_chat_is_refused_and_a_text_is_not(tmp_path: Path) -> None:
    folder = copy_of_demo(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = HFTokenizer(folder)
    assert "no chat template; use a plain prompt" in refusal_of(tokenizer, HELLO)
    assert ids_of(tokenizer, "Hello")


def test_the_operators_template_is_used_in_the_place_of_the_models(tmp_path: Path) -> None:
    folder = copy_of_demo(tmp_path)
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    template = read_template(tmp_path / "chat.jinja")
    tokenizer = load_tokenizer(folder, template=template)
    assert ids_of(tokenizer, HELLO) == ids_of(tokenizer, f"[user] {HELLO.messages[0]['content']}\n")
    assert tokenizer.info().chat_template == template
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder, template=template).prompt_kind == "chat"
    assert load_tokenizer(folder, template="<tool_call> {{ tools }} <think>").formats != tokenizer.formats


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{% for m in messages %}", "Unexpected end of template"),
        (b"\xff{{ x }}", "can't decode byte 0xff"),
        (b" " * (1 << 20) + b" ", "more than 1048576 bytes"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_template_is_told_in_a_sentence(tmp_path: Path, data: bytes | None, reason: str) -> None:
    path = tmp_path / "chat.jinja"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        read_template(path)
    assert caught.value.param == "chat_template"
    assert str(path) in caught.value.message
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("damage", ["missing", "not json", "empty", "deep", "a merge of no token"])
def test_a_tokenizer_that_cannot_be_read_is_one_sentence_that_names_the_folder(tmp_path: Path, damage: str) -> None:
    folder = copy_of_demo(tmp_path)
    if damage == "missing":
        (folder / "tokenizer.json").unlink()  # but tokenizer_config.json is there
    elif damage == "deep":
        (folder / "tokenizer_config.json").write_text("[" * 100_000)
    elif damage == "a merge of no token":  # and one that is longer than any: the library panics
        settings = json.loads((folder / "tokenizer.json").read_text())
        longest = max(settings["model"]["vocab"], key=len)
        settings["model"]["merges"].append([longest, longest])
        (folder / "tokenizer.json").write_text(json.dumps(settings))
    else:
        (folder / "tokenizer.json").write_text("{" if damage == "not json" else "")
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(folder)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.param == "tokenizer"


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = copy_of_demo(tmp_path)
    text = json.loads((folder / "tokenizer.json").read_text())
    text["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").unlink()  # else transformers takes the model's own kind
    with pytest.raises(ModelLoadError, match=r"not byte-level \(WordPiece\)"):
        HFTokenizer(folder)


SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def sentencepiece(folder: Path, decoder: dict[str, Any]) -> HFTokenizer:
    """One as Llama 2 and Mistral 7B have it, of few tokens: words begin with a space, unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"Hello,wrd!", "\u2581w", "or", "ll", "\u2581wor"]
    merges = [["\u2581", "w"], ["o", "r"], ["l", "l"], ["\u2581w", "or"]]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, list(map(tuple, merges)), byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    settings = json.loads(made.to_str())
    settings["decoder"] = decoder
    settings["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>"}')
    return HFTokenizer(folder)


@pytest.mark.parametrize("text", ["Hello, world!", " two  spaces ", "naïve \u4e16\U0001f600", "w\u2581w <0x41>"])
def test_tokens_of_sentencepiece_are_their_bytes_wherever_they_stand(text: str, tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, SENTENCEPIECE)
    ids = ids_of(tokenizer, text)
    vocabulary = tokenizer.vocabulary()
    # The space before the first word is the decoder's to take away, and a text's that goes on to keep.
    assert bytes_of(vocabulary, ids).decode() == " " + text.replace("\u2581", " ")
    assert tokenizer._backend.decode(ids) == text.replace("\u2581", " ")
    assert tokenizer.tokens_min("w" * 10_000) == 0
    assert vocabulary.special_ids == {0, 1, 2}


def test_a_decoder_that_does_something_else_beside_is_refused(tmp_path: Path) -> None:
    ctc = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    for other in (
        {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
        {"type": "Sequence", "decoders": [*SENTENCEPIECE["decoders"], ctc]},
    ):
        with pytest.raises(ModelLoadError, match=r"not byte-level .*, nor SentencePiece's: only these kinds"):
            sentencepiece(tmp_path, other)


def test_it_does_what_the_tokenizer_does_that_transformers_would_choose(tokenizer: HFTokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(DEMO))
    assert tokenizer._tokenizer.get_vocab() == theirs.get_vocab()
    assert tokenizer._tokenizer.chat_template == theirs.chat_template
    text = "Once upon a time, 12 + 30 = 42 <|im_end|> \u00e9\u4e16"
    assert ids_of(tokenizer, text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_the_demo_tokenizer_needs_no_torch() -> None:
    code = (
        "import sys; from novainfer.kernels.demo import model_path; "
        "from novainfer.actors.tokenizer.tokenizer import load_tokenizer; "
        "load_tokenizer(model_path()).vocabulary(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_model_without_a_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    assert (
        tokenizer.encode_batch(["Hello", HELLO]) == ["this model has no tokenizer: its prompts must be token ids"] * 2
    )
    assert tokenizer.vocabulary().bytes_of(5) == b""
    with pytest.raises(ModelLoadError, match="there is no tokenizer in"):
        load_tokenizer(tmp_path, is_asked_for=True)


LOAD_IN_THREADS = """
import sys, threading
from pathlib import Path
from novainfer.actors.tokenizer.tokenizer import load_for_caller

together, found = threading.Barrier(3), []

def load():
    together.wait()
    found.append(load_for_caller(Path(sys.argv[1])))

threads = [threading.Thread(target=load) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 3
"""


def test_several_models_load_their_tokenizers_at_once() -> None:
    """transformers, which nothing has imported in that process, is imported by the first of them alone."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD_IN_THREADS, str(DEMO)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
