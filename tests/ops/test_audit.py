"""Audit records out of a run's log."""

import msgspec

from broker.api import Record
from ops.audit import audit_records
from ops.audit_files import write_audit
from schemas.messages.rollout import EpisodeClass, EpisodeEnded, Trajectory
from schemas.messages.sampling import RunStarted
from schemas.topics import EPISODE_ENDED, RUN_STARTED, TRAJECTORY_READY


class Log:
    """A log in memory."""

    run, place = "run-1", "memory"

    def __init__(self, *messages: tuple) -> None:
        self.records = [
            Record(subject=topic.subject("run-1", message), sequence=i, data=topic.encode(message), unix_time_s=0.0)
            for i, (topic, message) in enumerate(messages, 1)
        ]

    async def read(self, filters=()):
        assert len(filters) == 3
        for record in self.records:
            yield record


def _ended(slot: int, **changes) -> tuple:
    fields = {
        "group": "g1",
        "slot": slot,
        "attempt": 0,
        "stream": "s",
        "data_id": "d",
        "session": f"g1-{slot}-0-0",
        "outcome": EpisodeClass.SCORED,
        "final": True,
        "status": "DONE",
        "score": 0.5,
    }
    return EPISODE_ENDED, EpisodeEnded(**{**fields, **changes})


def _trajectory(slot: int, *, rejected: bool, reward: float | None) -> tuple:
    return TRAJECTORY_READY, Trajectory(
        group="g1",
        slot=slot,
        attempt=0,
        session="x",
        stream="s",
        data_id="d",
        outcome=EpisodeClass.SCORED,
        rejected=rejected,
        reward=reward,
    )


async def test_every_ended_episode_has_one_record_with_its_training_reward(tmp_path) -> None:
    stream = {"name": "s", "stream_id": "arena-s", "expected_reward_ref": {"key": "r", "version": "2"}}
    config = msgspec.json.encode({"streams": [stream], "run": {"id": "run-1"}})
    started = RUN_STARTED, RunStarted(ordinal=0, config_json=config, config_digest="x", headrace_version="0")
    log = Log(
        started,
        _ended(0),
        _ended(1, outcome=EpisodeClass.SYSTEM, status="FAILED", score=None),
        _ended(0, score=0.9),
        _ended(2, stream="other"),
        _trajectory(0, rejected=False, reward=1.0),
        _trajectory(1, rejected=True, reward=None),
    )
    records = [record async for record in audit_records(log)]
    assert [(r.slot, r.score, r.training_reward, r.outcome) for r in records] == [
        (0, 0.5, 1.0, "scored"),
        (1, None, None, "system"),
        (2, 0.5, None, "scored"),
    ]
    assert [(r.stream_id, r.expected_reward_ref) for r in records] == [
        ("arena-s", "r@2"),
        ("arena-s", "r@2"),
        ("", None),
    ]
    assert write_audit(tmp_path / "audit", "run-1.jsonl", records) == 3
