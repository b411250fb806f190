"""Audit files: complete, private, and never written through a link."""

import os
import stat

import msgspec
import pytest

from ops.audit_files import AuditFileError, write_audit
from schemas.config_arena import RewardRef, StreamConfig
from schemas.messages.rollout import EpisodeClass, EpisodeEnded
from stages.clients.arena.audit import audit_record

STREAM = StreamConfig(
    name="s", stream_id="arena-s", expected_reward_ref=RewardRef(key="r", version="3"), task_envs={"K": "marked-env"}
)


def _ended(**changes) -> EpisodeEnded:
    fields = {
        "group": "g1", "slot": 0, "attempt": 1, "stream": "s", "data_id": "d", "session": "g1-0-1-0", "outcome": EpisodeClass.SCORED, "final": True,
        "status": "DONE", "score": 0.5, "task_id": "t", "trace_id": "tr", "artifacts_uri": "arena://t", "raw_json": b'{"a":1}', "raw_size_bytes": 7, "computed_at": "now",
    }  # fmt: skip
    return EpisodeEnded(**{**fields, **changes})


def _mode(path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_a_record_holds_everything_needed_to_ask_about_the_episode_later(tmp_path) -> None:
    rejected = _ended(
        outcome=EpisodeClass.SYSTEM, status="LOCAL_WAIT_TIMEOUT", score=None, raw_json=b"", raw_size_bytes=90000
    )
    records = [audit_record(_ended(), STREAM, 1.0), audit_record(rejected, STREAM, None)]
    assert write_audit(tmp_path / "audit", "run.jsonl", records) == 2
    first, second = [msgspec.json.decode(line) for line in (tmp_path / "audit" / "run.jsonl").read_bytes().splitlines()]
    assert (first["stream"], first["data_id"], first["task_id"], first["session"]) == ("s", "d", "t", "g1-0-1-0")
    assert (first["status"], first["outcome"], first["expected_reward_ref"]) == ("DONE", "scored", "r@3")
    assert (first["score"], first["training_reward"], first["raw"], first["raw_size_bytes"]) == (0.5, 1.0, {"a": 1}, 7)
    assert (first["artifacts_uri"], first["trace_id"], first["computed_at"]) == ("arena://t", "tr", "now")
    assert (second["training_reward"], second["raw"], second["raw_size_bytes"], second["outcome"]) == (
        None,
        None,
        90000,
        "system",
    )
    assert b"marked-env" not in (tmp_path / "audit" / "run.jsonl").read_bytes()


def test_the_folder_is_0700_and_the_file_0600_whatever_they_were(tmp_path) -> None:
    folder = tmp_path / "audit"
    folder.mkdir(mode=0o755)
    (folder / "a.jsonl").write_text("longer old content" * 100)
    (folder / "a.jsonl").chmod(0o644)
    write_audit(folder, "a.jsonl", [audit_record(_ended(), STREAM, 1.0)])
    assert (_mode(folder), _mode(folder / "a.jsonl")) == (0o700, 0o600)
    assert len((folder / "a.jsonl").read_bytes().splitlines()) == 1


def test_symbolic_links_hard_links_and_paths_are_refused(tmp_path) -> None:
    real, linked = tmp_path / "real", tmp_path / "linked"
    real.mkdir()
    linked.symlink_to(real)
    with pytest.raises(AuditFileError, match="no symbolic link"):
        write_audit(linked, "a.jsonl", [])
    target = tmp_path / "target"
    target.write_text("kept")
    (real / "a.jsonl").symlink_to(target)
    with pytest.raises(AuditFileError, match="no symbolic link"):
        write_audit(real, "a.jsonl", [])
    (real / "b.jsonl").hardlink_to(target)
    with pytest.raises(AuditFileError, match="one name"):
        write_audit(real, "b.jsonl", [])
    with pytest.raises(AuditFileError, match="plain file name"):
        write_audit(real, "../a.jsonl", [])
    assert target.read_text() == "kept"
