"""One run on this machine: servers, workers, watch, end, account.

lock folder ─▶ check all ─▶ policy ─▶ NATS ─▶ run.started ─▶ Arena ─▶ workers ─▶ … ─▶ trainer done ─▶ drain ─▶ account
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.connect import connect
from broker.jetstream import JetStreamBroker
from broker.settings import ConnectSettings
from ops import VERSION
from ops.accounts import RunAccount, account
from ops.arena_access import LOCAL, arena_access, uses_arena
from ops.config import RunConfig, fold_digest, run_streams, sampling_settings, staleness_bound
from ops.local_arena import local_arena_config
from ops.metrics.serving import serve_metrics
from ops.policy_folder import prepared_digest
from ops.redaction import redacted
from ops.run_folder import Endpoints, RunFolder
from ops.running.bridge import bridged
from ops.running.disk import check_disk, watch_disk
from ops.running.engines import kept_engines
from ops.running.plan import arena_process, run_environment, run_processes
from ops.running.post_exit import run_post_exit
from ops.running.progress import Progress
from ops.running.recording import RecordingOutcome, RunRecording, check_recording, recorded
from ops.running.rollouts import registrations_left, until_finished, until_rolled_out
from ops.running.server import run_broker
from ops.running.source import check_source, find_source
from ops.secrets import RunSecrets, run_secrets
from ops.stopping import until_stopped
from ops.supervise.orphans import end_orphans
from ops.supervise.process import ProcessGivenUpError, ProcessSpec, RestartPolicy, python
from ops.supervise.supervisor import Supervisor
from ops.topology import declared_topology, limits_of
from ops.watchdog import RunWatch
from pipeline.log import RunLog
from pipeline.presence import forget_missing
from pipeline.watchdog import WATCHDOG
from schemas.errors import ConfigError
from schemas.messages.sampling import RunStarted
from schemas.topics import RUN_STARTED
from stages.clients.arena.client import ArenaAccess

log = structlog.get_logger("headrace.run")


_ONCE: Final = RestartPolicy(max_restarts=0)


class RunFailedError(Exception):
    """The run ended before its time; the text says why."""


class RunInterruptedError(RunFailedError):
    """Somebody stopped the run before it began."""

    exit_code = 130


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    account: RunAccount
    interrupted: bool
    """Somebody asked it to stop; the same command resumes."""
    recording: RecordingOutcome | None = None


async def run(
    config: RunConfig,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    recording: RunRecording | None = None,
) -> RunOutcome:
    """Run until the last step, or until interrupted.

    Raises:
        ConfigError, RunFolderError, ServerStartError, RecordingError: before anything started.
        RunFailedError: a process was given up.
    """
    started = time.monotonic()
    counted: RunAccount | None = None
    failure: Exception | None = None
    kept: RecordingOutcome | None = None
    source = find_source(config) if config.run.from_run else None
    if source is not None:
        await check_source(source, config)
    folder = RunFolder(config.run.dir)
    folder.create()
    check_disk(folder, config.run.min_free_disk_bytes)
    with folder.lock():
        check_recording(recording, config.run.id)
        folder.write_config(config)
        secrets = run_secrets(folder.path)
        stopped = anyio.Event()
        async with anyio.create_task_group() as tasks, _until_stopped(stopped, supervisor := Supervisor(tasks)):
            tasks.start_soon(end_orphans)
            try:
                await _prepare(folder, supervisor, stopped)
                async with run_broker(config, folder, tasks) as (url, settings):
                    async with (
                        connect(url, config.run.id, settings, create=True, limits=limits_of(config)) as broker,
                        recorded(recording, broker, tasks) as kept,
                        _ended(supervisor),
                    ):
                        start = await _announce_start(config, broker, prepared_digest(folder))
                        endpoints = _endpoints(config, folder, url, settings)
                        progress = Progress(config)
                        tasks.start_soon(progress.follow, broker, on_progress)
                        async with bridged(source, broker, progress) as bridge:
                            tasks.start_soon(_look_after, config, folder, broker, supervisor)
                            environment = run_environment(config, secrets, local_arena=has_local_arena(config))
                            ends = [bridge.ended] if bridge else []
                            async with kept_engines(config, folder, environment, supervisor, broker) as serving:
                                await _first_of(serving, supervisor.failed, stopped)
                                if not stopped.is_set() and supervisor.failure is None:
                                    await _start_all(config, folder, environment, endpoints, supervisor)
                                await _until_over(config, broker, start, supervisor, stopped, *ends)
                        left = await _registrations_left(config, broker, folder, secrets)
                        await supervisor.stop()
                        failure = bridge.failure if bridge else None
                        seconds = time.monotonic() - started
                        counted = await account(broker, staleness_bound=staleness_bound(config), seconds=seconds)
                        counted = msgspec.structs.replace(counted, registrations_left=left)
                    failure = supervisor.failure or failure
            except ProcessGivenUpError as error:
                failure = error
            finally:
                await _leave(config, folder, supervisor)
                tasks.cancel_scope.cancel()
    if failure is not None or counted is None:
        raise RunFailedError(str(failure or "the run ended before it began"))
    return RunOutcome(account=counted, interrupted=stopped.is_set(), recording=kept)


async def _leave(config: RunConfig, folder: RunFolder, supervisor: Supervisor) -> None:
    """However the run ended: no process of it is left, then the command that comes after it."""
    await supervisor.stop()
    await run_post_exit(config.run.post_exit, folder.logs)


@asynccontextmanager
async def _ended(supervisor: Supervisor) -> AsyncGenerator[None]:
    """On leaving, however, no worker writes any more."""
    try:
        yield
    finally:
        await supervisor.stop()


def _until_stopped(stopped: anyio.Event, supervisor: Supervisor) -> AbstractAsyncContextManager[None]:
    """Ctrl-C or SIGTERM sets the event; a second one kills all processes and ends this one."""
    return until_stopped(stopped.set, on_force=supervisor.kill)


async def _prepare(folder: RunFolder, supervisor: Supervisor, stopped: anyio.Event) -> None:
    """Make or check the policy, and what only torch can check, in a process of its own: this one stays light."""
    process = await supervisor.start(
        ProcessSpec(
            name="prepare",
            argv=python("-m", "ops", "worker", "prepare", "--run-dir", str(folder.path)),
            log_file=str(folder.logs / "prepare.log"),
            finishes=True,
            restart=_ONCE,
            # One thread: the same inputs give the same bits on any machine, and no threads wait for each other on a busy one.
            env={"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
    )
    await _first_of(process.finished, supervisor.failed, stopped)
    if supervisor.failure is not None:
        raise supervisor.failure
    if stopped.is_set() and not process.finished.is_set():
        raise RunInterruptedError("interrupted while the policy was made ready; the same command starts again")


async def _look_after(config: RunConfig, folder: RunFolder, broker: Broker, supervisor: Supervisor) -> None:
    """Disk and workers, for ever."""
    watch = RunWatch(broker, config.watchdog)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_disk, folder, config.run.min_free_disk_bytes, supervisor.fail)
        tasks.start_soon(watch.run)
        if config.metrics.port:
            tasks.start_soon(serve_metrics, config.metrics, WATCHDOG, watch.reports)


async def _declare_durables(config: RunConfig, broker: Broker) -> None:
    """Make the durables before any worker starts.

    Raises:
        TopologyError: one stands there with other settings.
    """
    if isinstance(broker, JetStreamBroker):
        await broker.admin.apply(declared_topology(config))


def _endpoints(config: RunConfig, folder: RunFolder, url: str, settings: ConnectSettings) -> Endpoints:
    """Where the servers are; ports that were chosen once are kept."""
    port = config.gateway.port
    if not port and folder.endpoints_file.is_file():
        port = folder.read_endpoints().gateway_port
    endpoints = Endpoints(
        run=config.run.id,
        broker_url=url,
        broker_login=settings,
        gateway_port=port or _free_port(config.gateway.host),
    )
    folder.write_endpoints(endpoints)
    return endpoints


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


async def _announce_start(config: RunConfig, broker: Broker, policy_digest: str) -> int:
    """Put this start on the log and give its ordinal; what folds depend on must be as it was.

    Raises:
        ConfigError: the run was begun with other settings.
    """
    await _declare_durables(config, broker)
    await forget_missing(broker, now=time.time())
    run_log = RunLog(broker)
    ordinal, fingerprint = 0, fold_digest(config)
    while (former := await run_log.find(RUN_STARTED, ordinal)) is not None:
        if former.config_digest != fingerprint:
            raise ConfigError(
                f"run {config.run.id!r} in {config.run.dir} was begun with other [sampling], [assembly] or stream settings: "
                "they decide what its log means; choose another run.dir, or take the former settings "
                f"(config of start {former.ordinal}: see `headrace tap run.started`)"
            )
        ordinal += 1
    await run_log.publish(
        RunStarted(
            ordinal=ordinal,
            config_json=msgspec.json.encode(redacted(config)),
            config_digest=fingerprint,
            headrace_version=VERSION,
            steps=config.run.steps,
            epochs=1 if _ends_by_itself(config) else config.run.epochs,
            policy_digest=policy_digest,
        )
    )
    return ordinal


def _ends_by_itself(config: RunConfig) -> bool:
    """Whether the run rolls out each row once: nothing is trained, and neither steps, epochs nor an open stream say otherwise."""
    if not config.run.rollout_only or config.run.steps is not None or config.run.epochs:
        return False
    return not any(stream.open for stream in run_streams(config).values())


def has_local_arena(config: RunConfig) -> bool:
    """Whether the run starts an Arena of its own."""
    return config.arena.url == LOCAL and not config.run.from_run and uses_arena(config)


async def _start_all(
    config: RunConfig, folder: RunFolder, environment: dict[str, str], endpoints: Endpoints, supervisor: Supervisor
) -> None:
    if has_local_arena(config):
        await _start_arena(config, folder, endpoints, supervisor, environment)
    for spec in run_processes(config, folder, environment):
        await supervisor.start(spec)


async def _start_arena(
    config: RunConfig, folder: RunFolder, endpoints: Endpoints, supervisor: Supervisor, environment: dict[str, str]
) -> None:
    """Start the local Arena on a port that it keeps over restarts."""
    config_file = folder.path / "arena.json"
    served = local_arena_config(config)
    port = served.port or _free_port(served.host)
    config_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(served, port=port)))

    def ready(line: str) -> None:
        url = msgspec.json.decode(line, type=dict[str, object])["url"]
        folder.write_endpoints(msgspec.structs.replace(endpoints, arena_url=str(url)))

    restart = RestartPolicy(max_restarts=config.run.max_restarts)
    await supervisor.start(arena_process(folder, str(config_file), environment, restart), on_ready=ready)


async def _registrations_left(config: RunConfig, broker: Broker, folder: RunFolder, secrets: RunSecrets) -> int | None:
    """What a run that only rolls out left at its Arena; None where that is not looked at."""
    if not (config.run.rollout_only and uses_arena(config)):
        return None
    return await registrations_left(broker, _arena_access(config, folder, secrets))


def _arena_access(config: RunConfig, folder: RunFolder, secrets: RunSecrets) -> ArenaAccess:
    """How this process asks the run's Arena."""
    local = config.arena.url == LOCAL
    environ = {**os.environ, **run_environment(config, secrets, local_arena=local)}
    return arena_access(config, folder.read_endpoints(), environ)


