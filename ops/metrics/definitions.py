"""The one list of metrics: name, kind, meaning, and where in a worker's report each comes from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.metrics import WorkerReport
from pipeline.watchdog import GONE_PREFIX, STUCK_PREFIX, WATCHDOG
from stages.weights.receive import STATE_LABEL

PREFIX: Final = "headrace_"
_QUARANTINED: Final = "engine_quarantined"
LABELS: Final = ("run", "stage", "worker")
"""Labels of every metric."""


class Kind(StrEnum):
    """As Prometheus names them."""

    COUNTER = "counter"
    """Only rises while its process lives; its name ends in _total."""
    GAUGE = "gauge"


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """One metric."""

    name: str
    kind: Kind
    meaning: str
    field: str = ""
    """The field of WorkerReport that it shows."""
    stage: str = ""
    """For a figure that a stage tells of itself: the stage; empty: any."""
    figure: str = ""
    """… and its name among the report's gauges."""
    label: str = ""
    """A label of its own, beside LABELS."""


def _field(name: str, kind: Kind, field: str, meaning: str) -> Definition:
    return Definition(name=PREFIX + name, kind=kind, meaning=meaning, field=field)


def _figure(name: str, stage: str, figure: str, meaning: str, kind: Kind = Kind.GAUGE) -> Definition:
    return Definition(name=PREFIX + name, kind=kind, meaning=meaning, stage=stage, figure=figure)


WAITING: Final = _field(
    "waiting_seconds",
    Kind.GAUGE,
    "waiting_since_unix_s",
    "How long it has waited for the same thing; 0 while it works.",
)
ERRORS: Final = Definition(
    name=f"{PREFIX}stage_error",
    kind=Kind.GAUGE,
    meaning="1 while a stage tells of an error of that kind: weights_error (weights that can't be loaded), engine_quarantined, arena_error (the Arena does not answer), store_error (the store is full).",
    label="kind",
)
STUCK: Final = Definition(
    name=f"{PREFIX}stuck_seconds",
    kind=Kind.GAUGE,
    meaning="For how long a stage has not gone on although it should; there is none while all go on. `headrace status` says what it waits for.",
    label="stuck",
)
GONE: Final = Definition(
    name=f"{PREFIX}node_gone",
    kind=Kind.GAUGE,
    meaning="1 for a node of which no process is left, though none said that it ends.",
    label="node",
)
OTHER_FIGURES: Final = Definition(
    name=f"{PREFIX}stage_figure",
    kind=Kind.GAUGE,
    meaning="Any further figure that a stage tells of itself, by its name (assembly: those of the last step).",
    label="figure",
)

