"""The journal's file, what is made of tokens again, and streams that go on where their client has left them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer import Delta, InvalidParameter, SamplingParams
from novainfer.fsm.messages.outputs import FinishReason
from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.simulation.checks.oracle import VOCABULARY
from novainfer.fsm.text import Vocabulary, text_assembler
from novainfer.server.http.errors import ErrorDetail
from novainfer.server.journal.file import JournalFile
from novainfer.server.journal.journal import Journal
from novainfer.server.journal.pieces import Cutter
from novainfer.server.journal.records import Asked, Said, Stored, said_of
from novainfer.server.openai.chunks import DONE
from novainfer.server.openai.kept_stream import Cursor, Numbering, cursor_of
from novainfer.server.settings import JOURNAL_BYTES_MIN as BYTES_MIN
from tests.server.conftest import Serve, eventually
from tests.server.fakes import ANSWER, FakeEngine
from tests.server.test_tools import PARIS, TOOL

ASKED = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "stream_options": {"include_usage": True}}
LONG = tuple(f" {at}" for at in range(12))
NAMED = {"x-request-id": "one"}


def asked(name: str = "chatcmpl-a", owner: str = "") -> Asked:
    return Asked(
        kind="chatcmpl", id=name, owner=owner, client="", model="fake", created=1, began_s=1.0, body=b"{}",
        prompts=["Hello"], params=SamplingParams(seed=1), seeds=[1], salt=b"salt",
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


# ---- the file ------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_journal_is_refused_in_a_sentence(path: Path) -> None:
    def why() -> str:
        with pytest.raises(InvalidParameter) as found:
            JournalFile(path, 1 << 20, 60.0)
        assert found.value.param == "journal"
        return found.value.message

    path.write_bytes(b"not a database, though it is long enough to be one" * 40)
    assert "file is not a database" in why()
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (one)")
    other.close()
    assert why().endswith("is a file of another program")
    path.unlink()
    JournalFile(path, 1 << 20, 60.0).close()
    assert path.stat().st_mode & 0o077 == 0, "it holds prompts and answers"
    with sqlite3.connect(path) as later:
        later.execute("PRAGMA user_version = 99")
    later.close()
    assert "is of version 99, and this server writes version 1: move it away" in why()
    path.unlink()
    held = JournalFile(path, 1 << 20, 60.0)
    assert "another server has it" in why()
    held.close()
    assert "cannot be used: Is a directory" in _why_not(path.parent)
    assert "No such file or directory" in _why_not(path.parent / "no" / "journal.db")


def _why_not(path: Path) -> str:
    with pytest.raises(InvalidParameter) as found:
        JournalFile(path, 1 << 20, 60.0)
    return found.value.message.replace("unable to open database file", "Is a directory")


def test_what_was_committed_survives_a_torn_end_of_the_file(path: Path) -> None:
    """A server that is killed leaves its log of writes behind; of the last one perhaps only a part, without power."""
    file = JournalFile(path, 1 << 20, 60.0)
    for at in range(20):
        file.begin()
        if not at:
            file.open(1, asked(), "print")
        file.add(1, [Said(0, at)])
        file.commit()
    log = path.with_name(path.name + "-wal")
    kept, whole = path.parent / "kept.db", log.read_bytes()
    for cut in (1, 37, 4096, len(whole) // 2):
        kept.write_bytes(path.read_bytes())
        kept.with_name("kept.db-wal").write_bytes(whole[:-cut])
        again = JournalFile(kept, 1 << 20, 60.0)
        found = again.unended()
        again.close()
        for left in path.parent.glob("kept.db*"):
            left.unlink()
        tokens = [said.token_id for stored in found for said in stored.said]
        assert tokens == list(range(len(tokens)))
        assert len(tokens) >= 19 or cut > 4000
    file.close()


def test_it_is_pruned_by_age_and_by_bytes_and_what_goes_on_is_not(path: Path) -> None:
    file = JournalFile(path, BYTES_MIN, ttl_s=60.0)
    file.begin()
    for serial in range(1, 30):
        file.open(serial, asked(f"chatcmpl-{serial}"), "print")
        file.add(serial, [Said(0, token) for token in range(900)])
        if serial > 2:
            file.end(serial, None, time.time())
        file.prune()
    file.commit()
    assert file.num_bytes < BYTES_MIN
    assert [stored.serial for stored in file.unended()] == [1, 2]
    left = [stored.serial for stored in file.ended("chatcmpl")]
    assert left == list(range(30 - len(left), 30))
    assert left, "the latest stay"
    file.close()
    later = JournalFile(path, BYTES_MIN, ttl_s=-1.0)
    later.begin()
    later.prune()
    later.commit()
    assert not later.ended("chatcmpl")
    assert len(later.unended()) == 2
    later.close()


async def test_answers_that_cannot_be_written_go_on_and_later_ones_are_written_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(path, BYTES_MIN, ttl_s=60.0)
    entries = [journal.open(asked(f"chatcmpl-{at}")) for at in range(60)]
    for entry in entries:
        for token in range(1500):
            journal.add(entry, Said(0, token))
    await journal.flush()
    broken = [entry for entry in entries if entry.is_broken]
    assert broken, "the file is smaller than all that"
    assert journal.failures_total
    assert caplog.text.count("cannot be written (database or disk is full): requests go on") == 1
    for entry in entries:
        journal.drop(entry)
    await journal.flush()
    entry = journal.open(asked("chatcmpl-later"))
    assert await journal.wait(entry)
    journal.add(entry, Said(0, 1))
    journal.end(entry, ErrorDetail("no", "server_error", None, "broken"), time.time())
    found = await journal.find("chatcmpl-later", None)
    assert found is not None
    assert [said.token_id for said in found.said] == [1]
    assert found.error is not None
    assert found.error.code == "broken"
    await asyncio.to_thread(journal.close)


async def test_an_answer_of_which_something_is_missing_gets_no_more(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path, 1 << 20, ttl_s=60.0)
    entry, other = journal.open(asked()), journal.open(asked("chatcmpl-b"))
    for token in range(5):
        journal.add(entry, Said(0, token))
    await journal.flush()

    def fails() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(journal._file, "begin", fails)
        journal.add(entry, Said(0, 5))
        await journal.flush()
    for one in (entry, other):
        journal.add(one, Said(0, 6))
    journal.end(entry, None, time.time())
    await journal.flush()
    found = {stored.asked.id: [said.token_id for said in stored.said] for stored in await journal.unended()}
    assert found == {"chatcmpl-a": [0, 1, 2, 3, 4], "chatcmpl-b": [6]}
    journal.add(other, Said(0, 7))
    other.is_broken = True  # while that waits, behind a token that could not be written
    await journal.flush()
    [_, stored] = await journal.unended()
    assert [said.token_id for said in stored.said] == [6]
    await asyncio.to_thread(journal.close)


async def test_what_cannot_be_encoded_is_no_other_answers_loss(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(path, 1 << 20, ttl_s=60.0)
    one, hostile = journal.open(asked()), asked("chatcmpl-b")
    hostile.prompts = ["half of a pair: \ud800"]
    other = journal.open(hostile)
    journal.add(one, Said(0, 5))
    journal.add(other, Said(0, 5))
    assert await journal.wait(one)
    assert not await journal.wait(other)
    assert "1 of them could not be resumed" in caplog.text
    await journal.flush()
    [stored] = await journal.unended()
    assert stored.asked.id == "chatcmpl-a"
    assert [said.token_id for said in stored.said] == [5]
    await asyncio.to_thread(journal.close)


async def test_what_was_cancelled_does_not_go_on_though_something_of_it_was_not_written(path: Path) -> None:
    journal = Journal(path, 1 << 20, ttl_s=60.0)
    cancelled, dropped = journal.open(asked()), journal.open(asked("chatcmpl-b"))
    await journal.flush()
    for entry in (cancelled, dropped):
        entry.is_broken = True
    journal.end(cancelled, ErrorDetail("no", "server_error", None, "request_cancelled"), time.time())
    journal.drop(dropped)
    await journal.flush()
    assert await journal.unended() == []
    await asyncio.to_thread(journal.close)


async def test_a_full_file_has_room_again_when_what_filled_it_has_ended(path: Path) -> None:
    journal = Journal(path, BYTES_MIN, ttl_s=60.0)
    entries = []
    while True:
        entries.append(journal.open(asked(f"chatcmpl-{len(entries)}")))
        if not await journal.wait(entries[-1]):
            break
        for token in range(1500):
            journal.add(entries[-1], Said(0, token))
    for entry in entries:
        entry.is_broken = True
        journal.end(entry, None, time.time())
    later = journal.open(asked("chatcmpl-later"))
    for token in range(1500):
        journal.add(later, Said(0, token))
    assert await journal.wait(later)
    await asyncio.to_thread(journal.close)


async def test_what_is_too_old_goes_though_nothing_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, 1 << 20, ttl_s=-1.0)
    entry = journal.open(asked())
    assert await journal.wait(entry)
    journal.end(entry, None, time.time())
    await journal.flush()
    assert await journal.find("chatcmpl-a", None) is not None
    monkeypatch.setattr("novainfer.server.journal.journal.PRUNE_EVERY_S", 0.01)
    await asyncio.sleep(0.02)
    assert await journal.find("chatcmpl-a", None) is None
    await asyncio.to_thread(journal.close)


async def test_what_is_too_old_is_gone_before_a_server_reads_it(path: Path) -> None:
    file = JournalFile(path, 1 << 20, ttl_s=60.0)
    file.begin()
    file.open(1, asked(), "print")
    file.end(1, None, time.time())
    file.commit()
    file.close()
    journal = Journal(path, 1 << 20, ttl_s=-1.0)
    assert await journal.ended("chatcmpl", 9) == []
    await asyncio.to_thread(journal.close)


def test_a_file_that_others_may_read_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    JournalFile(path, 1 << 20, 60.0).close()
    JournalFile(path, 1 << 20, 60.0).close()
    assert not caplog.text
    path.chmod(0o644)
    JournalFile(path, 1 << 20, 60.0).close()
    assert "others may read it (644): chmod 600" in caplog.text


def test_of_other_kinds_no_token_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JournalFile(path, 1 << 20, ttl_s=60.0)
    file.begin()
    file.open(1, asked(), "print")
    file.add(1, [Said(0, 1)])
    file.end(1, None, time.time())
    file.commit()
    assert len(file.ended("chatcmpl")) == 1
    monkeypatch.setattr("novainfer.server.journal.file.decoded_said", lambda data: pytest.fail("it is a chat's"))
    assert file.ended("resp") == []
    file.close()


async def test_only_the_same_owner_finds_an_answer(path: Path) -> None:
    journal = Journal(path, 1 << 20, ttl_s=60.0)
    journal.open(asked(owner="a"))
    assert await journal.find("chatcmpl-a", "a") is not None
    assert await journal.find("chatcmpl-a", None) is not None
    assert await journal.find("chatcmpl-a", "b") is None
    await asyncio.to_thread(journal.close)


# ---- pieces and events ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(2, 30), min_size=1, max_size=24),
    cuts=st.sets(st.integers(1, 23)),
    known=st.integers(0, 24),
    stop=st.sampled_from([None, ["ab"], ["bca", "c "]]),
    min_tokens=st.integers(0, 6),
)
def test_the_pieces_of_an_answer_are_the_same_however_its_deltas_were_merged(
    tokens: list[int], cuts: set[int], known: int, stop: list[str] | None, min_tokens: int
) -> None:
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=99)
    text = text_assembler(VOCABULARY, params.stop_strings, include_stop=False, skip_special=True, marked_ids=())
    single: list[Delta] = []
    for at, token in enumerate(tokens, 1):
        piece = Delta(request_id="a", token_ids=[token], text=text.push(token, may_stop=at >= min_tokens))
        piece.num_generated_tokens, piece.num_prompt_tokens, piece.seed = at, 3, 9
        piece.prompt_token_ids = [1, 2, 3] if at == 1 else None
        single.append(piece)
        if text.stopped_by is not None or at == len(tokens):
            piece.finish_reason, piece.stop_reason = FinishReason.STOP, text.stopped_by
            piece.text += "" if text.stopped_by is not None else text.flush()
            break
    right = Cutter(0, params, VOCABULARY)
    for piece in single:
        right.cut(piece)
    again = Cutter(0, params, VOCABULARY)
    for piece in right.pieces[:known]:  # what the journal had of it
        again.again(said_of(piece), "a")
    bounds = [0, *sorted(cut for cut in cuts if cut < len(single)), len(single)]
    for begin, end in pairwise(bounds):
        some = single[begin:end]
        merged = Delta(
            request_id="a",
            text="".join(piece.text for piece in some),
            token_ids=[token for piece in some for token in piece.token_ids],
            finish_reason=some[-1].finish_reason,
            stop_reason=some[-1].stop_reason,
            num_generated_tokens=end,
            num_prompt_tokens=3,
            seed=9,
            prompt_token_ids=[1, 2, 3] if not begin else None,
        )
        again.cut(merged)
    assert again.pieces == right.pieces


def test_an_events_id_says_what_of_each_choice_its_client_has() -> None:
    assert cursor_of("chatcmpl-a:b:3-4.1") == ("chatcmpl-a:b", Cursor((3, 4), 1))
    assert cursor_of("cmpl-1:") == ("cmpl-1", Cursor())
    for wrong in ("", "chatcmpl-a", "chatcmpl-a:x", "chatcmpl-a:1-", ":4", "chatcmpl-a:-1"):
        with pytest.raises(InvalidParameter):
            cursor_of(wrong)
    event = b'data: {"choices":[{"index":%d}]}\n\n'
    numbering = Numbering("a", 2, Cursor((2, 0)))
    told = [numbering.choices(event % index) for index in (0, 1, 0, 0)]
    assert told == [b"", b"id: a:2-1\n" + event % 1, b"", b"id: a:3-1\n" + event % 0]
    assert numbering.tail(DONE) == b"id: a:3-1.1\n" + DONE
    with pytest.raises(InvalidParameter, match="names 1 choices, and this answer has 2"):
        Numbering("a", 2, Cursor((2,)))


# ---- servers -------------------------------------------------------------------------------------------------------


class Spelled(FakeEngine):
    """One whose tokens have the texts that it gives."""

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.build([text.encode() for text in self.answer], frozenset())


def blocks(text: str) -> list[str]:
    return [block for block in text.split("\n\n") if block and not block.startswith(":")]


async def begun(
    url: str, engine: FakeEngine, num_tokens: int, num_events: int = 0, body: Any = ASKED, **headers: str
) -> list[str]:
    """The first events of a stream whose client leaves it after so many tokens, which are an event each or so many."""
    found = ""

    async def release() -> None:
        await engine.wait_until(lambda: engine.active)
        engine.release(num_tokens)

    releasing = asyncio.create_task(release())
    async with (
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers=NAMED | headers) as response,
    ):
        assert response.status_code == 200
        await releasing
        async for text in response.aiter_text():
            found += text
            if len(blocks(found)) >= (num_events or num_tokens) + 1:  # the role's is one more
                return blocks(found)
    raise AssertionError("it ended")


async def rest(url: str, method: str = "POST", path: str = "", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=10.0) as client:
        return await client.request(method, f"/v1/chat/completions{path}", json=ASKED, headers=headers)


def last_id(found: list[str]) -> str:
    return found[-1].split("\n")[0].removeprefix("id: ")


async def test_a_client_that_comes_back_gets_the_rest_and_no_other_does(serve: Serve, path: Path) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path, api_keys=("a", "b"))
    mine, theirs = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    first = await begun(server.url, engine, 2, **mine)
    assert last_id(first) == "chatcmpl-one:3"
    assert (await rest(server.url, **theirs, **{"last-event-id": last_id(first)})).status_code == 404
    wrong = await rest(server.url, **mine, **{"last-event-id": "nonsense"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "Last-Event-ID")
    asking = asyncio.create_task(rest(server.url, **mine, **{"last-event-id": last_id(first)}))
    await eventually(lambda: next(iter(server.service.kept.values()))._num_readers)
    engine.release(10)
    behind = blocks((await asking).text)
    # Now that it has ended it is read from the file: all of it, and by its address.
    whole = blocks((await rest(server.url, "GET", "/chatcmpl-one", **mine)).text)
    assert [*first, *behind] == whole
    assert [last_id([block]) for block in whole] == [
        *(f"chatcmpl-one:{at}" for at in range(1, len(ANSWER) + 3)),
        *(f"chatcmpl-one:{len(ANSWER) + 2}.{at}" for at in (1, 2)),
    ]
    assert (await rest(server.url, "GET", "/chatcmpl-one", **theirs)).json()["error"]["code"] == "answer_not_found"
    mixed = await rest(server.url, "GET", "/chatcmpl-one", **mine, **{"last-event-id": "chatcmpl-two:1"})
    assert mixed.status_code == 400
    assert len(engine.seen) == 1, "it was asked for once"
    assert not server.service.kept


@pytest.mark.parametrize("is_ended_well", [True, False])
async def test_an_answer_that_ends_while_it_is_looked_for_is_found(
    serve: Serve, path: Path, monkeypatch: pytest.MonkeyPatch, is_ended_well: bool
) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    journal, kept = server.service.journal, server.service.kept
    assert journal is not None
    had = await begun(server.url, engine, 2)
    find, [answer] = journal.find, kept.values()
    looks = [await find("chatcmpl-one", None)]  # as one had it that began before the end
    assert looks[0] is not None
    assert looks[0].ended_s is None
    engine.release(10) if is_ended_well else answer.cancel()
    await eventually(lambda: not kept)

    async def late(name: str, sees: str | None) -> Stored | None:
        return looks.pop() if looks else await find(name, sees)

    monkeypatch.setattr(journal, "find", late)
    behind = await rest(server.url, **{"last-event-id": last_id(had)})
    assert behind.status_code == 200
    assert not looks
    assert ("ld" in behind.text) is is_ended_well
    assert ("request_cancelled" in behind.text) is not is_ended_well


async def test_running_usage_has_the_prompts_tokens_from_the_first_chunk_on(serve: Serve, path: Path) -> None:
    server = await serve(Spelled(), journal=path)
    asked = ASKED | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with httpx.AsyncClient(base_url=server.url, timeout=10.0) as client:
        told = (await client.post("/v1/chat/completions", json=asked, headers=NAMED)).text
        again = (await client.get("/v1/chat/completions/chatcmpl-one")).text
    usages = [json.loads(found)["usage"] for found in re.findall("data: ({.*})", told)]
    assert {usage["prompt_tokens"] for usage in usages} == {7}
    assert [usage["completion_tokens"] for usage in usages] == [*range(len(ANSWER) + 1), len(ANSWER), len(ANSWER)]
    assert blocks(again) == blocks(told)


async def test_fewer_events_of_more_tokens_are_the_same_when_they_are_told_again(serve: Serve, path: Path) -> None:
    engine = Spelled()
    server = await serve(engine, journal=path, stream_interval=3)
    whole = blocks((await rest(server.url, **NAMED)).text)
    assert len(whole) == 5 + 2  # role, "Hello", three tokens, the last one, its end; usage and [DONE]
    for at in range(1, 6):
        behind = await rest(server.url, **{"last-event-id": f"chatcmpl-one:{at}"})
        assert blocks(behind.text) == whole[at:]
    server.stop.set()
    await eventually(lambda: engine.is_closed)
    await asyncio.to_thread(server.service.journal.close)  # type: ignore[union-attr]
    later = await serve(Spelled(), journal=path)  # another interval is for other requests
    assert blocks((await rest(later.url, **{"last-event-id": "chatcmpl-one:3"})).text) == whole[3:]


async def test_an_answer_that_is_to_end_with_its_client_does_in_spite_of_the_journal(serve: Serve, path: Path) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path, journal_grace_s=3600.0)
    await begun(server.url, engine, 1, body=ASKED | {"on_disconnect": "cancel"}, **{"x-request-id": "two"})
    await engine.wait_until(lambda: engine.left_early)
    await begun(server.url, engine, 1, body=ASKED | {"on_disconnect": "continue"})
    [kept] = server.service.kept.values()
    await eventually(lambda: not kept._num_readers)
    for _ in range(20):
        await asyncio.sleep(0)
    assert [name.partition(".")[2] for name in engine.left_early] == ["chatcmpl-two"]
    assert engine.active


async def test_an_answer_that_nobody_comes_back_to_is_cancelled(serve: Serve, path: Path) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path, journal_grace_s=0.05)
    first = await begun(server.url, engine, 1)
    await engine.wait_until(lambda: engine.left_early)
    told = blocks((await rest(server.url, **{"last-event-id": last_id(first)})).text)
    assert "request_cancelled" in told[-1] or "cancelled" in told[-1]


async def stopped_in_the_middle(serve: Serve, path: Path, **settings: Any) -> list[str]:
    """What a client has of an answer whose server was told to stop."""
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path, **settings)
    first = await begun(server.url, engine, 2)
    server.stop.set()
    await eventually(lambda: engine.is_closed)
    await asyncio.to_thread(server.service.journal.close)  # type: ignore[union-attr]
    return first


async def test_another_server_goes_on_with_its_tokens_and_its_seed(serve: Serve, path: Path) -> None:
    first = await stopped_in_the_middle(serve, path)
    engine = Spelled()
    server = await serve(engine, journal=path, resume=True)
    await eventually(lambda: not server.service.kept)
    [[committed]] = engine.committed
    assert committed.token_ids == [0, 1]
    assert engine.seen[0][0] == [1, 2, 3], "the prompt as it was rendered then"
    assert engine.seen[0][1].seed == 4711, "the seed that was drawn then"
    whole = blocks((await rest(server.url, "GET", "/chatcmpl-one")).text)
    assert whole[: len(first)] == first
    assert "".join(ANSWER[2:4]) in "".join(block.split('"content":"')[-1].split('"')[0] for block in whole[3:])
    assert whole[-1].endswith("data: [DONE]")


def test_a_damaged_journal_is_refused_in_a_sentence(path: Path) -> None:
    file = JournalFile(path, 1 << 20, 60.0)
    file.begin()
    for serial in range(1, 9):
        file.open(serial, asked(f"chatcmpl-{serial}"), "print")
        file.add(serial, [Said(0, token) for token in range(2000)])
    file.commit()
    file.close()
    data = bytearray(path.read_bytes())
    for at in (9000, 30_000):
        path.write_bytes(data[:at] + bytes(255 - byte for byte in data[at : at + 9000]) + data[at + 9000 :])
        with pytest.raises(InvalidParameter, match=r"^journal .* cannot be used: .*(damaged|malformed)"):
            JournalFile(path, 1 << 20, 60.0)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InvalidParameter, match=r"^journal .* cannot be used: .*(damaged|malformed)"):
        JournalFile(path, 1 << 20, 60.0)


async def test_calls_of_tools_keep_their_ids(serve: Serve, path: Path) -> None:
    formats = Formats(tool_calls="hermes", marker_ids={"<tool_call>": 0, "</tool_call>": len(PARIS) - 1})
    engine = Spelled(answer=PARIS, is_paced=True)
    engine.model_info = msgspec.structs.replace(engine.model_info, formats=formats)
    server = await serve(engine, journal=path)
    first = await begun(server.url, engine, 7, 3, ASKED | {"tools": [TOOL]})
    server.stop.set()
    await eventually(lambda: engine.is_closed)
    await asyncio.to_thread(server.service.journal.close)  # type: ignore[union-attr]
    again = Spelled(answer=PARIS)
    again.model_info = engine.model_info
    server = await serve(again, journal=path, resume=True)
    whole = blocks((await rest(server.url, "GET", "/chatcmpl-one")).text)
    assert whole[: len(first)] == first
    assert any('"id":"call_' in block for block in first)
    assert any('"finish_reason":"tool_calls"' in block for block in whole)


@pytest.mark.parametrize(
    ("settings", "fingerprint", "said"),
    [
        ({"resume": False}, "fake", "without --resume"),
        ({"resume": True}, "another", "another model, other settings of it, or another version"),
    ],
)
async def test_what_cannot_go_on_ends_with_a_sentence(
    serve: Serve, path: Path, settings: dict[str, bool], fingerprint: str, said: str
) -> None:
    first = await stopped_in_the_middle(serve, path)
    engine = Spelled()
    engine.print = fingerprint
    server = await serve(engine, journal=path, **settings)
    told = blocks((await rest(server.url, **{"last-event-id": last_id(first)})).text)
    assert said in told[-1]
    assert '"code":"not_resumed"' in told[-1]
    assert not engine.seen


async def test_what_ends_a_server_each_time_is_not_tried_for_ever(serve: Serve, path: Path) -> None:
    first = await stopped_in_the_middle(serve, path)
    for _ in range(3):
        engine = Spelled(is_paced=True)
        server = await serve(engine, journal=path, resume=True)
        await engine.wait_until(lambda engine=engine: engine.active)
        server.stop.set()
        await eventually(lambda engine=engine: engine.is_closed)
        await asyncio.to_thread(server.service.journal.close)  # type: ignore[union-attr]
    engine = Spelled()
    server = await serve(engine, journal=path, resume=True)
    told = blocks((await rest(server.url, **{"last-event-id": last_id(first)})).text)
    assert "went on 3 times" in told[-1]
    assert not engine.seen


async def test_an_answer_that_cannot_begin_again_ends_for_its_client(serve: Serve, path: Path) -> None:
    """It is cancelled before its first token here, or no engine begins it: whoever waits for it is told."""
    first = await stopped_in_the_middle(serve, path)
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path, resume=True)
    await engine.wait_until(lambda: engine.active)
    asking = asyncio.create_task(rest(server.url, **{"last-event-id": last_id(first)}))
    [kept] = server.service.kept.values()
    await eventually(lambda: kept._num_readers)
    kept.cancel()
    assert "cancelled" in blocks((await asking).text)[-1]
    assert engine.left_early
    assert not server.service.kept
    assert await server.service.journal.unended() == []  # type: ignore[union-attr]


async def test_an_answer_that_the_engine_refuses_when_it_goes_on_ends_with_that(serve: Serve, path: Path) -> None:
    first = await stopped_in_the_middle(serve, path)
    engine = Spelled()

    def refuses(*_: Any) -> list[int]:
        raise InvalidParameter("there is less room than there was", param="max_tokens")

    engine.check_room = refuses  # type: ignore[method-assign]
    server = await serve(engine, journal=path, resume=True)
    told = blocks((await rest(server.url, **{"last-event-id": last_id(first)})).text)
    assert "there is less room than there was" in told[-1]
    assert not server.service.kept


async def test_what_goes_on_is_counted_for_its_conversation_and_its_user(serve: Serve, path: Path) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    await begun(server.url, engine, 2, body=ASKED | {"session_id": "chat", "user": "u"})
    server.stop.set()
    await eventually(lambda: engine.is_closed)
    await asyncio.to_thread(server.service.journal.close)  # type: ignore[union-attr]
    server = await serve(Spelled(), journal=path, resume=True, user_token_budget=1000, session_token_budget=1000)
    await eventually(lambda: not server.service.kept)
    spending = server.service.spending
    for budgets, name in ((spending.sessions, "chat"), (spending.users, "u")):
        purse = budgets.find(("", name), spending.clock())
        assert purse is not None
        await eventually(lambda purse=purse: not purse.num_live)
        assert purse.used == 7 + len(ANSWER), "the prompt, and each token once"


async def test_what_gets_on_goes_on_any_number_of_times(serve: Serve, path: Path) -> None:
    await stopped_in_the_middle(serve, path)
    for num_tokens in range(3, 3 + 3):
        for _ in range(2):
            engine = Spelled(is_paced=True, answer=LONG)
            server = await serve(engine, journal=path, resume=True)
            await engine.wait_until(lambda engine=engine: engine.active)
            engine.release(num_tokens)
            [kept] = server.service.kept.values()
            await eventually(lambda kept=kept, most=num_tokens: len(kept.pieces) >= most)
            server.stop.set()
            await eventually(lambda engine=engine: engine.is_closed)
            await asyncio.to_thread(server.service.journal.close)  # type: ignore[union-attr]
    engine = Spelled(answer=LONG)
    server = await serve(engine, journal=path, resume=True)
    await eventually(lambda: not server.service.kept)
    [[committed]] = engine.committed
    assert committed.token_ids == [0, 1, 2, 3, 4]


async def test_streams_go_on_where_the_journal_cannot_be_written(serve: Serve, path: Path) -> None:
    engine = Spelled()
    server = await serve(engine, journal=path, journal_max_bytes=BYTES_MIN)
    journal = server.service.journal
    assert journal is not None

    def fails() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    journal._file.begin = fails  # type: ignore[method-assign]
    async with httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.post("/v1/chat/completions", json=ASKED)
    told = blocks(answer.text)
    assert told[-1] == "data: [DONE]"
    assert not any(block.startswith("id:") for block in told), "nobody could come back to it"


async def test_without_a_journal_nothing_changes(serve: Serve) -> None:
    server = await serve(Spelled())
    async with httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.post("/v1/chat/completions", json=ASKED, headers={"last-event-id": "chatcmpl-one:3"})
        assert "id:" not in answer.text.replace('"id":', "")
        found = await client.get("/v1/chat/completions/chatcmpl-one")
    assert found.status_code == 404
    assert "--journal" in found.json()["error"]["message"]
    assert os.environ.get("NOVA_JOURNAL") is None


# ---- responses in the background -----------------------------------------------------------------------------------

TOLD = {"input": "Hello", "background": True, "stream": True, "temperature": 0.5}


async def of_response(url: str, response_id: str, **query: Any) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=10.0) as client:
        found = await client.get(f"/v1/responses/{response_id}", params={"stream": "true"} | query)
    assert found.status_code == 200, found.text
    return [json.loads(line[6:]) for line in found.text.split("\n") if line.startswith("data: ")]


async def response_of(client: httpx.AsyncClient, engine: FakeEngine, num_tokens: int) -> str:
    """The id of a response that has so many tokens, in a server whose client has left."""
    found = await client.post("/v1/responses", json=TOLD | {"stream": False})
    await engine.wait_until(lambda: engine.active)
    engine.release(num_tokens)
    return str(found.json()["id"])


async def test_a_response_in_the_background_goes_on_in_another_server(serve: Serve, path: Path) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    async with httpx.AsyncClient(base_url=server.url) as client:
        response_id = await response_of(client, engine, 2)
        other_id = await response_of(client, engine, len(ANSWER))
        await eventually(lambda: server.service.store.find(other_id, None).is_over)
        deleted_id = await response_of(client, engine, 1)
        assert (await client.delete(f"/v1/responses/{deleted_id}")).json()["deleted"]
        cancelled_id = await response_of(client, engine, 1)
        assert (await client.post(f"/v1/responses/{cancelled_id}/cancel")).json()["status"] == "cancelled"
    before = [json.loads(event.split(b"data: ")[1]) for event in server.service.store.find(response_id, None).events]  # type: ignore[union-attr]
    ended = await of_response(server.url, other_id)
    cancelled = await of_response(server.url, cancelled_id)
    server.stop.set()
    await eventually(lambda: engine.is_closed)
    await asyncio.to_thread(server.service.journal.close)  # type: ignore[union-attr]

    loading = Spelled()
    loading.start_gate = asyncio.Event()
    server = await serve(loading, wait_ready=False, journal=path, resume=True)
    async with httpx.AsyncClient(base_url=server.url) as client:
        early = await client.get(f"/v1/responses/{other_id}")
        assert (early.status_code, early.json()["error"]["code"]) == (503, "model_loading"), "it is not lost"
    loading.start_gate.set()
    await server.ready.wait()
    again = await of_response(server.url, other_id)
    assert again == ended, "one that had ended is as it was, and when"
    assert await of_response(server.url, cancelled_id) == cancelled
    whole = await of_response(server.url, response_id)
    assert whole[: len(before)] == before, "ids of items and all"
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[-1]["type"] == "response.completed"
    assert whole[-1]["response"]["output"][0]["content"][0]["text"] == "".join(ANSWER)
    assert await of_response(server.url, response_id, starting_after=3) == whole[4:]
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get(f"/v1/responses/{deleted_id}")).status_code == 404
        items = (await client.get(f"/v1/responses/{response_id}/input_items")).json()["data"]
        assert items[0]["content"][0]["text"] == "Hello"
        behind = await client.post("/v1/responses", json={"input": "And?", "previous_response_id": response_id})
        assert behind.status_code == 200
