"""Values that can't work end a command before anything starts, with the key, what it may be and what was found."""

from __future__ import annotations

from pathlib import Path

import msgspec
import msgspec.inspect
import pytest

from ops.cli import main
from ops.config import RunConfig, load_config
from ops.config_ranges import FORMS, NAMES, RANGES, range_of
from schemas.errors import ConfigError
from stages.assembly.settings import AssemblySettings

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
REFUSED = [
    ("rollout.temperature=nan", "rollout.temperature: expected > 0, finite, found nan"),
    ("rollout.temperature=inf", "rollout.temperature: expected > 0, finite, found inf"),
    ("rollout.temperature=-0.5", "rollout.temperature: expected > 0, finite, found -0.5"),
    ("rollout.max_concurrent_episodes=0", "expected at least 1, found 0"),
    ("rollout.max_concurrent_episodes=-5", "expected at least 1, found -5"),
    ("rollout.attempts=0", "expected at least 1, found 0"),
    ("sampling.tick_period_s=0", "expected > 0, finite, found 0"),
    ("sampling.tick_period_s=-1", "expected > 0, finite, found -1"),
    ("sampling.group_deadline_s=-1", "expected > 0, finite, found -1"),
    ("sampling.group_deadline_s=0", "expected > 0, finite, found 0"),
    ("sampling.epoch_size_groups=-3", "expected at least 0, found -3"),
    ("sampling.epoch_size_groups=7", "expected 0 or a multiple of sampling.groups_per_step (8), found 7"),
    ("sampling.order=big_first", "expected one of smallest_next, quota, found 'big_first'"),
    ("arena.poll_interval_s=0", "expected > 0"),
    ("arena.poll_interval_s=-1", "expected > 0"),
    ("arena.task_timeout_s=0", "expected > 0"),
    ("arena.task_timeout_s=-1", "expected > 0"),
    ("arena.request_timeout_s=0", "expected > 0"),
    ("arena.registration_timeout_s=-1", "expected > 0"),
    ("arena.request_retries=-1", "expected at least 0, found -1"),
    ("arena.probe_interval_s=0", "expected > 0"),
    ("arena.cleanup_timeout_s=-1", "expected > 0"),
    ("arena.min_terminal_tasks=-1", "expected at least 0 and at most 100, found -1"),
    ("arena.min_terminal_tasks=101", "expected at least 0 and at most 100, found 101"),
    ("arena.max_failure_rate=-2", "expected at least 0 and at most 1, found -2"),
    ("arena.max_failure_rate=80", "expected at least 0 and at most 1, found 80"),
    ("arena.max_raw_bytes=-1", "expected at least 0, found -1"),
    ('arena.url="ftp://x"', "expected local, or http://host:port without /openapi/v1; found 'ftp://x'"),
    ('arena.url=""', "expected local, or http://host:port"),
    ('arena.url="http://host/openapi/v1"', "without /openapi/v1; found"),
    ('arena.url="x://me:hunter2@host"', "found 'x://***@host'"),
    ('arena.receipt_path="/tasks/receipt"', "expected a path such as /tasks/{task_id}/receipt, or none"),
    ('arena.harness="nover"', 'expected "key@version"'),
    ('broker.url="http://x"', "broker.url: expected embedded, nats://host:port, tls://…"),
    ('broker.url="nats://a:1,amqp://b:2"', "broker.url: expected embedded"),
    ('broker.url="nats://"', "broker.url: expected embedded"),
    ("broker.replicas=0", "expected at least 1 and at most 5, found 0"),
    ("broker.replicas=7", "expected at least 1 and at most 5, found 7"),
    ("broker.max_bytes=0", "expected at least 1048576, found 0"),
    ("broker.max_payload_store_bytes=0", "expected at least 1048576, found 0"),
    ("broker.server_port=99999", "expected at least 0 and at most 65535, found 99999"),
    ("gateway.port=99999", "expected at least 0 and at most 65535, found 99999"),
    ("gateway.port=-1", "expected at least 0 and at most 65535, found -1"),
    ("gateway.session_idle_s=0", "expected > 0"),
    ('gateway.public_url="host:80"', "expected http://host:port, or none; found 'host:80'"),
    ("gateway.preprocessors=['nothing']", "gateway.preprocessors[0]: expected package.module:function"),
    ("gateway.preprocessors=['nope:missing']", "there is no module 'nope'"),
    ("reward.turn_discount=nan", "expected at least 0 and at most 1, found nan"),
    ("reward.turn_discount=-3", "expected at least 0 and at most 1, found -3"),
    ("reward.read_deadline_s=-1", "expected > 0"),
    ("training.lease_s=0", "expected > 0"),
    ("training.lease_s=-1", "expected > 0"),
    ("training.collective_timeout_s=0", "expected > 0"),
    ("training.collective_timeout_s=-1", "expected > 0"),
    ("training.checkpoint_timeout_s=inf", "expected > 0, finite, found inf"),
    ("training.threads=0", "expected at least 1, found 0"),
    ("training.keep_weight_versions=0", "expected at least 1, found 0"),
    ("training.keep_weight_versions=-1", "expected at least 1, found -1"),
    ("training.hold_weights_s=-1", "expected at least 0, finite, found -1"),
    ("training.learning_rate=nan", "expected > 0, finite, found nan"),
    ("training.adam_beta1=1.0", "expected at least 0 and < 1, found 1"),
    ("training.max_grad_norm=0", "expected > 0, found 0"),
    ('training.trackers=["bogus"]', "training.trackers[0]: expected one of tensorboard, wandb, trackio, found 'bogus'"),
    ('training.trackers=["wand"]', "did you mean 'wandb'?"),
    ("training.lora.dropout=2", "expected at least 0 and < 1, found 2"),
    ("training.min_lr_ratio=5", "expected at least 0 and at most 1, found 5"),
    ("policy.hidden_size=0", "expected at least 1, found 0"),
    ("policy.num_heads=0", "expected at least 1, found 0"),
    ("policy.num_heads=5", "expected an even number"),
    ("policy.warmup_target=1", "expected > 0 and < 1, found 1"),
    ("watchdog.stuck_after_s=0", "expected > 0"),
    ("watchdog.silent_after_s=-1", "expected > 0"),
    ("retention.period_s=0", "expected > 0"),
    ("retention.checkpoint_period_s=-1", "expected > 0"),
    ("retention.purge_above=nan", "expected > 0 and at most 1, found nan"),
    ("metrics.port=99999", "expected at least 0 and at most 65535, found 99999"),
    ("run.min_free_disk_bytes=-1", "expected at least 0, found -1"),
    ("run.steps=0", "expected at least 1, found 0"),
    ("engine.count=0", "engine.count: is for servers, and engine.kind = builtin has none"),
    ("engine.count=-1", "expected at least 0, found -1"),
    ("engine.max_running_requests=0", "expected at least 1, found 0"),
    ("engine.threads=0", "expected at least 1, found 0"),
    ("engine.dtype=float8", "expected one of '', auto, half"),
    ("engine.time_share_ttl_s=0", "expected > 0"),
    ("assembly.stall.rounds=0", "assembly.stall.rounds: expected at least 1, found 0"),
    ("assembly.reward_scale=nan", "assembly.reward_scale: expected a finite number, found nan"),
    ('assembly.user_filters=["stages.assembly.filters:nothing_of_the_kind"]', "has no 'nothing_of_the_kind'"),
    ('streams.reverse.reward_transform="nope:missing"', "streams.reverse.reward_transform: expected package.module"),
    ("streams.reverse.agent_processes=0", "expected at least 1"),
    ("streams.reverse.reward_threshold=nan", "finite"),
    ("streams.reverse.evaluate_every_versions=-1", "expected 0 or more"),
]


