"""The run that chaos plays with: no torch, no model; an Arena's stream and an agent's, many small groups, quick steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

RUN: Final = "chaos"

_TOML: Final = """
[run]
id = "chaos"
stage_processes = "apart"
max_restarts = 1000000

[[streams]]
name = "reverse"
stream_id = "reverse"
sampling_weight = 2.0

[[streams]]
name = "vowels"
stream_id = "vowels"
runner = "function"
agent = "ops.chaos.agent:vowels"
rows = {rows}
agent_timeout_s = 30.0
sampling_weight = 1.0

[arena]
url = "local"
poll_interval_s = 0.1
task_timeout_s = 30.0
probe_interval_s = 5.0

[local_arena]
pool_processes = 1
model_timeout_s = 30.0

[[local_arena.streams]]
stream_id = "reverse"
dataset = "spell_backward"
dataset_options = {{ min_word_len = 3, max_word_len = 4 }}
size = 64
turns = ["reverse {{word}}", "check {{word}} {{reply}}"]
lowercase = true
harness = "two-turn@1"
domain = "reverse"

[[local_arena.harnesses]]
key = "two-turn"
kind = "openai_two_turn"
max_tokens = 16

[[local_arena.faults.calls]]
call = "launch"
kind = "lost_answer"
probability = 0.01

[sampling]
groups_per_step = 4
slots_per_group = 2
max_staleness = 5
max_concurrent_groups = 24
tick_period_s = 1.0

[rollout]
max_new_tokens = 16
max_context_tokens = 512
attempts = 5

[reward]
read_deadline_s = 20.0

[engine]
kind = "scripted"
script = "stages.engine.scripts:random_letters"

[training]
backend = "standin"
lease_s = 10.0
"""


def write_default_config(folder: Path) -> Path:
    """The built-in chaos config and the rows of its agent's stream, in `folder`; the config's path."""
    rows = folder / "rows.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for number in range(64):
            file.write(json.dumps({"id": f"w{number}", "prompt": f"say vowels {number}"}) + "\n")
    path = folder / "chaos.toml"
    path.write_text(_TOML.format(rows=json.dumps(str(rows))), encoding="utf-8")
    return path


def run_overrides(*, run_dir: Path, public_url: str) -> Sequence[str]:
    """What chaos decides in any config, beside the broker: where the run and its gateway are, and how much its log may hold."""
    return (
        f"run.dir={json.dumps(str(run_dir))}",
        f"broker.max_bytes={128 * 1024**2}",
        f"broker.max_payload_store_bytes={192 * 1024**2}",
        f"gateway.public_url={json.dumps(public_url)}",
        "gateway.recording=strict",
        "retention.purge_above=1.0",  # the audit reads the log from its beginning
    )
