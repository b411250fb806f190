"""`headrace worker STAGE …`."""

from __future__ import annotations

from ops.workers.main import worker_main


def worker(*stages: str, run_dir: str, log_level: str = "INFO") -> int:
    """Run one or several stages of a run in this process until SIGTERM.

    Examples:
        headrace worker rewards --run-dir runs/quickstart
        headrace worker sampling fan_out assembly --run-dir runs/quickstart

    Parameters
    ----------
    stages
        sampling, fan_out, arena_launch, rewards, assembly, weights, gateway, trainer.
    run_dir
        The run's folder.
    log_level
        DEBUG, INFO, WARNING or ERROR.
    """
    return worker_main(stages, run_dir, log_level=log_level)