@pytest.mark.parametrize(("override", "told"), REFUSED, ids=[override for override, _ in REFUSED])
def test_a_value_that_can_not_work_is_refused_when_the_config_is_read(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(QUICKSTART, [override])
    assert told in str(refused.value)
    assert override.partition("=")[0].rpartition(".")[2] in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        "training.max_grad_norm=inf",
        "sampling.epoch_size_groups=16",
        "broker.url=nats://a:4222, nats://b:4222",
        "broker.url=amqps://u:p@mq:5671/%2f",
        "arena.url=https://arena.example.org/team/",
        'arena.receipt_path="/tasks/{task_id}/receipt"',
        "run.seed=-3",
        'gateway.preprocessors=["stages.gateway.preprocessing:load_preprocessors"]',
        'streams.reverse.reward_transform="math:copysign"',
    ],
)
def test_what_works_is_taken(override: str) -> None:
    assert isinstance(load_config(QUICKSTART, [override]), RunConfig)


def test_a_function_in_the_commands_folder_is_found_without_running_its_module(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rewards.py").write_text("raise RuntimeError\ndef halved(score, row): ...\n")
    setting = "streams.reverse.reward_transform=mine.rewards:"
    assert load_config(QUICKSTART, [f"{setting}halved"]).streams[0].reward_transform == "mine.rewards:halved"
    with pytest.raises(ConfigError, match="has no 'doubled'"):
        load_config(QUICKSTART, [f"{setting}doubled"])
    assert load_config(QUICKSTART, [f"{setting}doubled"], with_imports=False)


def test_doctor_tells_such_a_value_and_fails(capsys) -> None:
    assert main(["doctor", str(QUICKSTART), "--set", 'training.trackers=["bogus"]']) == 1
    assert "training.trackers[0]: expected one of" in " ".join(capsys.readouterr().out.split())


def leaves(struct: type[msgspec.Struct], path: str):
    """Every field below a struct with its plain types."""
    for field in msgspec.inspect.type_info(struct).fields:
        where = f"{path}.{field.name}" if path else field.name
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        for kind in kinds:
            item = getattr(kind, "item_type", kind)
            if isinstance(item, msgspec.inspect.StructType):
                yield from leaves(item.cls, where)
            else:
                yield where, item


ALL = [*leaves(RunConfig, ""), *leaves(AssemblySettings, "assembly")]


def test_every_number_has_a_rule_of_its_name_or_of_the_table() -> None:
    floats = {path for path, kind in ALL if isinstance(kind, msgspec.inspect.FloatType)}
    assert [path for path in sorted(floats) if path not in RANGES and not path.endswith("_s")] == []


def test_the_tables_name_nothing_that_is_no_setting() -> None:
    paths = {path for path, _ in ALL}
    assert sorted({*RANGES, *NAMES, *FORMS} - paths) == []


def test_every_default_is_allowed() -> None:
    assert range_of("broker.server_port", 0).holds(0)
    assert not range_of("engine.ports", 0).holds(0)
    load_config(QUICKSTART)