DEFINITIONS: Final[tuple[Definition, ...]] = (
    _field("messages_received_total", Kind.COUNTER, "received", "Messages that the stage took in."),
    _field("messages_succeeded_total", Kind.COUNTER, "succeeded", "Messages that it dealt with."),
    _field("messages_published_total", Kind.COUNTER, "published", "Messages that it put on the log."),
    _field("messages_adopted_total", Kind.COUNTER, "adopted", "Outputs that stood on the log already: work done twice, told once."),
    _field("messages_retried_total", Kind.COUNTER, "retried", "Messages given back to be tried again."),
    _field("messages_dead_total", Kind.COUNTER, "dead", "Messages given up: `headrace dead list`."),
    _field("in_flight", Kind.GAUGE, "in_flight", "Messages (gateway: model calls) in work."),
    _field("busy_seconds_total", Kind.COUNTER, "busy_s", "Time spent in handlers, added up."),
    WAITING,
    _field("report_time_seconds", Kind.GAUGE, "unix_time_s", "When the worker last looked at its counters, Unix time: stands still when its event loop does."),
    ERRORS,
    STUCK,
    GONE,
    _figure("broker_connected", "", "broker_connected", "1 while all connections of the process to the broker stand."),
    _figure("broker_reconnects_total", "", "broker_reconnects", "Times that they were renewed.", Kind.COUNTER),
    _figure("store_log_share", "retention", "log_share", "How full the run's log is, 0 to 1."),
    _figure("store_payload_share", "retention", "payload_share", "How full its payload store is, 0 to 1."),
    _figure("store_blocked", "retention", "blocked", "1 while the store is so full that nothing new is begun; `headrace status` says who holds the mark."),
    _figure("store_room_groups", "retention", "room_groups", "More groups for which the store has room; there is none before the first group has ended."),
    _figure("low_water_mark", "retention", "mark", "Sequence below which nobody needs the log any more."),
    _figure("purged_messages_total", "retention", "purged_messages", "Messages purged below the mark.", Kind.COUNTER),
    _figure("collected_payloads_total", "retention", "collected_payloads", "Payloads collected.", Kind.COUNTER),
    _figure("groups_issued_total", "sampling", "groups_issued", "Groups issued in the run.", Kind.COUNTER),
    _figure("groups_running", "sampling", "groups_running", "Groups being rolled out."),
    _figure("groups_waiting", "sampling", "groups_waiting", "Usable groups that wait to be trained."),
    _figure("groups_capacity", "sampling", "capacity", "Groups that may be issued now (credit)."),
    _figure("groups_trained_total", "assembly", "groups_trained", "Groups whose step was trained.", Kind.COUNTER),
    _figure("groups_dropped_total", "assembly", "groups_dropped", "Groups that are not trained, for whatever reason.", Kind.COUNTER),
    _figure("groups_open", "assembly", "groups_open", "Groups that miss trajectories."),
    _figure("late_members_total", "assembly", "late_members", "Trajectories that came after their group was closed.", Kind.COUNTER),
    _figure("assembly_next_step", "assembly", "next_step", "The step that is being assembled."),
    _figure("engine_weight_version", "gateway", "version", "Weight version that the engine answers with."),
    _figure("engine_requests_running", "gateway", "running", "Requests that the engine works at."),
    _figure("engine_requests_waiting", "gateway", "waiting", "Requests that wait in the engine."),
    _figure("engine_tokens_per_second", "gateway", "tokens_per_s", "Sampled tokens, over the last second."),
    _figure("server_weight_version", "engine", "version", "Weight version that a server confirmed."),
    _figure("server_requests_running", "engine", "running", "Requests that a server samples, of all gateways."),
    _figure("server_requests_waiting", "engine", "waiting", "Requests queued in a server."),
    _figure("server_capacity", "engine", "capacity", "Requests that a server samples at once at the most."),
    _figure("server_restarts_total", "engine", "num_restarts", "Times that a server was started again.", Kind.COUNTER),
    _figure("gateway_sessions", "gateway", "sessions", "Open sessions."),
    _figure("gateway_online_free_slots", "gateway", "online_free_slots", "Slots of online streams that wait for a session."),
    _figure("gateway_online_sessions", "gateway", "online_sessions", "Open sessions of users' own services, of all gateways."),
    _figure("gateway_online_without_reward", "gateway", "online_without_reward", "Ended online sessions that wait for their reward."),
    _figure("gateway_online_refused_total", "gateway", "online_refused", "Requests for an online session that got none for want of credit.", Kind.COUNTER),
    _figure("gateway_failed_calls_total", "gateway", "failed_calls", "Model calls answered with an error.", Kind.COUNTER),
    _figure("gateway_context_overflows_total", "gateway", "context_overflows", "Calls that did not fit into the context.", Kind.COUNTER),
    _figure("gateway_prefix_breaks_total", "gateway", "prefix_breaks", "Calls that did not continue their session's tokens: they start a row of their own.", Kind.COUNTER),
    _figure("launch_extra_total", "arena_launch", "extra_launches", "Launches repeated, since the answer to one was lost.", Kind.COUNTER),
    _figure("trainer_step", "trainer", "step", "The last trained step."),
    _figure("trainer_step_seconds", "trainer", "step_s", "Duration of the last step: rows, update, weights."),
    _figure("trainer_fetch_seconds", "trainer", "fetch_s", "… of which fetching its rows."),
    _figure("trainer_tokens_per_second", "trainer", "tokens_per_s", "Trained tokens per second of the last step."),
    _figure("trainer_reward", "trainer", "reward", "Mean reward of the last step."),
    _figure("trainer_staleness", "trainer", "staleness", "Versions by which the last step's oldest row was behind."),
    _figure("trainer_mismatch_kl", "trainer", "mismatch_kl", "How far the engine's log-probs are from the trainer's at the same weights (mean k3)."),
    OTHER_FIGURES,
)  # fmt: skip


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One value of one metric."""

    definition: Definition
    labels: tuple[str, ...]
    value: float


def samples(reports: Sequence[WorkerReport]) -> Iterator[Sample]:
    """Everything that some reports say."""
    for report in reports:
        where = (report.run, report.stage, report.worker)
        told: set[str] = set()
        for definition in DEFINITIONS:
            if definition.field:
                yield Sample(definition=definition, labels=where, value=_value(report, definition))
            elif definition.figure in report.gauges and definition.stage in ("", report.stage):
                told.add(definition.figure)
                yield Sample(definition=definition, labels=where, value=report.gauges[definition.figure])
        for figure, value in report.gauges.items():
            if report.stage == WATCHDOG and figure.startswith(STUCK_PREFIX):
                stage = figure.removeprefix(STUCK_PREFIX)
                yield Sample(definition=STUCK, labels=(*where, stage), value=value)
            elif report.stage == WATCHDOG and figure.startswith(GONE_PREFIX):
                yield Sample(definition=GONE, labels=(*where, figure.removeprefix(GONE_PREFIX)), value=value)
            elif figure not in told:
                yield Sample(definition=OTHER_FIGURES, labels=(*where, figure), value=value)
        for kind, text in report.labels.items():
            if kind.endswith("_error") or kind == STATE_LABEL:
                named = _QUARANTINED if kind == STATE_LABEL else kind
                yield Sample(definition=ERRORS, labels=(*where, named), value=float(bool(text)))


def _value(report: WorkerReport, definition: Definition) -> float:
    if definition is WAITING:
        return max(0.0, report.unix_time_s - report.waiting_since_unix_s) if report.waiting_for else 0.0
    return float(getattr(report, definition.field))
