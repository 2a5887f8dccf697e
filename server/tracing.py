"""Traces by OpenTelemetry: a span for each request, with an event for each state that its choices came into.

A span is made when its request has ended, of what is known then: nothing is done for it on the way. The SDK's own
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
from novainfer.server.http.exchange import Exchange
from novainfer.server.request_log import PROBES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

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
        operation = OPERATIONS.get(work.prefix, work.prefix)
        span = self._tracer.start_span(
            f"{operation} {work.model}" if operation else f"{exchange.method} {route}",
            context=self._propagator.extract(_carrier(scope)),
            kind=SpanKind.SERVER,
            start_time=self._ns(exchange.started),
        )
        if span.is_recording():
            span.set_attributes(_attributes(scope, exchange, status, route, address))
            for prompt, record in enumerate(work.records):
                for choice in record.choices:
                    for moved in choice.history:
                        at = {"nova.prompt": prompt, "nova.choice": choice.index}
                        span.add_event(moved.state, at, timestamp=int(moved.time * NS))
            ended_by = exchange.ended_by or work.ended_by
            if status >= 400 or work.error is not None:
                span.set_attribute("error.type", ended_by or str(status))
            if status >= 500 or (status < 400 and work.error is not None):
                span.set_status(Status(StatusCode.ERROR, ended_by))
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


def _carrier(scope: Scope) -> dict[str, str]:
    """The headers that say of which trace a request is a part (W3C Trace Context)."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name.lower() in (b"traceparent", b"tracestate")
    }


def _attributes(scope: Scope, exchange: Exchange, status: int, route: str, address: tuple[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": exchange.method,
        "http.route": route,
        "http.response.status_code": status,
        "network.protocol.version": scope["http_version"],
        "server.address": address[0],
        "server.port": address[1],
        "nova.request.id": exchange.request_id,
    }
    work = exchange.work
    if not work.prefix:
        return found
    found |= {
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
    if (queue_s := work.queue_s) is not None:
        found["nova.time_in_queue"] = queue_s
    if work.first_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = work.first_s - exchange.started
    return found
