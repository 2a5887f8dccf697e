"""The streaming clients of `bench serve` against a server over a device without weights, on both versions of HTTP."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import h2.config
import h2.connection
import pytest
from h2.events import WindowUpdated

from novainfer import Engine, EngineConfig
from novainfer.bench import client, serve
from novainfer.bench.client import Origin, Version
from novainfer.bench.load import Load, drive
from novainfer.bench.statistic import Timeline
from novainfer.bench.workload import Workload
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from novainfer.testing import ByteTokenizer, FakeDevice

PROMPTS = [[65 + at] * (3 + at) for at in range(6)]
both = pytest.mark.parametrize("version", ["h1", "h2"])


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    engine = Engine(EngineConfig(max_num_seqs=4), device=FakeDevice(), tokenizer=ByteTokenizer())
    server = Server(ServerSettings(port=0, api_keys=("secret",), shutdown_timeout_s=0.0))
    task = asyncio.create_task(server.run(lambda: engine))
    await server.ready.wait()
    yield server
    server.stop.set()
    await task


def load(server: Server, key: str | None = "secret") -> Load:
    return Load(origin=Origin.parse(server.url), model=server.service.ready_engine().model_info.name, api_key=key)


@both
async def test_a_connection_over_tls_is_closed_when_it_says_so(version: Version) -> None:
    """What both sides say to that end would else be cut off by a loop that ends, with an error."""
    engine = Engine(EngineConfig(), device=FakeDevice(), tokenizer=ByteTokenizer())
    server = Server(ServerSettings(port=0, self_signed=True, shutdown_timeout_s=0.0))
    task = asyncio.create_task(server.run(lambda: engine))
    await server.ready.wait()
    connection = await client.connect(Origin.parse(server.url), version)
    assert isinstance(connection, client.HTTP1 | client.HTTP2)
    await connection.close()
    with pytest.raises((StopIteration, ssl.SSLError)):  # how it ended, and nothing to wait for
        connection._writer.wait_closed().send(None)  # type: ignore[attr-defined]
    server.stop.set()
    await task


@both
async def test_every_token_of_every_request_is_counted_once(server: Server, version: Version) -> None:
    found = await drive(load(server), version, PROMPTS, 20, clients=3)
    assert [line.error for line in found.timelines] == [None] * 6
    assert [line.num_output_tokens for line in found.timelines] == [20] * 6
    assert sorted(line.num_prompt_tokens for line in found.timelines) == [3, 4, 5, 6, 7, 8]
    for line in found.timelines:
        assert line.times_s == sorted(line.times_s)
    assert len(found.whole_s) == 6


@both
async def test_what_the_server_refuses_is_an_error_of_that_request(server: Server, version: Version) -> None:
    found = await drive(load(server, key="wrong"), version, PROMPTS[:3], 4, clients=2)
    assert all((line.error or "").startswith("status 401") for line in found.timelines)
    assert len(found.timelines) == 3


@both
async def test_a_large_body_arrives_whole(server: Server, version: Version) -> None:
    long = [65, 66] * 900  # more than one HTTP/2 frame
    found = await drive(load(server), version, [long], 2, clients=1)
    assert found.timelines[0].error is None


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def scripted(*answers: bytes, resets: bool = False) -> AsyncIterator[Load]:
    """A server that gives `answers` on each connection, and closes it; they are all closed when it is left.

    One that `resets` closes when it is asked once more, with an error.
    """
    given: list[asyncio.Task[None]] = []

    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        given.append(task)
        with suppress(asyncio.IncompleteReadError):  # a client that comes and asks for nothing
            for answer in answers:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
                writer.write(answer)
            if resets:
                await reader.readuntil(b"\r\n\r\n")
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(give, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield Load(origin=Origin.parse(f"http://127.0.0.1:{port}"), model="scripted")
        await asyncio.wait_for(asyncio.gather(*given), 10)


def chunks(*events: bytes) -> bytes:
    pieces = (b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event) for event in events)
    return HEAD + b"".join(pieces) + b"0\r\n\r\n"


DONE = b"data: [DONE]"


async def ask(answer: bytes) -> Timeline:
    async with scripted(answer) as load:
        return (await drive(load, "h1", [[1, 2]], 4, clients=1)).timelines[0]


async def test_an_event_with_several_tokens_counts_them_all_and_text_alone_counts_one() -> None:
    ids = b'data: {"choices":[{"text":"ab","token_ids":[1,2,3]}]}'
    text = b'data: {"choices":[{"text":"c"}]}'
    empty = b'data: {"choices":[{"text":""}],"usage":null}'
    line = await ask(chunks(ids, b": keep-alive", text, empty, DONE))
    assert (line.error, line.counts) == (None, [3, 1])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (chunks(b'data: {"choices":[{"text":"c"}]}'), "ended without"),
        (chunks(b'data: {"error":{"message":"out of memory"}}'), "error event: out of memory"),
        (HEAD + b"5\r\nda", "closed the connection"),
        (HEAD + b"zz\r\n", "invalid literal"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull", "status 503: full"),
    ],
)
async def test_whatever_goes_wrong_is_the_error_of_its_request(answer: bytes, words: str) -> None:
    assert words in ((await ask(answer)).error or "")


@pytest.mark.parametrize("resets", [False, True])
async def test_a_connection_that_the_server_ends_after_an_answer_costs_no_request(resets: bool) -> None:
    whole = chunks(b'data: {"choices":[{"text":"c"}]}', DONE)
    async with scripted(whole, resets=resets) as load:
        found = await drive(load, "h1", [[1], [2], [3]], 1, clients=1)
    assert [(line.error, line.counts) for line in found.timelines] == [(None, [1])] * 3


@pytest.mark.parametrize("half", [b"HTTP/1.1 20", HEAD + b"5\r\nda"])
async def test_an_answer_that_breaks_off_is_not_asked_for_again(half: bytes) -> None:
    async with scripted(chunks(DONE), half) as load:
        found = await drive(load, "h1", [[1], [2]], 1, clients=1)
    assert [line.error is None for line in found.timelines] == [True, False]


async def test_a_connection_that_gives_no_answer_at_all_is_not_tried_again() -> None:
    assert "closed the connection" in ((await ask(b"")).error or "")


async def test_the_report_has_both_versions(server: Server) -> None:
    work = Workload(name="load", title="4 requests", num_requests=4, prompt_len=8, max_tokens=5)
    report, text = await asyncio.to_thread(serve.run, server.url, api_key="secret", workload=work, clients=2, repeat=2)
    for version in ("h1", "h2"):
        found = report["systems"][version]
        assert found["requests"] == 4
        assert found["errors"] == 0
        assert found["output_tokens"] == 20
        assert set(found["itl_ms"]) == set(found["ttft_ms"]) == {"p50", "p95", "p99"}
        assert len(found["runs"]) == 2
    assert "HTTP/1.1" in text
    assert "HTTP/2" in text


class Wire:
    """The end of a connection that a client writes to."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass


