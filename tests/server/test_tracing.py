"""Traces, as a collector gets them: over HTTP, in OTLP, from a server that does not wait for it."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from novainfer import Engine, EngineConfig, InvalidParameter
from novainfer.server import tracing
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from novainfer.testing import ByteTokenizer, FakeDevice
from tests.server.conftest import Serve, eventually, running
from tests.server.fakes import FakeEngine
from tests.server.test_endings import BODY

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "what nobody else may read"


class Collector:
    """A receiver of OTLP on a port of its own; `spans` are those that came, `resource` who sent them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self.paths: list[str] = []
        self.bytes = b""
        self.gate = threading.Event()
        self.gate.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.gate.wait(30)
                data = gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data
                found = ExportTraceServiceRequest.FromString(data)
                for part in found.resource_spans:
                    collector.resource = values(part.resource.attributes)
                    for scope in part.scope_spans:
                        collector.spans += scope.spans
                collector.paths.append(self.path)
                collector.bytes += data
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as plain values."""
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


async def test_a_request_is_a_span_of_its_callers_trace_with_an_event_for_each_transition(
    collector: Collector,
) -> None:
    engine = Engine(EngineConfig(max_num_seqs=4), device=FakeDevice(num_blocks=64), tokenizer=ByteTokenizer())
    before_ns = time.time_ns()
    async with (
        running(engine, otlp_traces_endpoint=collector.url, shutdown_timeout_s=0.0) as server,
        httpx.AsyncClient(base_url=server.url, timeout=10) as client,
    ):
        body = {
            "prompt": SECRET,
            "max_tokens": 3,
            "n": 2,
            "temperature": 0.5,
            "seed": 7,
            "ignore_eos": True,
            "stop": [SECRET],
        }
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        await client.get("/health")
        port = server.port
    (span,) = collector.spans  # a probe has none
    assert collector.paths == ["/v1/traces"]
    assert (collector.resource["service.name"], "service.version" in collector.resource) == ("novainfer", True)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert (span.name, span.kind) == ("text_completion demo", Span.SPAN_KIND_SERVER)
    assert SECRET.encode() not in collector.bytes
    attributes = values(span.attributes)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "novainfer",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": "cmpl-mine",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 6,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": port,
        "nova.request.id": "mine",
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert 0 <= attributes["nova.time_in_queue"] <= attributes["gen_ai.response.time_to_first_chunk"]
    assert "error.type" not in attributes
    for choice in (0, 1):
        moves = [event for event in span.events if values(event.attributes)["nova.choice"] == choice]
        states = [event.name for event in moves]
        assert states[0] == "WAITING"
        assert "PREFILL" in states or choice  # the second one may find its prompt computed
        assert states[-1] == "FINISHED_LENGTH"
        times = [event.time_unix_nano for event in moves]
        assert times == sorted(times)
    edge_ns = 50_000_000  # two clocks are read
    assert before_ns - edge_ns <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns() + edge_ns


async def test_errors_and_refusals_are_told_as_such(collector: Collector) -> None:
    engine = FakeEngine()
    async with (
        running(engine, otlp_traces_endpoint=f"{collector.url}/v1/traces", shutdown_timeout_s=0.0) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        await client.post("/v1/chat/completions", json={"messages": []})
        engine.overloaded = True
        await client.post("/v1/chat/completions", content=BODY)
        engine.overloaded = False
        engine.fail_at = 2
        await client.post("/v1/chat/completions", content=BODY)
        await client.get("/nothing", headers={"traceparent": "nonsense"})
    refused, full, failed, unknown = collector.spans
    assert [span.name for span in collector.spans] == [
        "POST /v1/chat/completions",
        "chat fake",
        "chat fake",
        "GET other",
    ]
    unset, is_error = 0, 2
    assert [span.status.code for span in collector.spans] == [unset, is_error, is_error, unset]
    types = [values(span.attributes)["error.type"] for span in collector.spans]
    assert types[1:] == ["server_is_overloaded", "internal_error", "path_not_found"]
    assert len({span.trace_id for span in collector.spans}) == 4
    assert not unknown.parent_span_id
    assert not any(b"secret" in span.SerializeToString() for span in (refused, full, failed))


async def test_a_response_in_the_background_is_a_span_of_its_own_in_the_trace_of_its_request(
    collector: Collector,
) -> None:
    engine = FakeEngine(is_paced=True)
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
    async with (
        running(engine, otlp_traces_endpoint=collector.url, shutdown_timeout_s=0.0) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        body = {"input": SECRET, "background": True, "session_id": "s"}
        name = (await client.post("/v1/responses", json=body, headers=headers)).json()["id"]
        engine.is_paced = False
        engine.release()
        await eventually(lambda: not server.service.live.num_live)
    request, generation = collector.spans
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert (request.name, generation.name) == ("POST /v1/responses", "chat fake")
    assert not any(key.startswith("gen_ai.") for key in values(request.attributes))
    found = values(generation.attributes)
    assert (found["gen_ai.response.id"], found["gen_ai.usage.output_tokens"]) == (name, 5)
    assert (found["gen_ai.conversation.id"], found["nova.request.id"]) == ("s", "mine")
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert generation.end_time_unix_nano > request.end_time_unix_nano
    assert SECRET.encode() not in collector.bytes


async def test_a_collector_that_hangs_holds_no_request_up_and_no_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "QUEUE_SPANS_MAX", 8)
    monkeypatch.setattr(tracing, "BATCH_SPANS_MAX", 4)
    monkeypatch.setattr(tracing, "FLUSH_TIMEOUT_S", 0.05)
    collector.gate.clear()
    async with (
        running(FakeEngine(), otlp_traces_endpoint=collector.url, shutdown_timeout_s=0.0) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        for _ in range(40):
            assert (await client.post("/v1/chat/completions", content=BODY)).status_code == 200
        assert collector.spans == []
    collector.gate.set()
    await asyncio.sleep(0)
    assert len(collector.spans) < 40  # what had no room is gone


async def test_a_collector_that_is_gone_is_no_matter(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server: Server = await serve(FakeEngine(), otlp_traces_endpoint=f"http://127.0.0.1:{port}")
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.post("/v1/chat/completions", content=BODY)).status_code == 200


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_has_otlps(endpoint: str, url: str) -> None:
    assert tracing.traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317", "", "http://", "http://a b"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(InvalidParameter, match="must be a URL that begins with http:// or https://"):
        ServerSettings(otlp_traces_endpoint=endpoint)


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidParameter, match=r"pip install 'novainfer\[otel\]'"):
        Server(ServerSettings(port=0, otlp_traces_endpoint="http://127.0.0.1:4318"))
