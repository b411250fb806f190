"""Spans of messages, by OpenTelemetry's own SDK: from a worker in memory, and from all processes of a real run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ops.tracing import OtelTracing, tracing_of, wanted_exporter
from pipeline.tracing import place_of

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("environ", "exporter"),
    [
        ({}, ""),
        ({"OTEL_SERVICE_NAME": "x"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, ""),
    ],
)
def test_the_standard_variables_turn_it_on(environ: dict[str, str], exporter: str) -> None:
    assert wanted_exporter(environ) == exporter


def test_off_means_that_nothing_is_imported() -> None:
    code = (
        "import sys; from ops.tracing import tracing_of; import ops.workers.main\n"
        "with tracing_of('r', 's', {}) as tracing: assert tracing is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_without_the_extra_a_run_goes_on_without_traces(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with tracing_of("r", "s", {"OTEL_TRACES_EXPORTER": "otlp"}) as tracing:
        assert tracing is None


def test_spans_have_the_ids_of_their_messages_and_a_session_lasts_from_its_opening() -> None:
    exporter = InMemorySpanExporter()
    tracing = OtelTracing("r", "gateway", SimpleSpanProcessor(exporter))
    subjects = [
        "hr.r.episode.requested.g0000001.2.0",
        "hr.r.session.opened.g0000001-2-0-0.gw",
        "hr.r.interaction.recorded.g0000001-2-0-0.0",
        "hr.r.session.closed.g0000001-2-0-0",
    ]
    for number, subject in enumerate(subjects):
        tracing.said(place_of(subject), began_ns=1000 + number)
    tracing.close()
    spans = exporter.get_finished_spans()
    for span, subject in zip(spans, subjects, strict=True):
        place = place_of(subject)
        assert (span.context.trace_id, span.context.span_id) == (place.trace_id, place.span_id)
        assert (span.parent.span_id if span.parent else 0) == place.parent_id
        assert span.attributes["messaging.destination.name"] == subject
    assert spans[3].start_time == 1001
    assert spans[0].resource.attributes["service.name"] == os.environ.get("OTEL_SERVICE_NAME", "headrace")


class Collector:
    """Takes spans as an OpenTelemetry collector does, over HTTP."""

    def __init__(self) -> None:
        self.spans = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_error) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.mark.resources
@pytest.mark.timeout(300)
def test_a_run_gives_one_trace_an_episode_with_its_spans_in_order(tmp_path) -> None:
    """All processes of a torch-free run send to a collector: each slot is one whole tree."""
    with Collector() as collector:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "ops",
                "run",
                "examples/smoke.toml",
                "--steps",
                "2",
                "--json",
                "--set",
                f"run.dir={tmp_path / 'run'}",
            ],
            check=True,
            cwd=ROOT,
            env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url},
            capture_output=True,
        )
    traces = defaultdict(list)
    for span in collector.spans:
        traces[span.trace_id].append(span)
    whole = [spans for spans in traces.values() if "trajectory.ready" in {span.name for span in spans}]
    assert len(whole) == 2 * 4 * 4
    for spans in whole:
        by_id = {span.span_id: span for span in spans}
        assert len(by_id) == len(spans)
        (root,) = [span for span in spans if not span.parent_span_id]
        assert root.name == "episode.requested"
        assert all(span.parent_span_id in by_id for span in spans if span is not root)
        named = {span.name: span for span in spans}
        assert by_id[named["interaction.recorded"].parent_span_id].name == "session.closed"
        assert by_id[named["session.closed"].parent_span_id] is root
        assert by_id[named["episode.ended"].parent_span_id] is root
        call, session, ended = (named[name] for name in ("interaction.recorded", "session.closed", "episode.ended"))
        assert session.start_time_unix_nano <= call.start_time_unix_nano <= call.end_time_unix_nano
        assert call.end_time_unix_nano <= session.end_time_unix_nano
        assert ended.start_time_unix_nano < call.start_time_unix_nano < ended.end_time_unix_nano
