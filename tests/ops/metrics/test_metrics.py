"""Workers' reports for Prometheus: what is served, what is documented, what dashboard and alerts name."""

import json
import re
import sys
import urllib.request
from pathlib import Path

import anyio
import pytest
import yaml

from ops.config import decode_config
from ops.engines.server_process import free_port
from ops.metrics.definitions import DEFINITIONS, samples
from ops.metrics.documents import DASHBOARD_PATH, MARKDOWN_PATH, dashboard, markdown
from ops.metrics.serving import PLACES, STRIDE, Exporter, first_port, serve_metrics, start_endpoint
from ops.wiring import STAGES
from pipeline.metrics import WorkerReport
from schemas.config import MetricsSection
from schemas.errors import ConfigError

ROOT = Path(__file__).parents[3]
NAMES = {definition.name for definition in DEFINITIONS}


def report(**fields):
    return WorkerReport(**{"run": "r", "stage": "gateway", "worker": "h:1", "unix_time_s": 100.0, **fields})


def values(*reports):
    return {(sample.definition.name, *sample.labels[1:]): sample.value for sample in samples(reports)}


@pytest.fixture
def port():
    return free_port("127.0.0.1")


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_counters_and_figures_come_out_under_their_names():
    found = values(report(received=7, dead=1, gauges={"version": 3.0, "odd/one": 2.0}))
    assert found["headrace_messages_received_total", "gateway", "h:1"] == 7
    assert found["headrace_messages_dead_total", "gateway", "h:1"] == 1
    assert found["headrace_engine_weight_version", "gateway", "h:1"] == 3
    assert found["headrace_stage_figure", "gateway", "h:1", "odd/one"] == 2


def test_a_figure_of_another_stage_with_the_same_name_keeps_apart():
    found = values(report(stage="sampling", gauges={"version": 3.0}))
    assert ("headrace_engine_weight_version", "sampling", "h:1") not in found
    assert found["headrace_stage_figure", "sampling", "h:1", "version"] == 3


def test_a_wait_is_told_in_seconds_and_work_as_none():
    waiting = values(report(waiting_for="calls", waiting_since_unix_s=60.0))
    working = values(report(waiting_since_unix_s=60.0))
    assert waiting["headrace_waiting_seconds", "gateway", "h:1"] == 40
    assert working["headrace_waiting_seconds", "gateway", "h:1"] == 0


def test_an_error_that_a_stage_tells_of_is_a_metric_without_its_text():
    found = values(report(labels={"weights_error": "checksum of w: expected a, found b", "kind": "builtin"}))
    assert found["headrace_stage_error", "gateway", "h:1", "weights_error"] == 1
    assert not any("checksum" in part for key in found for part in key)


def test_the_endpoint_serves_text_that_prometheus_reads(port):
    parser = pytest.importorskip("prometheus_client.parser")
    exporter = Exporter()
    exporter.reports = [report(received=7, gauges={"version": 3.0}), report(stage="trainer", gauges={"reward": 0.5})]
    stop = start_endpoint(exporter, "127.0.0.1", port)
    try:
        text = scraped(port)
        exporter.reports = [report(received=9)]
        later = scraped(port)
    finally:
        stop()
    read = {
        sample.name: (sample.labels, sample.value)
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["stage"] == "gateway"
    }
    assert read["headrace_messages_received_total"] == ({"run": "r", "stage": "gateway", "worker": "h:1"}, 7.0)
    assert read["headrace_engine_weight_version"][1] == 3.0
    assert 'headrace_trainer_reward{run="r",stage="trainer",worker="h:1"} 0.5' in text
    assert 'headrace_messages_received_total{run="r",stage="gateway",worker="h:1"} 9.0' in later


def test_a_second_process_of_a_stage_takes_the_next_port(port):
    pytest.importorskip("prometheus_client")
    stops = [start_endpoint(Exporter(), "127.0.0.1", port) for _ in range(2)]
    try:
        assert scraped(port + STRIDE) == scraped(port)
    finally:
        for stop in stops:
            stop()


async def test_the_endpoint_ends_with_its_task(port):
    pytest.importorskip("prometheus_client")
    asked = anyio.Event()

    def reports():
        asked.set()
        return [report(stage="sampling", received=1)]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_metrics, MetricsSection(port=port), "sampling", reports)
        await asked.wait()
        assert "headrace_messages_received_total" in await anyio.to_thread.run_sync(scraped, port)
        tasks.cancel_scope.cancel()
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"headrace\[metrics\]"):
        start_endpoint(Exporter(), "127.0.0.1", 1)


def test_every_stage_has_a_port_of_its_own():
    assert set(PLACES) == {*STAGES, "engine", "watchdog"}
    assert len(set(PLACES)) == len(PLACES)
    assert len({first_port(9400, stage) for stage in STAGES}) == len(STAGES)
    assert first_port(9400, "trainer", rank=3) == 9410


def test_the_endpoint_is_off_and_on_the_loopback_unless_set():
    assert (MetricsSection().port, MetricsSection().host) == (0, "127.0.0.1")
    with pytest.raises(ConfigError, match=r"metrics\.port"):
        decode_config({"streams": [{"name": "s", "stream_id": "s"}], "metrics": {"port": -1}})


def test_names_follow_prometheus_rules_and_are_unique():
    assert len(NAMES) == len(DEFINITIONS)
    for definition in DEFINITIONS:
        assert re.fullmatch(r"headrace_[a-z_]+", definition.name)
        assert definition.name.endswith("_total") == (definition.kind == "counter")


def test_the_document_and_the_dashboard_are_current():
    assert (ROOT / MARKDOWN_PATH).read_text(encoding="utf-8") == markdown(), "python -m ops.metrics"
    assert (ROOT / DASHBOARD_PATH).read_text(encoding="utf-8") == dashboard(), "python -m ops.metrics"


def named(expression):
    return set(re.findall(r"headrace_[a-z_]+", expression))


def test_every_metric_of_the_dashboard_exists_and_is_narrowed_to_the_run():
    panels = json.loads(dashboard())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert set().union(*map(named, expressions)) <= NAMES
    for expression in expressions:
        assert expression.count('{run="$run"}') == len(re.findall(r"headrace_[a-z_]+", expression)), expression


def test_every_alert_names_metrics_that_exist_and_what_to_do():
    rules = yaml.safe_load((ROOT / "ops/deploy/alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    for rule in rules:
        assert named(rule["expr"]) <= NAMES, rule["alert"]
        assert named(rule["expr"]) or rule["alert"] == "HeadraceProcessDown"
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning")
