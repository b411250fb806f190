"""OpenTelemetry: spans of a worker's messages to whom the standard environment variables name. Off unless they do.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 headrace run examples/smoke.toml

`OTEL_TRACES_EXPORTER` chooses `otlp` (the default where an endpoint is named), `console` or `none`; `OTEL_SDK_DISABLED=true` turns all off;
endpoint, headers, sampler, batches and resource are the SDK's own variables. Needs the extra `otel`, which is imported only then.
"""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

from ops import VERSION
from pipeline.tracing import Place, Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

log = structlog.get_logger("headrace.tracing")

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SESSIONS_REMEMBERED: Final = 10_000
_FLUSH_MS: Final = 3000


def wanted_exporter(environ: Mapping[str, str]) -> str:
    """`otlp`, `console`, or nothing, as the standard variables say. Pure."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if named == "none":
        return ""
    return named or ("otlp" if any(environ.get(name) for name in _ENDPOINTS) else "")


@contextmanager
def tracing_of(run: str, stages: str, environ: Mapping[str, str]) -> Generator[Tracing | None]:
    """Spans as the environment asks for them; None where it asks for none. What is left is sent on leaving."""
    exporter = wanted_exporter(environ)
    if not exporter:
        yield None
        return
    try:
        processor = _processor(exporter)
    except ImportError as error:
        log.warning("traces are not sent: pip install 'headrace[otel]'", exporter=exporter, error=str(error))
        yield None
        return
    spans = OtelTracing(run, stages, processor)
    log.info("traces are sent", exporter=exporter)
    try:
        yield spans
    finally:
        spans.close()


def _processor(exporter: str) -> SpanProcessor:
    from opentelemetry.sdk.trace.export import (  # noqa: PLC0415 - an extra
        BatchSpanProcessor,
        ConsoleSpanExporter,
        SimpleSpanProcessor,
    )

    if exporter == "console":
        return SimpleSpanProcessor(ConsoleSpanExporter())
    if exporter != "otlp":
        raise ImportError(f"OTEL_TRACES_EXPORTER: expected otlp, console or none, found {exporter!r}")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra

    return BatchSpanProcessor(OTLPSpanExporter())


class OtelTracing:
    """`Tracing` by OpenTelemetry's SDK."""

    def __init__(self, run: str, stages: str, processor: SpanProcessor) -> None:
        """Args:
        run: the run's id.
        stages: of this process.
        processor: where ended spans go.
        """
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace.id_generator import IdGenerator  # noqa: PLC0415 - an extra

        class GivenIds(IdGenerator):
            """Each span's ids are those of its message."""

            place: Place

            def generate_span_id(self) -> int:
                return self.place.span_id

            def generate_trace_id(self) -> int:
                return self.place.trace_id

        self._ids: Final = GivenIds()
        own = {"service.version": VERSION, "host.name": socket.gethostname(), "headrace.run": run}
        resource = Resource.create({**own, "headrace.stages": stages})
        if str(resource.attributes.get("service.name", "")).startswith(
            "unknown_service"
        ):  # OTEL_SERVICE_NAME goes before ours
            resource = resource.merge(Resource({"service.name": "headrace"}))
        self._provider: Final = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer: Final = self._provider.get_tracer("headrace", VERSION)
        self._opened: Final[OrderedDict[str, int]] = OrderedDict()

    def said(self, place: Place, began_ns: int) -> None:
        from opentelemetry import trace  # noqa: PLC0415 - an extra

        now_ns = time.time_ns()
        began_ns = min(self._session_began(place, began_ns or now_ns), now_ns)
        context = trace.set_span_in_context(trace.INVALID_SPAN)
        if place.parent_id:
            parent = trace.SpanContext(place.trace_id, place.parent_id, is_remote=True, trace_flags=trace.TraceFlags(1))
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        self._ids.place = place
        attributes = {"messaging.system": "nats", "messaging.destination.name": place.subject}
        if place.session:
            attributes["headrace.session"] = place.session
        span = self._tracer.start_span(place.name, context=context, start_time=began_ns, attributes=attributes)
        span.end(end_time=now_ns)

    def _session_began(self, place: Place, began_ns: int) -> int:
        """A session's span begins where this gateway opened it."""
        if place.name == "session.opened":
            self._opened[place.session] = began_ns
            if len(self._opened) > _SESSIONS_REMEMBERED:
                self._opened.popitem(last=False)
        elif place.name == "session.closed":
            return self._opened.pop(place.session, began_ns)
        return began_ns

    def close(self) -> None:
        """Send what is left, within some seconds."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()
