"""A run without training: how many groups it issues, which processes it has, and that closed groups hold no credit."""

import pytest

from ops.config import RunConfig, decode_config, sampling_settings
from ops.nodes.share import whole, workers
from ops.running.rollouts import num_groups
from stages.sampling.credit import available


def _config(run: dict | None = None, sampling: dict | None = None) -> RunConfig:
    streams = [{"name": "a", "stream_id": "a"}]
    return decode_config({"run": {"rollout_only": True, **(run or {})}, "sampling": sampling or {}, "streams": streams})


@pytest.mark.parametrize(("run", "sampling", "groups"), [
    ({}, {}, 70),
    ({"epochs": 3}, {}, 210),
    ({"steps": 4}, {"groups_per_step": 8}, 32),
    ({"steps": 40, "epochs": 1}, {"groups_per_step": 8}, 70),
    ({}, {"epoch_size_groups": 40, "groups_per_step": 8}, 40),
])  # fmt: skip
def test_it_issues_its_epochs_or_its_steps_worth_of_groups_whichever_is_less(run, sampling, groups) -> None:
    assert num_groups(_config(run, sampling), 70) == groups


def test_it_has_no_trainer() -> None:
    share = whole(_config())
    assert not share.trainer
    assert [worker.name for worker in workers(share, _config())] == ["gateway", "stages"]


def test_its_sampling_is_bound_by_concurrency_alone() -> None:
    assert sampling_settings(_config()).trains is False
    credit = available(running=10, waiting=0, groups_per_step=1, max_staleness=None, max_concurrent=64)
    assert (credit.groups, credit.bound_by) == (54, "max_concurrent_groups")
