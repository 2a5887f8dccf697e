"""What the journal costs the loop: long answers are told again in slices, and live ones in the turn of their engine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from novainfer import Delta
from novainfer.fsm.messages.outputs import FinishReason
from novainfer.server.journal.file import JournalFile
from novainfer.server.journal.pieces import Cutter
from novainfer.server.journal.records import Begun, Ended, Said
from novainfer.server.openai.kept import PIECES_A_TURN, Kept
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.fakes import ANSWER
from tests.server.rawh2 import RawH2
from tests.server.test_forward import asking, serving, tokens_of
from tests.server.test_journal import Spelled, asked

LONG = 1_000  # tokens
BODIES = {
    "chatcmpl-long": b'{"messages": [{"role": "user", "content": "Hello"}]}',
    "resp_long": b'{"input": "Hello"}',
    "cmpl-unended": b'{"prompt": "Hello", "stream": true}',
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def written(path: Path) -> None:
    """Three long answers, of which one has not ended."""
    file = JournalFile(path, 1 << 24, 600.0)
    file.begin()
    for serial, (name, body) in enumerate(BODIES.items(), 1):
        kind = name.replace("_", "-").partition("-")[0]
        one = msgspec.structs.replace(asked(name), kind=kind, body=body, is_stream=kind == "cmpl")
        file.open(serial, one, "fake")
        said = [Said(0, at % len(ANSWER)) for at in range(LONG)]
        said[0].begun = Begun(3, 0, 1)
        if kind != "cmpl":
            said[-1].ended = Ended("!", FinishReason.STOP, None, [], 0, 0)
        file.add(serial, said)
        if kind != "cmpl":
            file.end(serial, None, 4e9)
    file.commit()
    file.close()


async def test_long_answers_are_told_again_in_slices_that_leave_the_loop_to_others(
    serve: Serve, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(path)
    num_turns, is_over = 0, False
    in_turn: Counter[int] = Counter()
    again, loop = Cutter.again, asyncio.get_running_loop()

    def turn() -> None:
        nonlocal num_turns
        num_turns += 1
        if not is_over:
            loop.call_soon(turn)

    def noted(self: Cutter, said: Said, request_id: str) -> Delta:
        in_turn[num_turns] += 1
        return again(self, said, request_id)

    monkeypatch.setattr(Cutter, "again", noted)
    turn()
    server = await serve(Spelled(is_paced=True), journal=path, resume=True)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        found = await asyncio.gather(*(client.get("/v1/chat/completions/chatcmpl-long") for _ in range(2)))
        told = [one.json()["choices"][0]["message"]["content"] for one in found]
        assert told[0] == told[1] == ("".join(ANSWER) * LONG)[: len(told[0])]
        response = (await client.get("/v1/responses/resp_long")).json()
        assert response["completed_at"] == 4_000_000_000
        assert response["output"][0]["content"][0]["text"] == told[0]
    is_over = True
    assert in_turn.total() == 4 * LONG
    assert max(in_turn.values()) <= 3 * PIECES_A_TURN, "as many answers at once"


async def test_a_client_that_keeps_up_is_written_to_in_the_turn_of_the_engine(
    serve: Serve, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads: Counter[str] = Counter()
    behind = Kept.behind

    async def noted(self: Kept, first: int) -> list[Delta]:
        num_reads[self.asked.id] += 1
        return await behind(self, first)

    monkeypatch.setattr(Kept, "behind", noted)
    async with (
        serving(serve, journal=path) as (server, engine),
        httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client,
    ):
        body = asking(return_token_ids=True)
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
        whole = (await client.post("/v1/completions", json=body | {"stream": False})).json()
        for answer in answers:
            assert (
                tokens_of(answer.text.replace("id: ", "\n\nid: ").replace("\ndata: ", "\n\ndata: "))
                == (whole["choices"][0]["token_ids"])
            )
        assert len(num_reads) == 8
        assert num_reads.total() <= 8 * 6, "where it began, at its end, and where it was behind for once"
        assert engine.statistics().num_running == 0


async def test_a_client_that_falls_behind_holds_up_nothing_and_gets_all(serve: Serve, path: Path) -> None:
    async with serving(serve, journal=path) as (server, engine):
        client = await RawH2.connect(server.port, takes_data=False, initial_window=2_000)
        body = asking(return_token_ids=True, max_tokens=600)
        stream = await client.request("/v1/completions", json.dumps(body).encode())
        await client.read_until(lambda: len(client.data[stream]) == 2_000)
        await eventually(lambda: not engine.statistics().num_running)
        client.takes_data = True
        client.connection.increment_flow_control_window(1 << 24, stream)
        client.connection.increment_flow_control_window(1 << 24)
        await client.flush()
        status, data = await client.response(stream)
        assert status == 200
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as other:
            reply = (await other.post("/v1/completions", json={**body, "stream": False})).json()
        told = data.decode().replace("id: ", "\n\nid: ").replace("\ndata: ", "\n\ndata: ")
        assert tokens_of(told) == reply["choices"][0]["token_ids"]
        await client.close()


async def test_what_a_reader_raises_is_its_own(serve: Serve, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two readers of one answer one fails at its second event."""
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        headers = {"idempotency-key": "a"}
        body = {"prompt": "Hello", "stream": True}
        first = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        await engine.wait_until(lambda: engine.active)
        engine.release(1)
        await eventually(lambda: server.service.kept)
        second = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        [kept] = server.service.kept.values()
        await eventually(lambda: len(kept._along) == 2)

        def fails(pieces: list[Delta]) -> bool:
            raise RuntimeError("a bug of one reader")

        kept._along[0] = (fails, kept._along[0][1])
        engine.release(9)
        told = sorted([(await one).text for one in (first, second)], key=lambda text: "[DONE]" in text)
        assert "[DONE]" not in told[0]
        assert "server_error" in told[0]
        assert told[1].endswith("data: [DONE]\n\n")


async def test_a_reader_that_leaves_in_the_turn_of_a_token_is_told_nothing_and_ends_nothing(
    serve: Serve, path: Path
) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "Hello", "stream": True}))
        await engine.wait_until(lambda: engine.active)
        engine.release(1)
        await eventually(lambda: server.service.kept)
        [kept] = server.service.kept.values()
        await eventually(lambda: kept._along)
        told: list[list[Delta]] = []

        def leaves(pieces: list[Delta]) -> bool:
            told.append(pieces)
            return False

        reader = asyncio.create_task(kept.forward(1, leaves))
        await asyncio.sleep(0)
        assert len(kept._along) == 2
        piece = msgspec.structs.replace(kept.pieces[0], token_ids=[1], text=",", num_generated_tokens=2)
        reader.cancel()
        kept._tell([piece])  # before its task has heard of it
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert not told
        assert len(kept._along) == 1
        kept.cancel()
        assert b'"text":","' in (await asking).content


async def test_the_moment_of_an_end_is_the_one_that_was_told(
    serve: Serve, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve(Spelled(), journal=path)
    monkeypatch.setattr("novainfer.server.openai.kept.time", SimpleNamespace(time=lambda: 4e9))
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        told = (await client.post("/v1/responses", json={"input": "Hello"})).json()
    assert told["completed_at"] == 4_000_000_000
    assert server.service.journal is not None
    stored = await server.service.journal.find(told["id"], None)
    assert stored is not None
    assert stored.ended_s == 4e9
