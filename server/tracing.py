"""Traces by OpenTelemetry: a span for each request, with an event for each state that its choices came into.

A span is made when its request has ended, of what is known then: nothing is done for it on the way. A generation that
goes on behind its request has one of its own when it ends, in the same trace. The SDK's own
thread sends spans over OTLP/HTTP from a bounded queue; when the collector is slow or gone, spans are lost and requests
are not. Attributes are those of the GenAI and HTTP conventions, and `nova.*` for the rest; none holds text of prompts,
answers or stop strings.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from novainfer import InvalidParameter
from novainfer.server.http.exchange import Exchange, trace_headers
from novainfer.server.request_log import PROBES
from novainfer.server.work import Work

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

SERVICE_NAME = "novainfer"  # unless OTEL_SERVICE_NAME says otherwise
TRACES_PATH = "/v1/traces"  # OTLP's own, where the endpoint names none
QUEUE_SPANS_MAX = 4096  # about 10 MB: a minute of 70 requests a second
BATCH_SPANS_MAX = 512
FLUSH_TIMEOUT_S = 2.0  # at the end, for what is still in the queue
NS = 1_000_000_000
# What a prefix of an answer's id says of the operation.
OPERATIONS = {"chatcmpl": "chat", "msg": "chat", "resp": "chat", "cmpl": "text_completion", "embd": "embeddings"}
PARAMS = {  # of SamplingParams, where they are given
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


class Tracing:
    """Spans of one server's requests, sent to `endpoint`; raises `InvalidParameter` where OpenTelemetry is missing."""

    def __init__(self, endpoint: str, version: str, *, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=traces_url(endpoint))
        except ImportError:
            message = "otlp_traces_endpoint needs OpenTelemetry: pip install 'novainfer[otel]'"
            raise InvalidParameter(message, param="otlp_traces_endpoint") from None
        resource = Resource.create({"service.version": version})  # with what OTEL_… variables say
        if str(resource.attributes.get("service.name")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS_MAX, max_export_batch_size=BATCH_SPANS_MAX)
        )
        self._tracer = self._provider.get_tracer("novainfer", version)
        self._propagator = TraceContextTextMapPropagator()
        self._epoch_s = time.time() - time.perf_counter()  # turns the exchange's clock into the time of day

    def tell(self, scope: Scope, exchange: Exchange, status: int, route: str, address: tuple[str, int]) -> None:
        """Make the span of a request that has ended with `status`; `address` is where it was taken."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if exchange.path in PROBES:
            return
        work = exchange.work
        has_generation = bool(work.prefix) and not work.is_going_on
        span = self._tracer.start_span(
            _name(work) if has_generation else f"{exchange.method} {route}",
            context=self._propagator.extract(trace_headers(scope)),
            kind=SpanKind.SERVER,
            start_time=self._ns(exchange.started),
        )
        if span.is_recording():
            span.set_attributes(_attributes(scope, exchange, status, route, address))
            if has_generation:
                _add_generation(span, work)
            ended_by = exchange.ended_by or work.ended_by
            if status >= 400 or work.error is not None:
                span.set_attribute("error.type", ended_by or str(status))
            if status >= 500 or (status < 400 and work.error is not None):
                span.set_status(Status(StatusCode.ERROR, ended_by))
        span.end(self._ns(time.perf_counter()))

    def tell_generation(self, work: Work) -> None:
        """Make the span of a generation that has ended behind its request."""
        from opentelemetry.trace import Status, StatusCode

        context = self._propagator.extract(work.carrier)
        span = self._tracer.start_span(_name(work), context=context, start_time=self._ns(work.began_s))
        if span.is_recording():
            if work.request_id:
                span.set_attribute("nova.request.id", work.request_id)
            _add_generation(span, work)
            if work.error is not None:
                span.set_attribute("error.type", work.ended_by)
                span.set_status(Status(StatusCode.ERROR, work.ended_by))
        span.end(self._ns(time.perf_counter()))

    def close(self) -> None:
        """Send what is left, for `FLUSH_TIMEOUT_S` at most: a collector that is gone keeps no server from ending."""
        thread = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        thread.start()
        thread.join(FLUSH_TIMEOUT_S)

    def _ns(self, at_s: float) -> int:
        return int((self._epoch_s + at_s) * NS)


def traces_url(endpoint: str) -> str:
    """Where spans are posted: the endpoint as it is, with OTLP's path where it names none."""
    scheme, _, rest = endpoint.partition("://")
    host, _, path = rest.partition("/")
    return endpoint if path else f"{scheme}://{host}{TRACES_PATH}"


def _attributes(scope: Scope, exchange: Exchange, status: int, route: str, address: tuple[str, int]) -> dict[str, Any]:
    return {
        "http.request.method": exchange.method,
        "http.route": route,
        "http.response.status_code": status,
        "network.protocol.version": scope["http_version"],
        "server.address": address[0],
        "server.port": address[1],
        "nova.request.id": exchange.request_id,
    }


def _name(work: Work) -> str:
    return f"{OPERATIONS.get(work.prefix, work.prefix)} {work.model}"


def _add_generation(span: Span, work: Work) -> None:
    """What the engine was asked for, and did, with an event for each state of each choice."""
    span.set_attributes(_generation(work))
    for prompt, record in enumerate(work.records):
        for choice in record.choices:
            for moved in choice.history:
                at = {"nova.prompt": prompt, "nova.choice": choice.index}
                span.add_event(moved.state, at, timestamp=int(moved.time * NS))


def _generation(work: Work) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS.get(work.prefix, work.prefix),
        "gen_ai.provider.name": "novainfer",
        "gen_ai.request.model": work.model,
        "gen_ai.response.model": work.model,
        "gen_ai.response.id": work.id,
        "gen_ai.usage.input_tokens": work.prompt_tokens,
        "gen_ai.usage.output_tokens": work.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": work.cached_tokens,
    }
    if work.finish_reasons:
        found["gen_ai.response.finish_reasons"] = [reason for _, reason in sorted(work.finish_reasons.items())]
    if (params := work.params) is not None:
        found |= {name: value for field, name in PARAMS.items() if (value := getattr(params, field)) is not None}
        if params.n != 1:
            found["gen_ai.request.choice.count"] = params.n
        if params.session_id is not None:
            found["gen_ai.conversation.id"] = params.session_id
    if (queue_s := work.queue_s) is not None:
        found["nova.time_in_queue"] = queue_s
    if work.first_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = work.first_s - work.began_s
    return found
