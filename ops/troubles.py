"""What is wrong with a run now, each with a name: the one list that status, top and report show. Pure.

Metrics tell the same figures one by one (`ops.metrics.definitions`), and each name has its alert in ops/deploy/alerts.yml.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from ops.engines.announcing import fault
from ops.logtools.plain import duration
from pipeline.headroom import STORE_LABEL
from pipeline.metrics import WorkerReport
from pipeline.watchdog import BROKER, GONE_PREFIX, STOPPED_KIND, STOPPED_LABEL, Stuck, told
from schemas.messages.engines import EngineAnnouncement
from stages.weights.receive import ERROR_LABEL, STATE_LABEL


class TroubleKind(StrEnum):
    """What a person calls it."""

    BROKER_AWAY = "broker away"
    NODE_GONE = "node gone"
    STAGE_STOPPED = "stage stopped"
    """It ended for a reason of its own: a lost lease, a broken contract."""
    STAGE_STUCK = "stage stuck"
    PROCESS_DEAD = "process dead"
    STORE_FULL = "store full"
    ARENA_AWAY = "arena away"
    ENGINE_QUARANTINED = "engine quarantined"
    WEIGHTS_REFUSED = "weights refused"
    STAGE_ERROR = "stage error"
    DEAD_LETTERS = "dead letters"


ARENA_LABEL: Final = "arena_error"
STORE_FULL: Final = TroubleKind.STORE_FULL.value
ENGINE_LABEL: Final = "engine"
"""What an engine's worker calls its engine."""
_OF_LABEL: Final[Mapping[str, TroubleKind]] = {
    STORE_LABEL: TroubleKind.STORE_FULL,
    ARENA_LABEL: TroubleKind.ARENA_AWAY,
    STATE_LABEL: TroubleKind.ENGINE_QUARANTINED,
    ERROR_LABEL: TroubleKind.WEIGHTS_REFUSED,
    STOPPED_LABEL: TroubleKind.STAGE_STOPPED,
}
_ORDER: Final = tuple(TroubleKind)
ADVICE: Final[Mapping[TroubleKind, str]] = {
    TroubleKind.BROKER_AWAY: "look at the NATS server; workers keep what they have and go on by themselves",
    TroubleKind.NODE_GONE: "start its share again: headrace up TOPOLOGY --node NAME; others have its work meanwhile",
    TroubleKind.STAGE_STOPPED: "the supervisor starts it again; more is in its log, in the run's logs folder",
    TroubleKind.STAGE_STUCK: "look at its process and at its log, in the run's logs folder; a stopped or killed one is followed by another",
    TroubleKind.PROCESS_DEAD: "look whether it hangs, and at its log, in the run's logs folder; who started it by hand starts it again",
    TroubleKind.STORE_FULL: "end what holds the mark, or raise the limit: headrace broker apply CONFIG --update",
    TroubleKind.ARENA_AWAY: "headrace preflight CONFIG; running tasks are polled until their deadline",
    TroubleKind.ENGINE_QUARANTINED: "headrace engine ps, headrace engine logs NAME; it serves again after a load and its probe",
    TroubleKind.WEIGHTS_REFUSED: "the former version serves; the load is tried again until it succeeds or a newer version comes",
    TroubleKind.STAGE_ERROR: "look at its log, in the run's logs folder",
    TroubleKind.DEAD_LETTERS: "headrace dead list, then headrace dead retry ID or drop ID",
}
"""What a person may do."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that somebody has to look at."""

    kind: TroubleKind
    what: str
    """Which stage, engine, node or process."""
    text: str
    """What is known of it, in words."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}: {self.text}" if self.text else f"{self.kind}: {self.what}"


def troubles(
    reports: Iterable[WorkerReport],
    *,
    engines: Iterable[EngineAnnouncement] = (),
    dead: Sequence[str] = (),
    dead_nodes: Sequence[str] = (),
    dead_letters: Mapping[str, int] | None = None,
    now_s: float,
) -> list[Trouble]:
    """Everything that is wrong, worst first.

    Args:
        reports: of all workers; the watchdog's among them says who is stuck and which node is gone.
        dead: processes that vanished, in words.
        dead_letters: stage → letters that nobody has dealt with.
        now_s: the wall clock, seconds since 1970.
    """
    found = [
        Trouble(kind=TroubleKind.NODE_GONE, what=node, text="none of its processes is left") for node in dead_nodes
    ]
    found += [_vanished(line) for line in dead]
    for report in reports:
        found += [_stuck(verdict, now_s) for verdict in told(report)]
        found += _of_report(report)
    found += [
        Trouble(kind=TroubleKind.ENGINE_QUARANTINED, what=one.name, text=wrong)
        for one in engines
        if (wrong := fault(one))
    ]
    for stage, count in sorted((dead_letters or {}).items()):
        if count:
            found.append(Trouble(kind=TroubleKind.DEAD_LETTERS, what=stage, text=f"{count} open"))
    return sorted(_once(found), key=lambda trouble: _ORDER.index(trouble.kind))


def _once(found: Iterable[Trouble]) -> Iterable[Trouble]:
    """One of each kind for each thing: several witnesses of one fault tell it once."""
    return {(trouble.kind, trouble.what): trouble for trouble in found}.values()


def _vanished(obituary: str) -> Trouble:
    what, ends, text = obituary.partition("): ")
    return Trouble(kind=TroubleKind.PROCESS_DEAD, what=f"{what})" if ends else what, text=text)


def _stuck(verdict: Stuck, now_s: float) -> Trouble:
    since = duration(max(0.0, now_s - verdict.since_unix_s))
    if verdict.kind == STOPPED_KIND:
        return Trouble(kind=TroubleKind.STAGE_STOPPED, what=verdict.stage, text=f"{verdict.waits_for} ({since} ago)")
    if verdict.stage == BROKER:
        return Trouble(kind=TroubleKind.BROKER_AWAY, what=verdict.stage, text=f"{verdict.waits_for}, for {since}")
    return Trouble(
        kind=TroubleKind.STAGE_STUCK,
        what=verdict.stage,
        text=f"{verdict.kind}: waits for {verdict.waits_for}, for {since}",
    )


def _of_report(report: WorkerReport) -> Iterable[Trouble]:
    where = report.labels.get(ENGINE_LABEL) or f"{report.stage} {report.worker}"
    for label, text in report.labels.items():
        if label.startswith(GONE_PREFIX):
            yield Trouble(kind=TroubleKind.NODE_GONE, what=label.removeprefix(GONE_PREFIX), text=text)
        elif text and label in _OF_LABEL:
            yield Trouble(kind=_OF_LABEL[label], what=where, text=text.removeprefix(f"blocked: {STORE_FULL}: "))
        elif text and label.endswith("_error"):
            yield Trouble(kind=TroubleKind.STAGE_ERROR, what=where, text=f"{label.removesuffix('_error')}: {text}")
