"""Machines as data: what is read back is what was written, and nothing that a file says is run."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec
import pytest

from novainfer.fsm.client.stream import Stream
from novainfer.fsm.messages.events import Arrive, Cancel, Cause, Chat, Output
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.outputs import TokenLogprob
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.recording.pack import RENAMED, Kinds, PackError, pack, unpack
from novainfer.fsm.schedule.planner import Limits
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.text import TextAssembler, Vocabulary, text_assembler

VOCABULARY = Vocabulary.build([b"a", b"\xc3", b"\xa9", b"<eos>"], frozenset([3]))
KNOWN = {"vocabulary": VOCABULARY}


def there_and_back(thing: Any) -> Any:
    kinds = Kinds()
    return unpack(pack(thing, kinds, KNOWN), kinds.names, KNOWN)


@pytest.mark.parametrize(
    "thing",
    [
        None,
        [1, "a", b"b", 2.5, True, None],
        (1, (2, [3])),
        {1: "a", b"k": {"x": [1, {2, 3}]}, (1, 2): frozenset([4])},
        OrderedDict([(3, None), (1, None)]),
        Counter({"a": 2}),
        deque([1, deque([2], maxlen=3)]),
        Cause.TIMEOUT,
        [2**64, -(2**70), [1, (2**200,)], {"deep": 2**65}],
        Cancel(7, Cause.CLIENT),
        Arrive(
            stream_id=1,
            prompt=Chat(messages=[{"role": "user", "content": "hi", "n": 2**80}]),
            params=SamplingParams(seed=2**64 - 1, stop=["a"], logit_bias={3: 1.5}, timeout_s=2.0),
            seed=2**64 - 1,
            num_tokens=3,
        ),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_is_read_back_is_equal_and_of_the_same_types(thing: Any) -> None:
    found = there_and_back(thing)
    assert found == thing
    assert repr(found) == repr(thing)


def test_one_object_in_two_places_is_one_object_again() -> None:
    shared = [1, 2]
    found = there_and_back({"a": shared, "b": (shared, shared)})
    found["a"].append(3)
    assert found["b"][0] is found["b"][1] is found["a"]


def test_equal_lists_of_modes_give_equal_bytes_whether_they_are_one_object_or_two() -> None:
    one, other = (Mode(), Mode("plain")), (Mode(), Mode("plain"))
    assert one is not other
    assert pack([one, one], Kinds()) == pack([one, other], Kinds())
    assert unpack(pack([one, other], kinds := Kinds()), kinds.names) == [one, other]


def test_equal_sets_give_equal_bytes_whatever_their_order() -> None:
    first, second = {b"a", b"b", b"c"}, {b"c", b"b", b"a"}
    second.add(b"d")
    second.remove(b"d")
    assert pack(first, Kinds()) == pack(second, Kinds())


def test_half_a_character_that_was_held_back_is_still_held_back() -> None:
    text = TextAssembler(VOCABULARY, ["xyz"])
    assert text.push(1) == ""
    found = there_and_back(text)
    assert found._vocabulary is VOCABULARY
    assert found.push(2) == text.push(2) == "\u00e9"


def test_marks_that_were_not_taken_and_where_the_next_ones_stand_are_kept() -> None:
    text = text_assembler(VOCABULARY, ["az"], include_stop=False, skip_special=True, marked_ids=[0, 3])
    text.push(0)
    found = there_and_back(text)
    for one in (text, found):
        one.push(3)
        one.push(0)
    marks = text.take_marks()
    assert found.take_marks() == marks
    assert [(mark.token_id, mark.num_tokens) for mark in marks] == [(0, 1), (3, 2), (0, 3)]


def test_what_is_known_is_written_by_its_name() -> None:
    vocabulary = Vocabulary.build([b"x" * 1000] * 1000, frozenset())
    assert len(pack([vocabulary, vocabulary], Kinds(), {"v": vocabulary})) < 20


def test_of_log_probabilities_only_their_number_is_kept() -> None:
    done = StepDone(1, 0, [5, 6], [(-0.5, [1, 2], [0.1, 0.2]), None])
    assert there_and_back(done) == StepDone(1, 0, [5, 6], [(0.0, [0, 0], [0.0, 0.0]), None])
    output = Output(1, 1, 0, [5], "a", [TokenLogprob(5, b"a", -0.5, [(5, b"a", -0.5)])])
    found = there_and_back([output, output])
    assert found[0] is found[1]
    assert found[0] == Output(1, 1, 0, [5], "a", [TokenLogprob(0, b"", 0.0, [(0, b"", 0.0)])])


def test_an_object_of_another_package_cannot_be_written() -> None:
    with pytest.raises(PackError, match="Thread"):
        pack({"x": threading.Thread()}, Kinds())


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "subprocess:Popen",
        "novainfer.fsm.core.machine:Machine.handle",
        "novainfer.fsm.recording.pack:import_module",
        "novainfer.fsm.simulation.bugs.mutants:Mutant",
        "novainfer.fsm.messages.errors:NovaInferError",
        "",
    ],
)
def test_a_file_can_name_nothing_but_the_classes_of_this_package(name: str) -> None:
    kinds = Kinds()
    data = pack(Cancel(1, Cause.CLIENT), kinds)
    kinds.names = [(name, fields) for _, fields in kinds.names]
    with pytest.raises(PackError, match="this version has no"):
        unpack(data, kinds.names)


def test_what_older_versions_wrote_is_read_under_the_names_of_today() -> None:
    """They wrote the folder too, and had other names for some classes and attributes."""
    kinds = Kinds()
    scheduler = Scheduler(Limits(), VOCABULARY)
    data = pack([scheduler, Cancel(7, Cause.CLIENT)], kinds, KNOWN)
    was = {new: old for old, new in RENAMED.items()}
    older = [
        (f"novainfer.fsm.{was.get(name, name)}", ["trouble" if x == "recovery" else x for x in fields])
        for name, fields in kinds.names
    ]
    assert "novainfer.fsm.trouble:Trouble" in dict(older)
    assert "trouble" in dict(older)["novainfer.fsm.scheduler:Scheduler"]
    found, cancel = unpack(data, older, KNOWN)
    assert cancel == Cancel(7, Cause.CLIENT)
    assert pack([found, cancel], Kinds(), KNOWN) == data


@pytest.mark.parametrize("field", ["handle", "_read", "__class__", "__dict__", "TABLE", "has_news", "nonsense"])
def test_a_file_can_set_nothing_but_fields(field: str) -> None:
    kinds = Kinds()
    data = pack(Stream(1, "name", 1), kinds)
    names = [(name, [field, *fields[1:]] if name.endswith(":Stream") else fields) for name, fields in kinds.names]
    with pytest.raises(PackError, match=f"Stream has no '{field}'"):
        unpack(data, names)


def test_damaged_bytes_are_an_error_and_nothing_else() -> None:
    kinds = Kinds()
    stream = Stream(1, "name", 2)
    whole = pack([stream, {"a": [1, (2, 3)]}, {4}, deque([stream])], kinds)
    told = 0
    for at in range(len(whole)):
        for value in (0, 1, 0x90, 0xC0, 0xFF):
            try:
                unpack(whole[:at] + bytes([value]) + whole[at + 1 :], kinds.names)
            except PackError:
                told += 1
        with pytest.raises(PackError):
            unpack(whole[:at], kinds.names)
    assert told > len(whole)


def test_lists_in_lists_without_end_are_an_error() -> None:
    data = b"".join([b"\x92\x03\x91"] * 5000) + msgspec.msgpack.encode([2, []])
    with pytest.raises(PackError):
        unpack(data, [])
