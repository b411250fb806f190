"""Whatever assembly and the partition can do is reached from a config file."""

import sys
from pathlib import Path

import msgspec
import pytest

from ops.config import assembly_settings, fold_digest, load_config
from ops.workers.partitioning import Planner, partition_settings
from pipeline.fold import replay
from schemas.errors import ConfigError
from schemas.ids import group_id, row_id
from schemas.messages.rollout import EpisodeClass, Row, Trajectory
from schemas.messages.sampling import GroupClosed, GroupIssued, Tick
from schemas.messages.training import Manifest, StepAssembled
from schemas.payload import PayloadRef
from stages.assembly.fold import AssemblyFold, StalledError

sys.path.insert(0, str(Path(__file__).parent))

RUN = """
[run]
id = "r"
[[streams]]
name = "math"
stream_id = "math"
[[streams]]
name = "code"
stream_id = "code"
[arena]
url = "local"
[sampling]
groups_per_step = 2
slots_per_group = 2
max_staleness = 4
"""


@pytest.fixture
def fold(tmp_path):
    """The fold of a config file that holds RUN and more."""

    def make(more: str = "", *overrides: str) -> AssemblyFold:
        return AssemblyFold(assembly_settings(config(tmp_path, more, *overrides)))

    return make


def config(tmp_path, more="", *overrides):
    path = tmp_path / "run.toml"
    path.write_text(RUN + more, encoding="utf-8")
    return load_config(path, overrides)


def group(ordinal, rewards, *, stream="math", num_loss_tokens=10, num_tokens=20):
    yield GroupIssued(
        group=group_id(ordinal), ordinal=ordinal, stream=stream, data_id="d", num_slots=len(rewards), deadline_tick=9
    )
    for slot, reward in enumerate(rewards):
        row = Row(
            row=row_id(group_id(ordinal), slot, 0),
            tokens=PayloadRef(store="run", id=f"{ordinal:016x}{slot:016x}", size_bytes=1),
            num_tokens=num_tokens,
            num_loss_tokens=num_loss_tokens,
            min_version=0,
            max_version=0,
            reward=reward or 0.0,
        )
        yield Trajectory(
            group=group_id(ordinal),
            slot=slot,
            attempt=0,
            session="s",
            stream=stream,
            data_id="d",
            outcome=EpisodeClass.SCORED,
            rejected=reward is None,
            reason="failed" if reward is None else "",
            rows=[] if reward is None else [row],
            reward=reward,
            solved=bool(reward),
        )


def outcome(fold, *groups, ticks=0):
    """[(usable, reason)] of the closed groups, and the manifests."""
    ticked = [Tick(ordinal=n, period_s=1.0, unix_time_s=0.0) for n in range(1, ticks + 1)]
    outputs = replay(fold, [message for one in groups for message in one] + ticked)
    closed = [o.message for o in outputs if isinstance(o.message, GroupClosed)]
    manifests = [
        msgspec.msgpack.decode(o.payloads[0], type=Manifest) for o in outputs if isinstance(o.message, StepAssembled)
    ]
    return [(one.usable, one.reason) for one in closed], manifests


def test_over_sampled_groups_are_parked_for_the_next_step(fold):
    _, (manifest,) = outcome(fold(), *(group(n, [1, 0]) for n in range(3)))
    assert manifest.groups == [group_id(0), group_id(1)]
    assert manifest.stats["waiting_groups"] == 0  # the third closes after the step
    _, manifests = outcome(fold(), *(group(n, [1, 0]) for n in range(4)))
    assert [m.groups[0] for m in manifests] == [group_id(0), group_id(2)]


def test_a_dynamic_batch_takes_what_a_round_gave(fold):
    made = fold("[assembly]\ndynamic_batch = true\nfilter_zero_spread = true\n")
    _, (manifest,) = outcome(made, group(0, [1, 1]), group(1, [1, 0]))
    assert manifest.groups == [group_id(1)]
    assert [(one.group, one.reason) for one in manifest.dropped] == [(group_id(0), "zero_spread")]


def test_a_stream_has_its_least_share(fold):
    made = fold("[assembly.min_shares]\ncode = 0.5\n")
    opened, *members = group(0, [1, 0], stream="code")
    _, manifests = outcome(made, [opened], group(1, [1, 0]), group(2, [1, 0]), members)
    assert manifests[0].groups == [group_id(0), group_id(1)]


def test_a_users_filter_is_found_by_its_import_path(fold):
    made = fold('[assembly]\nuser_filters = ["keeping_filters:no_short_answers"]\n')
    closed, _ = outcome(made, group(0, [1, 0], num_loss_tokens=3), group(1, [1, 0]))
    assert closed == [(False, "filter:short"), (True, "")]


def test_accuracy_bounds_and_incomplete_groups_are_dropped(fold):
    made = fold("[assembly]\nmin_accuracy = 0.4\ndrop_incomplete_groups = true\n")
    closed, _ = outcome(made, group(0, [0, 0]), group(1, [1, None]), group(2, [1, 0]))
    assert closed == [(False, "accuracy"), (False, "incomplete"), (True, "")]


