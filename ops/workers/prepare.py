"""What must be made or checked before a run starts and needs torch: the policy, the loss."""

from __future__ import annotations

from ops.policy_folder import prepare_policy
from ops.run_folder import RunFolder


def prepare(folder: RunFolder) -> None:
    """Make the run's policy folder, and check the settings that only torch's rooms know.

    Raises:
        ConfigError: a setting can't work.
    """
    config = folder.read_config()
    if config.training.backend != "standin":
        from ops.workers.torch_trainer import check_learning  # noqa: PLC0415 - torch is no part of the base install

        check_learning(config)
    prepare_policy(config, folder)
