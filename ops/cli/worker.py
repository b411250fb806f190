"""`headrace worker STAGE …`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ops.cli.failing import plain_errors
from ops.engines.plan import EngineChoice, chosen_engine
from ops.run_folder import RunFolder
from ops.wiring import WORKER_STAGES
from ops.workers.main import worker_main
from schemas.errors import ConfigError

_PREPARE = ("prepare",)
"""What a run does before it has a broker; not for people."""


def worker(
    *stages: str,
    run_dir: str,
    log_level: str = "INFO",
    kind: str = "",
    url: str = "",
    name: str = "",
    slot: int = 0,
    port: int = 0,
) -> int:
    """Run one or several stages of a run in this process until SIGTERM.

    Examples:
        headrace worker rewards --run-dir runs/quickstart
        headrace worker sampling fan_out assembly --run-dir runs/quickstart
        headrace worker engine --kind vllm --name engine-1 --slot 1 --run-dir runs/quickstart
        headrace worker engine --kind sglang --url http://127.0.0.1:30000 --run-dir runs/quickstart

    Parameters
    ----------
    stages
        sampling, fan_out, arena_launch, rewards, assembly, weights, retention, gateway, engine, trainer, ranks.
    run_dir
        The run's folder.
    log_level
        DEBUG, INFO, WARNING or ERROR.
    kind
        engine: vllm or sglang; the run's when left out.
    url
        engine: look after a server that runs already, instead of starting one.
    name
        engine: its name in the run.
    slot
        engine: its place among the started ones; decides its port and GPUs.
    port
        gateway: where it listens, instead of the run's gateway port.
    """
    choice = EngineChoice(name=name, kind=kind, url=url, slot=slot)
    with plain_errors():
        _check(stages, RunFolder(run_dir), choice)
    return worker_main(stages, run_dir, log_level=log_level, engine=choice, port=port)


def _check(stages: Sequence[str], folder: RunFolder, choice: EngineChoice) -> None:
    """What can be told before anything is connected to.

    Raises:
        ConfigError: a stage or an engine that there is not.
        RunFolderError: no run was started there.
    """
    if stages == _PREPARE:
        return
    allowed = f"expected some of {', '.join(WORKER_STAGES)}"
    if not stages:
        raise ConfigError(f"worker: {allowed}; found none")
    for stage in stages:
        if stage not in WORKER_STAGES:
            close = difflib.get_close_matches(stage, WORKER_STAGES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"worker: {allowed}; found {stage!r}{hint}")
    config = folder.read_config()
    folder.read_endpoints()
    if "engine" in stages:
        chosen_engine(choice, config.engine)