async def _until_over(
    config: RunConfig, broker: Broker, start: int, supervisor: Supervisor, stopped: anyio.Event, *ends: anyio.Event
) -> None:
    """Until the run's work is done, or somebody or something ends it; then only what serves others still runs."""
    async with anyio.create_task_group() as tasks:
        if config.run.rollout_only:
            ends = (*ends, rolled_out := anyio.Event())
            tasks.start_soon(until_rolled_out, broker, config, rolled_out)
        await _until_done(supervisor, stopped, *ends)
        tasks.cancel_scope.cancel()
    await _until_evaluated(config, broker, start, supervisor, stopped)
    await supervisor.stop(servers=not config.run.rollout_only)


async def _until_done(supervisor: Supervisor, *others: anyio.Event) -> None:
    """Until the trainer has finished, a process is given up, or one of the other events comes (somebody stops the run)."""
    trainer = supervisor.processes.get("trainer")
    await _first_of(*([trainer.finished] if trainer else []), supervisor.failed, *others)


async def _until_evaluated(
    config: RunConfig, broker: Broker, start: int, supervisor: Supervisor, stopped: anyio.Event
) -> None:
    """The trainer is done; what evaluates its last versions goes on until sampling says the run's end."""
    if config.run.from_run or config.run.rollout_only or not sampling_settings(config).evaluations:
        return
    finished = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_finished, broker, start, finished)
        await _first_of(finished, supervisor.failed, stopped)
        tasks.cancel_scope.cancel()


async def _first_of(*events: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:

        async def end_when(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(end_when, event)