@pytest.mark.parametrize("step", [1, 7, 100_000])
async def test_frames_come_whole_however_they_are_cut_and_the_window_opens_again(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WINDOW_BYTES", 1_000)
    wire, reader = Wire(), asyncio.StreamReader()
    asking = client.HTTP2(Origin.parse("http://127.0.0.1:1"), reader, wire)  # type: ignore[arg-type]
    pieces = asking.post("/", b"{}", {})
    first = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    server.receive_data(wire.written)
    told = len(wire.written)
    server.send_headers(1, [(":status", "200")])
    server.send_data(1, b"a" * 400)
    server.send_data(1, b"b", pad_length=5)
    server.send_data(1, b"c" * 300)
    sent = server.data_to_send()
    for at in range(0, len(sent), step):
        reader.feed_data(sent[at : at + step])
        await asyncio.sleep(0)
    assert [await first, await anext(pieces), await anext(pieces)] == [b"a" * 400, b"b", b"c" * 300]
    opened = [event for event in server.receive_data(wire.written[told:]) if isinstance(event, WindowUpdated)]
    assert {(event.stream_id, event.delta) for event in opened} == {(1, 700), (0, 700)}
    server.send_data(1, b"d", end_stream=True)
    reader.feed_data(server.data_to_send())
    assert [piece async for piece in pieces] == [b"d"]
    await asking.close()