def test_the_minimum_of_usable_slots_is_set_and_checked(fold):
    made = fold('[assembly]\nmin_usable_group_size = 1\n[assembly.estimator]\nname = "reinforce"\n')
    closed, _ = outcome(made, group(0, [1, None]))
    assert closed == [(True, "")]
    with pytest.raises(ConfigError, match=r"min_usable_group_size = 3 is more than sampling\.slots_per_group = 2"):
        fold("[assembly]\nmin_usable_group_size = 3\n")


def test_the_stall_rule_is_set(fold):
    made = fold("[assembly]\nfilter_zero_spread = true\n[assembly.stall]\nrounds = 1\nseconds = 3.0\n")
    state = made.initial()
    messages = [m for n in range(2) for m in group(n, [1, 1])]
    for message in [*messages, *(Tick(ordinal=n, period_s=1.0, unix_time_s=0.0) for n in range(1, 5))]:
        made.step(state, message)
    with pytest.raises(StalledError, match="no trainable group for 3 s and 1 rounds"):
        made.refuse_stall(state)


def test_a_run_that_a_stall_ended_goes_on_with_another_stall_rule_and_nothing_else(tmp_path):
    before = fold_digest(config(tmp_path))
    assert fold_digest(config(tmp_path, "[assembly.stall]\nseconds = 9.0\n")) == before
    assert fold_digest(config(tmp_path, "[assembly]\nfilter_zero_spread = true\n")) != before


def test_numbers_of_the_batch_are_set(fold):
    made = fold(
        '[assembly]\naggregation = "constant"\naggregation_divisor = 100.0\nmini_batch_groups = 1\nreward_scale = 2.0\n'
        '[assembly.estimator]\nname = "reinforce"\n[assembly.reward_normalization]\nmean = "group"\n'
    )
    _, (manifest,) = outcome(made, group(0, [1, 0]), group(1, [1, 0]))
    assert manifest.advantage.as_numpy().tolist() == [1.0, -1.0, 1.0, -1.0]
    assert manifest.loss_weight.as_numpy().tolist() == [0.005] * 4
    assert manifest.mini_batch.as_numpy().tolist() == [0, 0, 1, 1]


def test_rows_of_another_run_have_a_bound_of_their_own(tmp_path):
    assert assembly_settings(config(tmp_path)).max_staleness == 4
    assert assembly_settings(config(tmp_path, "", "run.from_run=a")).max_staleness is None
    bounded = config(tmp_path, "", "run.from_run=a", "run.from_run_max_staleness=2")
    assert assembly_settings(bounded).max_staleness == 2


def test_a_run_from_another_trains(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.rollout_only trains nothing"):
        config(tmp_path, "", "run.from_run=a", "run.rollout_only=true")


def test_versions_of_another_run_can_t_be_interpolated(tmp_path):
    with pytest.raises(ConfigError, match=r"loss\.proximal = loglinear"):
        config(tmp_path, '[loss]\nproximal = "loglinear"\n', "run.from_run=a")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ('balance = "greedy"', r"training\.balance: expected one of kk, lpt"),
        ('packing = "bfd"', r"training\.packing: expected one of ffd, kk"),
        ('overlong_rows = "cut"', r"training\.overlong_rows: expected one of alone, refuse"),
        ("tokens_multiple = 0", r"training\.tokens_multiple: expected at least 1"),
        ("microbatch_multiple = 0", r"training\.microbatch_multiple: expected at least 1"),
        ("max_tokens_per_microbatch = 0", r"training\.max_tokens_per_microbatch: expected at least 1"),
    ],
)
def test_partition_settings_that_can_t_work_are_refused(tmp_path, setting, text):
    with pytest.raises(ConfigError, match=text):
        config(tmp_path, f"[training]\n{setting}\n")


TRAINING = """
[training]
max_tokens_per_microbatch = 24
balance = "lpt"
packing = "kk"
tokens_multiple = 8
microbatch_multiple = 2
"""


def test_partition_settings_reach_the_trainer_and_over_long_rows_are_named_once(fold, tmp_path, capsys):
    _, (manifest,) = outcome(fold(), group(0, [1, 0], num_tokens=17), group(1, [1, 0], num_tokens=33))
    settings = partition_settings(config(tmp_path, TRAINING))
    assert (settings.balance, settings.packing, settings.tokens_multiple) == ("lpt", "kk", 8)
    planner = Planner(settings, warn=True)
    plan = planner(manifest, 2)
    assert planner(manifest, 2) is plan
    assert [len(rank[0]) % 2 for rank in plan] == [0, 0]
    printed = capsys.readouterr().out
    assert printed.count("longer than training.max_tokens_per_microbatch") == 1
    assert "'g0000001-0-0': 33" in printed
    assert "g0000000" not in printed  # 17 tokens are padded to the budget


def test_over_long_rows_are_refused_where_asked(fold, tmp_path):
    _, (manifest,) = outcome(fold(), group(0, [1, 0]), group(1, [1, 0], num_tokens=33))
    settings = partition_settings(config(tmp_path, TRAINING + 'overlong_rows = "refuse"\n'))
    with pytest.raises(ValueError, match=r"2 rows .*longer than max_tokens_per_microbatch = 24"):
        Planner(settings, warn=True)(manifest, 2)
