from __future__ import annotations

import msgspec
import pytest

from pipeline.metrics import WorkerReport
from pipeline.watchdog import STUCK_PREFIX, Load, Stuck, Watchdog, WatchSettings, told

START_S = 1000.0


class Scene:
    """Workers that speak every second."""

    def __init__(self) -> None:
        self.dog = Watchdog(WatchSettings(stuck_after_s=20, silent_after_s=10))
        self.now_s = START_S
        self.reports: dict[tuple[str, str], WorkerReport] = {}
        self.loads: dict[str, Load] = {}

    def worker(self, stage: str, worker: str = "host:1", **fields: object) -> None:
        report = WorkerReport(run="r", stage=stage, worker=worker, unix_time_s=0)
        self.reports[stage, worker] = msgspec.structs.replace(report, **fields)

    def silence(self, stage: str, worker: str = "host:1") -> None:
        del self.reports[stage, worker]

    def seconds(self, count: int, *, moving: tuple[str, ...] = ()) -> list[Stuck]:
        for _ in range(count):
            self.now_s += 1
            for key, report in self.reports.items():
                changes: dict[str, object] = {"unix_time_s": self.now_s}
                if key[0] in moving:
                    changes |= {"received": report.received + 1, "succeeded": report.succeeded + 1}
                self.reports[key] = msgspec.structs.replace(report, **changes)
                self.dog.hear(self.reports[key], self.now_s)
            self.dog.weigh(self.loads, self.now_s)
        return self.dog.stuck(self.now_s)


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    for stage in ("sampling", "fan_out", "arena_launch", "rewards", "assembly", "gateway", "trainer"):
        scene.worker(stage)
    return scene


def load(pending: int, in_hand: int = 0, num_waiting: int = 1) -> Load:
    return Load(pending=pending, in_hand=in_hand, num_waiting=num_waiting)


def test_idle_stages_are_not_stuck(scene):
    scene.loads = {"fan_out": load(0), "rewards": load(0)}
    assert scene.seconds(300, moving=("sampling", "assembly")) == []


def test_a_worker_that_says_nothing_is_named_within_30_seconds_with_what_it_waited_for(scene):
    scene.worker("trainer", waiting_for="step.assembled.7")
    assert scene.seconds(5) == []
    scene.silence("trainer")
    assert scene.seconds(9) == []
    verdict = scene.seconds(3)[0]
    assert (verdict.stage, verdict.kind, verdict.worker) == ("trainer", "silent", "host:1")
    assert verdict.since_unix_s == START_S + 5
    assert "it waited for step.assembled.7" in verdict.waits_for


def test_a_worker_that_was_started_again_is_forgotten(scene):
    scene.seconds(5)
    scene.silence("gateway")
    scene.seconds(2)
    scene.worker("gateway", "host:2")
    assert scene.seconds(30, moving=("gateway",)) == []


def test_one_of_two_workers_that_stops_is_named(scene):
    scene.worker("gateway", "host:2")
    scene.seconds(5)
    scene.silence("gateway", "host:2")
    assert [verdict.worker for verdict in scene.seconds(12, moving=("gateway",))] == ["host:2"]


def test_a_stage_that_takes_nothing_of_what_waits_is_named_with_its_pulls(scene):
    """nats-io/nats-server#5839: pending messages, no waiting pull, and nothing moves."""
    scene.loads = {"rewards": load(50, num_waiting=0)}
    assert scene.seconds(19, moving=("gateway",)) == []
    verdict = scene.seconds(3, moving=("gateway",))[0]
    assert (verdict.stage, verdict.kind) == ("rewards", "not taking")
    assert verdict.waits_for == "the first of 50 messages that wait before it; no pull is parked"


def test_work_that_just_came_is_no_reason_to_call_an_idle_stage_stuck(scene):
    scene.seconds(100, moving=("gateway",))
    scene.loads = {"rewards": load(1)}
    assert scene.seconds(2, moving=("gateway",)) == []


def test_short_work_that_does_not_end_is_named_and_long_work_is_not(scene):
    scene.worker("rewards", in_flight=3, waiting_for="session.closed.g1-0-0-0")
    scene.worker("arena_launch", in_flight=200)
    verdicts = scene.seconds(25, moving=("gateway",))
    assert [(verdict.stage, verdict.kind, verdict.waits_for) for verdict in verdicts] == [
        ("rewards", "not ending", "session.closed.g1-0-0-0")
    ]


def test_a_stage_that_says_that_it_is_blocked_is_named_with_its_own_words(scene):
    scene.worker("rewards", waiting_for="blocked: store full", waiting_since_unix_s=START_S)
    verdict = scene.seconds(25, moving=("gateway",))[0]
    assert (verdict.kind, verdict.waits_for, verdict.since_unix_s) == ("blocked", "blocked: store full", START_S)


def test_a_run_in_which_nothing_ends_names_who_has_work_in_hand(scene):
    scene.worker("arena_launch", in_flight=8)
    scene.seconds(5, moving=("gateway", "arena_launch"))
    assert scene.seconds(19, moving=("sampling", "assembly")) == []
    verdict = scene.seconds(5, moving=("sampling", "assembly"))[0]
    assert (verdict.stage, verdict.kind, verdict.since_unix_s) == ("arena_launch", "standing", START_S + 5)


def test_a_stage_that_goes_on_is_named_no_more(scene):
    scene.loads = {"rewards": load(5)}
    assert scene.seconds(25, moving=("gateway",)) != []
    assert scene.seconds(1, moving=("rewards",)) == []


def test_verdicts_travel_in_a_report():
    verdict = Stuck(stage="trainer", kind="silent", waits_for="a sign of life", since_unix_s=5.0, worker="h:1")
    report = WorkerReport(run="r", stage="watchdog", worker="h:2", unix_time_s=9.0, labels={
        f"{STUCK_PREFIX}trainer": msgspec.json.encode(verdict).decode(), "other": "x"
    })  # fmt: skip
    assert told(report) == [verdict]
