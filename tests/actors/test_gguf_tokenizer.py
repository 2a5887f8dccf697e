"""The tokenizer in a GGUF file gives the tokens that the folder's does from which it was written."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from novainfer.actors.tokenizer.tokenizer import Bare, HFTokenizer, NoTokenizer, load_tokenizer
from novainfer.fsm.messages.errors import ModelLoadError
from novainfer.fsm.messages.events import Chat
from tests.kernels.gguf_checkpoints import write_tokenizer

DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"
LONGEST = max(json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"], key=len)
TEXTS = (
    "Hello, world!",
    " two  spaces\n\n and\tlines ",
    "naïve café, 日本語, 12345 and 3.14",
    "decomposed: e\u0301 \u1112\u1161\u11ab",
    "<|im_start|>user\nI'll say it's<|im_end|>",
    "🙂 \u200d x",
    "",
)
CHAT = Chat(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])


def finished(writer: gguf.GGUFWriter, path: Path, change: Callable[[gguf.GGUFWriter], None]) -> Path:
    """The file, written; keys that `change` sets take the place of those that are there."""
    keys = writer.kv_data[0]
    before = dict(keys)
    keys.clear()
    change(writer)
    writer.kv_data[0] = before | keys
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(path: Path, change: Callable[[gguf.GGUFWriter], None] = lambda writer: None, pre: str = "qwen2") -> Path:
    writer = gguf.GGUFWriter(path, "qwen2")
    write_tokenizer(writer, DEMO, pre)
    return finished(writer, path, change)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HFTokenizer, HFTokenizer]]:
    path = write(tmp_path_factory.mktemp("gguf") / "model.gguf")
    pair = HFTokenizer(DEMO), HFTokenizer(path)
    yield pair
    for tokenizer in pair:
        tokenizer.close()


def test_texts_and_chats_become_the_same_tokens(pair: tuple[HFTokenizer, HFTokenizer]) -> None:
    given, read = pair
    prompts: list[str | Chat] = [*TEXTS, CHAT]
    expected = given.encode_batch(prompts)
    assert all(isinstance(ids, list) for ids in expected)
    assert read.encode_batch(prompts) == expected
    assert [read.tokens_min(text) for text in TEXTS] == [given.tokens_min(text) for text in TEXTS]


def test_every_token_has_the_same_bytes_and_the_same_ones_are_control(pair: tuple[HFTokenizer, HFTokenizer]) -> None:
    given, read = (tokenizer.vocabulary() for tokenizer in pair)
    settings = json.loads((DEMO / "tokenizer.json").read_text())
    count = max(*settings["model"]["vocab"].values(), *(token["id"] for token in settings["added_tokens"])) + 1
    for token_id in range(count):
        assert read.bytes_of(token_id) == given.bytes_of(token_id), token_id
    assert read.special_ids == given.special_ids


def test_a_model_begins_with_its_control_token_where_the_file_says_so(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(True)
        writer.add_bos_token_id(0)

    tokenizer = HFTokenizer(write(tmp_path / "m.gguf", change))
    (plain,) = HFTokenizer(DEMO).encode_batch(["Hello"])
    assert tokenizer.encode_batch(["Hello", Bare("Hello"), "Hello"]) == [[0, *plain], plain, [0, *plain]]
    token = tokenizer.vocabulary().bytes_of(0).decode()
    assert tokenizer.info().bos_token == token


def test_tokens_that_users_have_defined_are_whole_and_are_text(tmp_path: Path) -> None:
    settings = json.loads((DEMO / "tokenizer.json").read_text())
    ids = settings["model"]["vocab"] | {token["content"]: token["id"] for token in settings["added_tokens"]}
    types = [1] * (max(ids.values()) + 1)
    for token in settings["added_tokens"]:
        types[token["id"]] = 4
    tokenizer = HFTokenizer(write(tmp_path / "m.gguf", lambda writer: writer.add_token_types(types)))
    assert tokenizer.vocabulary().special_ids == frozenset()
    token = settings["added_tokens"][0]
    assert tokenizer.encode_batch([token["content"]]) == [[token["id"]]]


@pytest.mark.parametrize(("pre", "bos", "begins"), [("llama-bpe", 0, [0]), ("llama-bpe", None, []), ("qwen2", 0, [])])
def test_what_a_model_begins_with_where_the_file_does_not_say(
    pre: str, bos: int | None, begins: list[int], tmp_path: Path
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        if bos is not None:
            writer.add_bos_token_id(bos)

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    write_tokenizer(writer, DEMO, pre)
    del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]
    tokenizer = HFTokenizer(finished(writer, tmp_path / "m.gguf", change))
    (plain,) = HFTokenizer(DEMO).encode_batch(["Hello"])
    assert tokenizer.encode_batch(["Hello"]) == [[*begins, *plain]]


def test_a_piece_of_llama_3_that_is_a_token_is_it_whatever_merges_say(tmp_path: Path) -> None:
    tokens = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    word = max((token for token in tokens if token.isalpha() and token.isascii()), key=len)
    found = {}
    for pre in ("llama-bpe", "gpt-2"):
        tokenizer = HFTokenizer(write(tmp_path / "m.gguf", lambda writer: writer.add_token_merges(["h e"]), pre))
        (found[pre],) = tokenizer.encode_batch([word])
    assert found["llama-bpe"] == [tokens[word]]
    assert len(found["gpt-2"]) >= len(word) - 1


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_other_splittings_are_those_of_their_models(pre: str, tmp_path: Path) -> None:
    from tokenizers import Regex, pre_tokenizers

    backend: Any = HFTokenizer(write(tmp_path / "m.gguf", pre=pre))._backend
    text = "It's 12345  apples\n\n and naïve e\u0301"
    if pre == "gpt-2":
        expected = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    else:  # Llama 3's tokenizer.json
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        )
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        expected = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ).pre_tokenize_str(text)
    assert backend.normalizer is None
    assert backend.pre_tokenizer.pre_tokenize_str(text) == expected


def test_the_distilled_models_of_deepseek_split_text_as_qwen(
    tmp_path: Path, pair: tuple[HFTokenizer, HFTokenizer]
) -> None:
    distilled = HFTokenizer(write(tmp_path / "m.gguf", pre="deepseek-r1-qwen"))
    assert distilled.encode_batch(TEXTS) == pair[0].encode_batch(TEXTS)


PIECES = (
    *("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))),
    *(
        "\u2581t",
        "he",
        "in",
        "\u2581a",
        "\u2581the",
        "on",
        "ll",
        "\u2581in",
        "ing",
        "\u2581\u2581",
        "er",
        "\u2581w",
        "or",
        "\u2581wor",
    ),
    *(
        "lo",
        "llo",
        "\u2581He",
        "\u2581Hello",
        "ld",
        "\u2581wo",
        "orld",
        "\u2581world",
        "th",
        "ther",
        "\u2581the re",
        "aa",
        "aaa",
        "\u2581Hellold",  # of two pieces that are long
    ),
    *(
        "\u2581",
        *"etaoinshrldcumwfgypbvkjxqzHT.,!?<>/0123456789",
        "\u00e9",
        "\u65e5",
        "[INST]",
        "[CONTROL]",
        "[UNUSED]",
    ),
)
KINDS = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 262), 4, 3, 5]
# Pieces of sentencepiece have the negated place among them as a score; here some are equal, and some out of order.
SCORES = [0.0] * 259 + [-float((7 * i) % 12) for i in range(len(PIECES) - 262)] + [0.0] * 3
SENTENCES = (
    "Hello world, the other thing!",
    "there\u2019s naïve 日本語 \U0001f642 in the world",
    "a  b   c aaaa aaaaa\n\n\tin",
    "thererer inininger worldworld",
    "",
)
WITH_SPACES_AND_CONTROL = (" Hello", "  two", "<s>Hello</s>Hello [INST] in [/INST]", "[CONTROL]the<unk>the [UNUSED]")


def write_sentencepiece(
    path: Path,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    writer: gguf.GGUFWriter | None = None,
) -> Path:
    writer = writer or gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(PIECES))
    writer.add_token_scores(SCORES)
    writer.add_token_types(KINDS)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return finished(writer, path, change)


def test_pieces_are_joined_as_transformers_joins_them(tmp_path: Path) -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    path = write_sentencepiece(tmp_path / "m.gguf")
    read = HFTokenizer(path)
    _, described, _ = theirs.get_gguf_tokenizer(str(path))
    described["tokens"] = [token for token in described["tokens"] if token != "[UNUSED]"]
    modern = theirs.add_gguf_special_tokens(theirs.sentencepiece_tokenizer(described), described)
    assert (
        json.loads(read._backend.to_str())["model"]["merges"]
        == json.loads(modern.backend_tokenizer.to_str())["model"]["merges"]
    )
    # Spaces are put before texts in two ways: Llama 2's and llama.cpp's is the one that it builds for Phi 3 alone.
    older = theirs.add_gguf_special_tokens(theirs.phi3_tokenizer(described), described)
    for text in (*SENTENCES, *WITH_SPACES_AND_CONTROL):
        expected = older.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert read.encode_batch([text]) == [[1, *expected]]
        if text in SENTENCES:
            assert expected == modern.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if "[" not in text and "<" not in text:
            assert read._backend.decode(expected) == text
    vocabulary = read.vocabulary()
    assert vocabulary.special_ids == {0, 1, 2, PIECES.index("[CONTROL]")}
    assert b"".join(map(vocabulary.bytes_of, expected_of(read, "日本語 \U0001f642"))).decode() == " 日本語 \U0001f642"


def expected_of(tokenizer: HFTokenizer, text: str) -> list[int]:
    (ids,) = tokenizer.encode_batch([text])
    assert isinstance(ids, list)
    return ids[1:]


def test_pieces_are_joined_as_sentencepiece_does_it_best_first(tmp_path: Path) -> None:
    scores = [0.0] * 259 + [-float((i + 1) * 37 % 101) for i in range(len(PIECES) - 262)] + [0.0] * 3
    assert len(set(scores)) == len(PIECES) - 261  # no two pieces are equally good
    path = write_sentencepiece(tmp_path / "m.gguf", lambda writer: writer.add_token_scores(scores))
    tokenizer, draw = HFTokenizer(path), random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("the inworlda ?é\u2019", k=draw.randrange(1, 30)))
        symbols = list("\u2581" + text.replace(" ", "\u2581"))
        while joined := [
            (scores[PIECES.index(first + second)], -at, first + second)
            for at, (first, second) in enumerate(itertools.pairwise(symbols))
            if first + second in PIECES
        ]:
            _, at, piece = max(joined)
            symbols[-at : 2 - at] = [piece]
        pieces = [[s] if s in PIECES else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
        assert expected_of(tokenizer, text) == [PIECES.index(piece) for found in pieces for piece in found], text


def test_the_space_before_a_text_and_the_token_before_it_are_there_unless_the_file_says_no(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(False)

    tokenizer = HFTokenizer(write_sentencepiece(tmp_path / "m.gguf", change))
    found = tokenizer.encode_batch(["in", " in"])
    assert found == [[PIECES.index("in")], [PIECES.index("\u2581in")]]
    assert [tokenizer._backend.decode(ids) for ids in found] == ["in", " in"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w.add_token_scores([0.5]), f"scores must have one entry for each of {len(PIECES)} tokens"),
        (lambda w: w.add_token_scores([*SCORES, 0.5]), f"scores must have one entry for each of {len(PIECES)} tokens"),
        (
            lambda w: w.add_token_list(["?a", *PIECES[1:100], "?b", *PIECES[101:]]),
            "tokens holds no <0x61>, but must hold",
        ),
        (lambda w: w.add_token_list([*PIECES[:258], "?a", *PIECES[259:]]), "tokens holds no <0xFF>, but must hold"),
        (lambda w: w.add_token_scores([float("nan")] * len(PIECES)), "scores must be finite"),
        (lambda w: w.add_string("tokenizer.ggml.scores", "x"), "scores must be an array of float, not 'x'"),
    ],
)
def test_pieces_that_cannot_be_read_are_named(change: Callable[..., None], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", change))
    assert expected in str(caught.value)


def test_more_tokens_than_the_model_has_rows_for_are_refused_before_a_prompt_holds_one(tmp_path: Path) -> None:
    count = len(PIECES)
    for rows in (count - 1, count, count + 64):  # models are padded
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_tensor("token_embd.weight", np.zeros((rows, 32), np.float32))
        path = write_sentencepiece(tmp_path / "m.gguf", writer=writer)
        if rows >= count:
            assert load_tokenizer(path).encode_batch(["in"]) == [[1, PIECES.index("\u2581in")]]
            continue
        with pytest.raises(ModelLoadError, match=f"tokens must have at most {rows} entries.*, not {count}; another"):
            load_tokenizer(path)


def test_a_file_without_one_takes_token_ids(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert isinstance(load_tokenizer(tmp_path / "m.gguf"), NoTokenizer)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.model is missing"):
        load_tokenizer(tmp_path / "m.gguf", is_asked_for=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda w: w.add_tokenizer_model("t5"),
            "model 't5' is not supported, only 'gpt2' (byte-level BPE) and 'llama'",
        ),
        (lambda w: w.add_add_eos_token(True), "tokenizer.ggml.add_eos_token true is not supported"),
        (lambda w: w.add_tokenizer_model("llama"), "tokenizer.ggml.tokens holds no <0x00>, but must hold all 256"),
        (
            lambda w: w.add_tokenizer_pre("tekken"),
            "tokenizer.ggml.pre 'tekken' is not supported, only 'qwen2', 'deepseek-r1-qwen'",
        ),
        (lambda w: w.add_token_types([1, 2]), "token_type must have one entry for each of"),
        (lambda w: w.add_token_types([1] * 10**5), "token_type must have one entry for each of"),
        (lambda w: w.add_token_merges(["ab"]), "merges must hold two parts with a space between, not 'ab'"),
        (lambda w: w.add_token_merges(["h zq"]), "merges holds 'h zq', but tokenizer.ggml.tokens holds no 'zq'"),
        (lambda w: w.add_token_merges(["zq h"]), "merges holds 'zq h', but tokenizer.ggml.tokens holds no 'zq'"),
        (lambda w: w.add_token_merges(["h e", "q z"]), "merges holds 'q z', but tokenizer.ggml.tokens holds no 'qz'"),
        # What no token is as long as: the library does not say so, it panics.
        (lambda w: w.add_token_merges([f"{LONGEST} {LONGEST}"]), f"tokenizer.ggml.tokens holds no '{LONGEST}{LONGEST}"),
        (lambda w: w.add_eos_token_id(10**6), "tokenizer.ggml.eos_token_id 1000000 is none of"),
        (lambda w: w.add_uint32("tokenizer.ggml.tokens", 3), "tokenizer.ggml.tokens must be an array of str, not 3"),
        (lambda w: w.add_uint32("tokenizer.chat_template", 3), "tokenizer.chat_template must be a string, not 3"),
    ],
)
def test_what_cannot_be_read_is_named(change: Callable[..., None], expected: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", change)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
