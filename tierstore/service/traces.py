"""OpenTelemetry spans of requests and deltas: if the caller's trace is sampled, the part here is reported once it has
ended.

No trace begins here: a request without a sampled `traceparent` (W3C Trace Context) has no span, and costs nothing.
Reactors hand sampled look-ups to Python, which knows where their time went. Durations of stages are measured; in a
request that waited for a thread they are laid one behind the other, the last up to the answer.

    queue         waits for a thread, or in a batch
    plan          is parsed and checked, and its view opened
    look up       keys are found in memory, and rows decoded
    look up below memory  rows that memory lacked, on disk or on other machines
    dense         the graph
    encode        the answer is written

OpenTelemetry's variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, …) configure the export. Any thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tierstore import __version__
from tierstore.config import Settings
from tierstore.errors import ConfigError, MissingExtra
from tierstore.service.stats import Timings

_NAMES = (b"traceparent", b"tracestate")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN = "http/protobuf"
_EXTRA = "traces need the extra `otel`: pip install 'tierstore[otel]'"


def check_traces(settings: Settings) -> None:
    """Raise MissingExtra or ConfigError for traces that could not be reported."""
    if not settings.traces:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise MissingExtra(_EXTRA) from error
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _SPOKEN)
    if protocol != _SPOKEN:
        raise ConfigError(f"{_PROTOCOLS[1]}: expected {_SPOKEN}, got {protocol!r}; collectors have it on port 4318")


def traces_of(settings: Settings) -> Traces | None:
    """Traces to the destination in OpenTelemetry's variables; None if the setting is off."""
    if not settings.traces:
        return None
    check_traces(settings)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource.create()  # by OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(named.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        named = named.merge(Resource({SERVICE_NAME: "tierstore"}))
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


class Traces:
    """Reports to a tracer provider of the SDK, which `close` ends."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("tierstore", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def request(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        name: str,
        began_ns: int,
        attributes: Mapping[str, Any],
        spent: Timings | None,
        failed: str | None,
    ) -> None:
        """Report a request that came at `began_ns` (`time.perf_counter_ns`) and ends now; `failed`: the service's
        fault, if it was one.
        """
        context = self._sampled({key.decode(): value.decode("latin-1") for key, value in headers if key in _NAMES})
        if context is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        wall_ns = time.time_ns()
        to_wall = wall_ns - time.perf_counter_ns()
        span = self._tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=began_ns + to_wall)
        within, at = set_span_in_context(span), wall_ns - sum(took for _, took in self._stages(spent))
        for stage, took_ns in self._stages(spent):
            if took_ns > 0:
                self._tracer.start_span(stage, within, start_time=at).end(at + took_ns)
            at += took_ns
        if failed is not None:
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end(wall_ns)

    @contextlib.contextmanager
    def delta(self, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Iterator[None]:
        """Report what the block does as the application of a delta, whose message has these headers."""
        context = self._sampled(headers)
        if context is None:
            yield
            return
        from opentelemetry.trace import SpanKind

        with self._tracer.start_as_current_span("apply delta", context, SpanKind.CONSUMER, attributes):
            yield

    def close(self) -> None:
        """Export the remaining spans; a collector that does not answer is given up after its timeout."""
        self._provider.shutdown()

    def _sampled(self, headers: Mapping[str, str]) -> Any:
        """The context in the headers; None if its trace is not sampled."""
        if "traceparent" not in headers:
            return None
        from opentelemetry.trace import get_current_span

        context = self._propagator.extract(headers)
        return context if get_current_span(context).get_span_context().trace_flags.sampled else None

    def _stages(self, spent: Timings | None) -> tuple[tuple[str, int], ...]:
        if spent is None:
            return ()
        return (
            ("queue", spent.queued_ns), ("plan", spent.input_ns), ("look up", spent.lookup_ns - spent.disk_ns),
            ("look up below memory", spent.disk_ns), ("dense", spent.dense_ns), ("encode", spent.output_ns),
        )  # fmt: skip
