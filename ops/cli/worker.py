"""`headrace worker STAGE …`."""

from __future__ import annotations

from ops.engines.plan import EngineChoice
from ops.workers.main import worker_main


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
        sampling, fan_out, arena_launch, rewards, assembly, weights, gateway, engine, trainer, ranks.
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
    return worker_main(
        stages, run_dir, log_level=log_level, engine=EngineChoice(name=name, kind=kind, url=url, slot=slot), port=port
    )
