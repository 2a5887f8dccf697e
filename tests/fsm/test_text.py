import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from novainfer.fsm.simulation.checks.oracle import whole_characters
from novainfer.fsm.text import TextAssembler, Vocabulary

PIECES = [b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f\x98", b"\x80", b"\xff", b"", b"<s>"]
SPECIAL = len(PIECES) - 1
VOCABULARY = Vocabulary.build(PIECES, frozenset([SPECIAL]))

tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=20)
stops = st.lists(st.sampled_from(["a", "b", "aba", "abb", "\u00e9", "b\u20ac", "\ufffd", "<s>"]), max_size=3)


def data_of(ids: list[int], *, skip_special: bool = True) -> bytes:
    return b"".join(PIECES[i] for i in ids if i != SPECIAL or not skip_special)


@settings(max_examples=300, deadline=None)
@given(tokens, st.booleans())
def test_all_pushes_and_the_flush_together_are_the_decoded_bytes(ids, skip_special):
    text = TextAssembler(VOCABULARY, [], skip_special=skip_special)
    sent = "".join(text.push(i) for i in ids) + text.flush()
    assert sent == data_of(ids, skip_special=skip_special).decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(tokens, stops, st.booleans())
@example([0, 1, 0, 0], ["aba"], False)
def test_what_is_sent_ends_before_the_first_stop_string_and_never_in_the_middle_of_one(ids, stop_strings, include):
    text = TextAssembler(VOCABULARY, stop_strings, include_stop=include)
    sent = ""
    for count, token_id in enumerate(ids, 1):
        sent += text.push(token_id)
        so_far = whole_characters(data_of(ids[:count]))
        found = sorted((at, s) for s in stop_strings if (at := so_far.find(s)) >= 0)
        if found:
            at, stop = found[0]
            assert text.stopped_by == stop
            assert sent == so_far[: at + len(stop) if include else at]
            return
        assert text.stopped_by is None
        assert so_far.startswith(sent)
        begun = [n for s in stop_strings for n in range(1, len(s)) if so_far.endswith(s[:n])]
        assert len(so_far) - len(sent) == max(begun, default=0), "what may begin a stop string is held back, no more"
    assert sent + text.flush() == data_of(ids).decode("utf-8", "replace")


def test_a_character_is_sent_when_its_last_byte_is_there():
    text = TextAssembler(VOCABULARY, [])
    assert [text.push(i) for i in (5, 6)] == ["", "\u20ac"]


def test_an_unfinished_character_becomes_a_replacement_character_at_the_end():
    text = TextAssembler(VOCABULARY, [])
    assert text.push(3) == ""
    assert text.flush() == "\ufffd"


def test_invalid_bytes_become_replacement_characters_at_once():
    text = TextAssembler(VOCABULARY, [])
    assert text.push(9) == "\ufffd"


def test_special_tokens_give_no_text_unless_asked_for():
    assert TextAssembler(VOCABULARY, []).push(SPECIAL) == ""
    assert TextAssembler(VOCABULARY, [], skip_special=False).push(SPECIAL) == "<s>"


def test_a_special_token_between_the_bytes_of_a_character_does_not_split_it():
    text = TextAssembler(VOCABULARY, [])
    assert [text.push(i) for i in (3, SPECIAL, 4)] == ["", "", "\u00e9"]


def test_a_stop_string_is_text_like_any_other_while_the_request_may_not_stop():
    text = TextAssembler(VOCABULARY, ["ab"])
    assert text.push(0) == ""
    assert text.push(1, may_stop=False) == "ab"
    assert text.stopped_by is None
    assert text.push(2) == ""
    assert text.stopped_by == "ab"


@pytest.mark.parametrize("token_id", [len(PIECES), 10_000])
def test_an_id_that_the_tokenizer_does_not_have_gives_no_text(token_id):
    assert TextAssembler(VOCABULARY, ["a"]).push(token_id) == ""
