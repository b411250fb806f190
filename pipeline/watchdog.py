"""Which stage of a run is stuck, what it waits for, and since when: pure.

    silent      nobody speaks for it any more: stopped, dead, or its event loop is blocked
    blocked     it says itself that it can't go on: the store is full, the broker away
    not taking  work waits before it and none is taken
    not ending  it has short work in hand and none ends
    standing    nothing in the whole run ends, and this one has work in hand
    stopped     it ended for a reason that it told: a lost lease, a broken contract

It hears the workers' reports and looks at the durables now and then, and compares them with what it knew. It must not know
how that is told, nor a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from pipeline.metrics import WorkerReport

WATCHDOG: Final = "watchdog"
"""As which stage its report is announced."""
STUCK_PREFIX: Final = "stuck."
"""Gauges of its report: seconds for which a stage has been stuck; labels of the same name: the verdict as JSON."""
GONE_PREFIX: Final = "gone."
"""Gauges and labels of its report: nodes of which no process is left."""
BROKER: Final = "broker"
"""As which stage the broker is told that does not answer."""
STOPPED_LABEL: Final = "stopped_error"
"""A worker's last word, under this label: why a stage of it stops."""
STOPPED_KIND: Final = "stopped"
LONG_WORK: Final = frozenset({"arena_launch", "gateway", "trainer", "engine", "bridge"})
"""Stages whose single piece of work may take very long."""
FOLDS: Final = frozenset({"sampling", "assembly"})


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A stage that does not go on."""

    stage: str
    kind: str
    """silent | blocked | not taking | not ending | standing | stopped"""
    waits_for: str
    """In words: what it waits for, as far as it is known."""
    since_unix_s: float
    worker: str = ""
    """host:pid of one of its workers."""


class WatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient it is."""

    stuck_after_s: float = 20.0
    silent_after_s: float = 10.0
    remember_stopped_s: float = 60.0
    """For how long a stage's last word is told, though it was started again meanwhile."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a durable has before it."""

    pending: int
    in_hand: int
    num_waiting: int
    """Parked pulls."""


class _Known(msgspec.Struct, kw_only=True):
    """A worker, as it was heard of."""

    report: WorkerReport
    heard_s: float
    progress: tuple[int, int]
    moved_s: float
    """When its counts changed last."""
    first_s: float


