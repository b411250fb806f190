"""docs/metrics.md and the Grafana dashboard, made from the definitions. `python -m ops.metrics` writes both."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from ops.metrics.definitions import DEFINITIONS, LABELS, PREFIX, Definition
from ops.metrics.serving import PLACES, STRIDE

MARKDOWN_PATH: Final = "docs/metrics.md"
DASHBOARD_PATH: Final = "ops/deploy/grafana-dashboard.json"

_HEAD: Final = """\
# Metrics

Generated from the code by `python -m ops.metrics`; do not edit by hand.

With `[metrics] port` set, every worker process serves `http://<metrics.host>:<port>/metrics` in Prometheus' text format
(`pip install 'headrace[metrics]'`). The host is the loopback unless set otherwise: the endpoint has no login.

A process listens on `metrics.port` plus the place of its first stage: {places}. Each trainer rank adds its number on its
machine. A further process of the same stage on one machine takes the next free port in steps of {stride}; its log says which.
`headrace run` has stages (+0), gateway (+6) and trainer (+7), and itself, with the watchdog (+9). For `port = 9400`:

```yaml
scrape_configs:
  - job_name: headrace
    scrape_interval: 5s
    static_configs:
      - targets: ["127.0.0.1:9400", "127.0.0.1:9406", "127.0.0.1:9407", "127.0.0.1:9409"]
rule_files: ["ops/deploy/alerts.yml"]
```

Alert rules are in [ops/deploy/alerts.yml](../ops/deploy/alerts.yml), a Grafana dashboard in
[ops/deploy/grafana-dashboard.json](../ops/deploy/grafana-dashboard.json) (Dashboards → Import).

Every metric has the labels {labels}; `worker` is host:pid.
"""


def markdown() -> str:
    """docs/metrics.md."""
    places = ", ".join(f"{stage} +{place}" for place, stage in enumerate(PLACES))
    head = _HEAD.format(places=places, stride=STRIDE, labels=", ".join(f"`{label}`" for label in LABELS))
    lines = [head, "| metric | kind | stage | meaning |", "| --- | --- | --- | --- |"]
    lines += [_line(definition) for definition in DEFINITIONS]
    return "\n".join(lines) + "\n"


def _line(definition: Definition) -> str:
    label = f"`{{{definition.label}}}`" if definition.label else ""
    stage = definition.stage or "any"
    return f"| `{definition.name}`{label} | {definition.kind.value} | {stage} | {definition.meaning} |"


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One graph: a title, its unit in Grafana's words, its queries with their legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


PANELS: Final[tuple[Panel, ...]] = (
    Panel(title="Reward", unit="none", queries=(("headrace_trainer_reward", "reward"),)),
    Panel(
        title="Staleness of the oldest row",
        unit="none",
        queries=(("headrace_trainer_staleness", "versions"),),
    ),
    Panel(
        title="Step time",
        unit="s",
        queries=(("headrace_trainer_step_seconds", "step"), ("headrace_trainer_fetch_seconds", "fetching rows")),
    ),
    Panel(
        title="Tokens per second",
        unit="none",
        queries=(
            ("headrace_engine_tokens_per_second", "sampled {{worker}}"),
            ("headrace_trainer_tokens_per_second", "trained {{worker}}"),
        ),
    ),
    Panel(
        title="Weight versions",
        unit="none",
        queries=(("headrace_trainer_step", "trained"), ("headrace_engine_weight_version", "engine {{worker}}")),
    ),
    Panel(title="Mismatch of engine and trainer (k3)", unit="none", queries=(("headrace_trainer_mismatch_kl", "kl"),)),
    Panel(
        title="Groups",
        unit="none",
        queries=(
            ("headrace_groups_running", "running"),
            ("headrace_groups_waiting", "waiting to be trained"),
            ("headrace_groups_open", "open in assembly"),
            ("headrace_groups_capacity", "credit"),
        ),
    ),
    Panel(
        title="Groups ended per minute",
        unit="none",
        queries=(
            ("60 * rate(headrace_groups_trained_total[1m])", "trained"),
            ("60 * rate(headrace_groups_dropped_total[1m])", "dropped"),
        ),
    ),
    Panel(
        title="Engine load",
        unit="none",
        queries=(
            ("headrace_engine_requests_running", "running {{worker}}"),
            ("headrace_engine_requests_waiting", "waiting {{worker}}"),
            ("headrace_gateway_sessions", "sessions {{worker}}"),
        ),
    ),
    Panel(
        title="Messages per second by stage",
        unit="none",
        queries=(("sum by (stage) (rate(headrace_messages_succeeded_total[1m]))", "{{stage}}"),),
    ),
    Panel(title="Waits", unit="s", queries=(("max by (stage) (headrace_waiting_seconds)", "{{stage}}"),)),
    Panel(
        title="Retries, dead letters, failed calls",
        unit="none",
        queries=(
            ("sum by (stage) (increase(headrace_messages_retried_total[5m]))", "retried {{stage}}"),
            ("sum by (stage) (increase(headrace_messages_dead_total[5m]))", "dead {{stage}}"),
            ("increase(headrace_gateway_failed_calls_total[5m])", "failed calls {{worker}}"),
        ),
    ),
)


def dashboard() -> str:
    """A Grafana dashboard, three panels a row, for a chosen run."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": source,
            "gridPos": {"x": number % 3 * 8, "y": number // 3 * 8, "w": 8, "h": 8},
            "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"lineWidth": 2}}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + index), "datasource": source, "expr": of_run(query), "legendFormat": legend}
                for index, (query, legend) in enumerate(panel.queries)
            ],
        }
        for number, panel in enumerate(PANELS)
    ]
    run = {
        "name": "run", "type": "query", "label": "run", "datasource": source, "refresh": 2,
        "query": f"label_values({DEFINITIONS[0].name}, run)",
    }  # fmt: skip
    whole = {
        "title": "headrace",
        "uid": "headrace",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}, run]},
        "panels": panels,
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode() + "\n"


def of_run(query: str) -> str:
    """A query with every metric in it narrowed to the dashboard's run."""
    return re.sub(rf"{PREFIX}[a-z_]+", lambda found: f'{found[0]}{{run="$run"}}', query)
