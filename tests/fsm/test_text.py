import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from novainfer.fsm.messages.outputs import Mark
from novainfer.fsm.simulation.checks.oracle import whole_characters
from novainfer.fsm.text import TextAssembler, Vocabulary, text_assembler

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


def marking(stop_strings: list[str], *, skip_special: bool = False) -> TextAssembler:
    return text_assembler(
        VOCABULARY, stop_strings, include_stop=False, skip_special=skip_special, marked_ids=[SPECIAL, 2]
    )


@settings(max_examples=300, deadline=None)
@given(tokens, st.lists(st.sampled_from(["b<", "<s>b", "aba", "abb", "s>ab"]), max_size=2), st.booleans())
@example([2, SPECIAL, 2, 0], ["b<s>x"], False)
def test_a_mark_says_which_characters_of_all_the_text_are_those_of_a_token(ids, stop_strings, skip_special):
    text = marking(stop_strings, skip_special=skip_special)
    plain = TextAssembler(VOCABULARY, stop_strings, skip_special=skip_special)
    sent, marks, pushed = "", [], []
    for token_id in ids:
        pushed.append(token_id)
        piece = text.push(token_id)
        assert piece == plain.push(token_id)
        sent += piece
        marks += text.take_marks()
        if text.stopped_by is not None:
            break
    else:
        sent += text.flush()
    places = [at for at, token_id in enumerate(pushed, 1) if token_id in (SPECIAL, 2)]
    if text.stopped_by is not None and places and places[-1] == len(pushed):
        places.pop()
    assert [mark.num_tokens for mark in marks] == places
    for mark in marks:
        own = "" if mark.token_id == SPECIAL and skip_special else PIECES[mark.token_id].decode()
        assert mark.end - mark.start == len(own)
        if mark.end <= len(sent):
            assert sent[mark.start : mark.end] == own


def test_a_mark_comes_with_its_token_though_a_stop_string_may_begin_in_its_text():
    text = marking(["<s>x"])
    assert (text.push(0), text.take_marks()) == ("a", [])
    assert (text.push(SPECIAL), text.take_marks()) == ("", [Mark(SPECIAL, 1, 4, 2)])
    assert (text.push(1), text.take_marks()) == ("<s>b", [])
