"""What must be made or checked before a run starts and needs torch or the user's code: the policy, the loss, the agents."""

from __future__ import annotations

from ops.agents.check import check_agents_now
from ops.config import run_streams
from ops.engines.plan import num_started, server_environment
from ops.policy_folder import prepare_policy
from ops.run_folder import RunFolder


def prepare(folder: RunFolder) -> None:
    """Make the run's policy folder, check the settings that only torch's rooms know, and load the agents once.

    Raises:
        ConfigError: a setting can't work.
    """
    config = folder.read_config()
    if num_started(config.engine) and not config.run.from_run:
        server_environment(config.engine)
    if not config.run.from_run:
        check_agents_now(run_streams(config), config.arena)
    if config.training.backend != "standin":
        from ops.workers.torch_trainer import check_learning  # noqa: PLC0415 - torch is no part of the base install

        check_learning(config)
    prepare_policy(config, folder)
