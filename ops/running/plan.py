"""The processes of a node's share of a run: pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ops.config import RunConfig
from ops.nodes.ranks import GROUP_ENV, RankGroup
from ops.nodes.share import Worker
from ops.run_folder import RunFolder
from ops.secrets import CONTROL_KEY_ENV, GENERATION_KEY_ENV, RunSecrets
from ops.supervise.process import ProcessSpec, RestartPolicy, python


def arena_process(
    folder: RunFolder, config_file: str, environment: Mapping[str, str], restart: RestartPolicy
) -> ProcessSpec:
    """The local Arena."""
    return ProcessSpec(
        name="arena",
        argv=python("-m", "ops.arena", config_file),
        env=environment,
        log_file=str(folder.logs / "arena.log"),
        waits_for_ready=True,
        ready_deadline_s=60.0,
        serves_others=True,
        stop_deadline_s=2.0,
        restart=restart,
    )


def worker_process(
    worker: Worker, folder: RunFolder, config: RunConfig, environment: Mapping[str, str], *, port: int = 0
) -> ProcessSpec:
    """A process of one or several stages.

    Args:
        port: of a gateway beside the first one of its node.
    """
    where = ("--port", str(port)) if port else ()
    if worker.stages == ("gateway",):
        environment = {**environment, "OMP_NUM_THREADS": str(config.engine.threads)}
    return ProcessSpec(
        name=worker.name,
        argv=python("-m", "ops", "worker", *worker.stages, *where, "--run-dir", str(folder.path)),
        env=environment,
        log_file=str(folder.logs / f"{worker.name}.log"),
        stop_deadline_s=7.0,
        progress_file=str(folder.progress / worker.name),
        restart=RestartPolicy(max_restarts=config.run.max_restarts),
    )


def trainer_process(
    config: RunConfig, folder: RunFolder, environment: Mapping[str, str], ranks: RankGroup | None = None
) -> ProcessSpec:
    """The trainer: its own process, torchrun's with several ranks, or the launcher of this node's ranks where others have some."""
    worker = ["-m", "ops", "worker", "trainer", "--run-dir", str(folder.path)]
    argv = python(*worker)
    if ranks is not None:
        environment = {**environment, GROUP_ENV: msgspec.json.encode(ranks).decode()}
        argv = python("-m", "ops", "worker", "ranks", "--run-dir", str(folder.path))
    elif config.training.ranks > 1:
        argv = python(
            *("-m", "ops.workers.torchrun", "--standalone", "--nproc-per-node", str(config.training.ranks)),
            *("--max-restarts", "0"),
            *worker,
        )
    return ProcessSpec(
        name="trainer",
        argv=argv,
        env={**environment, "OMP_NUM_THREADS": str(config.training.threads)},
        log_file=str(folder.logs / "trainer.log"),
        progress_file=str(folder.progress / "trainer"),
        finishes=True,
        restart=RestartPolicy(max_restarts=max(8, config.run.max_restarts), window_s=120.0),
    )


def run_environment(config: RunConfig, secrets: RunSecrets, *, local_arena: bool) -> dict[str, str]:
    """What the processes find in their environment."""
    environment = {
        GENERATION_KEY_ENV: secrets.generation_key,
        CONTROL_KEY_ENV: secrets.control_key,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if local_arena:
        environment[config.arena.token_env] = secrets.arena_token
        environment[config.arena.llm_api_key_env] = secrets.arena_llm_api_key
    return environment