class Watchdog:
    """What is known of a run's workers."""

    def __init__(self, settings: WatchSettings) -> None:
        self._settings: Final = settings
        self._known: Final[dict[tuple[str, str], _Known]] = {}
        self._loads: Mapping[str, Load] = {}
        self._load_since: Final[dict[str, float]] = {}
        self._stopped: Final[dict[str, tuple[Stuck, float]]] = {}

    def hear(self, report: WorkerReport, now_s: float) -> None:
        """A worker spoke."""
        key = (report.stage, report.worker)
        if reason := report.labels.get(STOPPED_LABEL):
            verdict = self._verdict(report, STOPPED_KIND, reason, report.unix_time_s)
            self._stopped[report.stage] = (verdict, now_s)
            self._known.pop(key, None)
            return
        progress = (report.received, report.succeeded + report.retried + report.dead)
        known = self._known.get(key)
        if known is None:
            self._known[key] = _Known(report=report, heard_s=now_s, progress=progress, moved_s=now_s, first_s=now_s)
            return
        if progress != known.progress:
            known.moved_s = now_s
        known.report, known.heard_s, known.progress = report, now_s, progress

    def weigh(self, loads: Mapping[str, Load], now_s: float) -> None:
        """What waits before each stage now."""
        self._loads = loads
        for stage, load in loads.items():
            if load.pending:
                self._load_since.setdefault(stage, now_s)
            else:
                self._load_since.pop(stage, None)

    def dismiss(self, workers: Collection[str]) -> None:
        """These took their leave in good order: nobody waits for a word of them."""
        for key in [key for key in self._known if key[1] in workers]:
            del self._known[key]

    def forget(self, now_s: float) -> None:
        """Drop workers that others have followed: they were started again."""
        for key, known in list(self._known.items()):
            followed = any(
                stage == key[0] and other.first_s >= known.heard_s
                for (stage, worker), other in self._known.items()
                if worker != key[1]
            )
            if followed and now_s - known.heard_s > self._settings.silent_after_s:
                del self._known[key]

    def stuck(self, now_s: float) -> list[Stuck]:
        """Everything that does not go on, worst first. At most one verdict a stage."""
        self.forget(now_s)
        found: dict[str, Stuck] = {
            stage: verdict
            for stage, (verdict, heard_s) in self._stopped.items()
            if now_s - heard_s <= self._settings.remember_stopped_s
        }
        for verdict in self._verdicts(now_s):
            found.setdefault(verdict.stage, verdict)
        if not found:
            found = {verdict.stage: verdict for verdict in self._standing(now_s)}
        return list(found.values())

    def _verdicts(self, now_s: float) -> Iterable[Stuck]:
        for known in self._known.values():
            if now_s - known.heard_s > self._settings.silent_after_s:
                yield self._silent(known)
        for known in self._known.values():
            if now_s - known.heard_s <= self._settings.silent_after_s:
                yield from self._hindered(known, now_s)

    def _silent(self, known: _Known) -> Stuck:
        waited = f" (it waited for {known.report.waiting_for})" if known.report.waiting_for else ""
        return Stuck(
            stage=known.report.stage,
            kind="silent",
            waits_for=f"a sign of life of worker {known.report.worker}: it is stopped, dead or blocked{waited}",
            since_unix_s=known.report.unix_time_s,
            worker=known.report.worker,
        )

    def _hindered(self, known: _Known, now_s: float) -> Iterable[Stuck]:
        report, stage, patience_s = known.report, known.report.stage, self._settings.stuck_after_s
        if report.waiting_for.startswith("blocked") and report.unix_time_s - report.waiting_since_unix_s > patience_s:
            yield self._verdict(report, "blocked", report.waiting_for, report.waiting_since_unix_s)
        load = self._loads.get(stage)
        stood_s = now_s - known.moved_s
        if stood_s <= patience_s:
            return
        since_s = report.unix_time_s - stood_s
        waiting_s = now_s - self._load_since.get(stage, now_s)
        if load is not None and load.pending and not report.in_flight and waiting_s > patience_s:
            pulls = "no pull is parked" if not load.num_waiting else f"{load.num_waiting} pulls are parked"
            words = f"the first of {load.pending} messages that wait before it; {pulls}"
            yield self._verdict(report, "not taking", words, since_s)
        elif report.in_flight and stage not in LONG_WORK and stage not in FOLDS:
            words = report.waiting_for or f"the end of {report.in_flight} messages in its hands"
            yield self._verdict(report, "not ending", words, since_s)

    def _standing(self, now_s: float) -> Iterable[Stuck]:
        """Nothing ends anywhere: whoever has work in hand is named. Folds are left out, since time moves them."""
        workers = [known for (stage, _), known in self._known.items() if stage not in FOLDS and stage != "retention"]
        moved_s = max((known.moved_s for known in workers), default=now_s)
        if now_s - moved_s <= self._settings.stuck_after_s:
            return
        for known in workers:
            if known.report.in_flight:
                words = known.report.waiting_for or f"the end of {known.report.in_flight} pieces of work in its hands"
                yield self._verdict(known.report, "standing", words, known.report.unix_time_s - (now_s - moved_s))

    @staticmethod
    def _verdict(report: WorkerReport, kind: str, waits_for: str, since_unix_s: float) -> Stuck:
        return Stuck(
            stage=report.stage, kind=kind, waits_for=waits_for, since_unix_s=since_unix_s, worker=report.worker
        )


def told(report: WorkerReport) -> list[Stuck]:
    """What a watchdog's report says."""
    return [
        msgspec.json.decode(text, type=Stuck)
        for key, text in sorted(report.labels.items())
        if key.startswith(STUCK_PREFIX)
    ]
