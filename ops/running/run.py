"""A run, seen from the node that controls it: servers, workers, watch, end, account. Alone on its machine, or with other nodes.

lock folder ─▶ check all ─▶ policy ─▶ NATS ─▶ run.started ─▶ Arena ─▶ workers ─▶ … ─▶ trainer done ─▶ drain ─▶ account
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import anyio
import msgspec

from broker.api import Broker
from broker.jetstream import JetStreamBroker
from ops import VERSION
from ops.accounts import account
from ops.arena_access import LOCAL, arena_access, uses_arena
from ops.config import RunConfig, fold_digest, run_streams, sampling_settings, staleness_bound
from ops.nodes.asking import SECRETS_KEY, TRAINED_KEY, say_ended, say_over, state_bytes
from ops.nodes.roll import say_nodes
from ops.nodes.service import NodeProcesses, known_node
from ops.policy_folder import prepared_digest
from ops.redaction import redacted
from ops.run_account import RunAccount
from ops.run_folder import RunFolder
from ops.running.bridge import bridged
from ops.running.disk import check_disk
from ops.running.engines import kept_engines
from ops.running.joining import made_streams, until_all_left
from ops.running.plan import run_environment
from ops.running.post_exit import run_post_exit
from ops.running.progress import Progress
from ops.running.recording import RecordingOutcome, RunRecording, check_recording, recorded
from ops.running.rollouts import registrations_left, until_finished, until_rolled_out
from ops.running.server import run_broker
from ops.running.site import Site, only_node
from ops.running.source import check_source, find_source
from ops.running.starting import (
    RunFailedError,
    first_of,
    has_local_arena,
    keep_endpoints,
    looked_after,
    prepare,
    reach_arena,
)
from ops.secrets import RunSecrets, run_secrets, secrets_digest
from ops.stopping import until_stopped
from ops.store_room import issue_below_at_start
from ops.supervise.orphans import end_orphans
from ops.supervise.process import ProcessGivenUpError
from ops.supervise.supervisor import Supervisor
from ops.topology import declared_topology
from pipeline.log import RunLog
from pipeline.presence import forget_missing
from schemas.errors import ConfigError
from schemas.messages.sampling import RunStarted
from schemas.topics import RUN_STARTED
from stages.clients.arena.client import ArenaAccess

_LOOK_S: Final = 0.3


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
    """Run on this machine alone until the last step, or until interrupted; raises as `control_run` does."""
    return await control_run(only_node(config), on_progress=on_progress, recording=recording)


async def control_run(
    site: Site,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    recording: RunRecording | None = None,
) -> RunOutcome:
    """Run this node's share and the run itself until the last step, or until interrupted.

    Raises:
        ConfigError, RunFolderError, ServerStartError, RecordingError: before anything started.
        RunFailedError: a process was given up.
    """
    config = site.config
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
        secrets = run_secrets(folder.path, site.secrets_file)
        stopped = anyio.Event()
        async with anyio.create_task_group() as tasks, _until_stopped(stopped, supervisor := Supervisor(tasks)):
            tasks.start_soon(end_orphans)
            try:
                await prepare(folder, supervisor, stopped)
                async with run_broker(site, folder, secrets, tasks) as (url, settings):
                    async with (
                        made_streams(site, url, settings, stopped) as broker,
                        recorded(recording, broker, tasks) as kept,
                        _ended(supervisor),
                        looked_after(tasks, site, folder, broker, supervisor),
                    ):
                        start = await _announce_start(config, broker, prepared_digest(folder))
                        await _tell_nodes(site, broker, secrets)
                        keep_endpoints(site, folder, url, settings)
                        progress = Progress(config)
                        tasks.start_soon(progress.follow, broker, on_progress)
                        async with bridged(source, broker, progress) as bridge:
                            ends = [bridge.ended] if bridge else []
                            await _work(site, folder, secrets, supervisor, broker, start, stopped, *ends)
                        await _dismiss(site, supervisor, broker)
                        left = await _registrations_left(config, broker, folder, secrets)
                        await supervisor.stop()
                        failure = bridge.failure if bridge else None
                        seconds = time.monotonic() - started
                        counted = await account(broker, staleness_bound=staleness_bound(config), seconds=seconds)
                        counted = msgspec.structs.replace(counted, registrations_left=left)
                        await _say_ended(site, supervisor, broker)
                    failure = supervisor.failure or failure
            except ProcessGivenUpError as error:
                failure = error
            finally:
                await _leave(config, folder, supervisor)
                tasks.cancel_scope.cancel()
    if failure is not None or counted is None:
        raise RunFailedError(str(failure or "the run ended before it began"))
    return RunOutcome(account=counted, interrupted=stopped.is_set(), recording=kept)


async def _work(
    site: Site,
    folder: RunFolder,
    secrets: RunSecrets,
    supervisor: Supervisor,
    broker: Broker,
    start: int,
    stopped: anyio.Event,
    *ends: anyio.Event,
) -> None:
    """This node's processes, from the first engine to the end of the run's work."""
    config = site.config
    environment = run_environment(config, secrets, local_arena=has_local_arena(config))
    processes = NodeProcesses(
        site.share,
        config,
        folder,
        environment,
        supervisor,
        broker,
        address=site.address,
        has_broker=site.server is not None,
        on_stop=stopped.set,
    )
    async with (
        kept_engines(config, site.share, folder, environment, supervisor, broker) as serving,
        known_node(processes, broker),
    ):
        await first_of(serving, supervisor.failed, stopped)
        if not stopped.is_set() and supervisor.failure is None:
            await reach_arena(site, folder, environment, supervisor, broker)
            await processes.start()
            folder.say_ready()
        await _until_over(site, broker, start, supervisor, stopped, *ends)


async def _tell_nodes(site: Site, broker: Broker, secrets: RunSecrets) -> None:
    """What nodes that join compare with their own, and which of them are expected."""
    await broker.save_state(SECRETS_KEY, secrets_digest(secrets))
    if site.in_topology:
        await say_nodes(broker, site.nodes)


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


async def _declare_durables(config: RunConfig, broker: Broker) -> None:
    """Make the durables before any worker starts.

    Raises:
        TopologyError: one stands there with other settings.
    """
    if isinstance(broker, JetStreamBroker):
        await broker.admin.apply(declared_topology(config))


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
            issue_below=issue_below_at_start(config),
        )
    )
    return ordinal


def _ends_by_itself(config: RunConfig) -> bool:
    """Whether the run rolls out each row once: nothing is trained, and neither steps, epochs nor an open stream say otherwise."""
    if not config.run.rollout_only or config.run.steps is not None or config.run.epochs:
        return False
    return not any(stream.open for stream in run_streams(config).values())


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
    site: Site, broker: Broker, start: int, supervisor: Supervisor, stopped: anyio.Event, *ends: anyio.Event
) -> None:
    """Until the run's work is done, or somebody or something ends it; then only what serves others still runs."""
    config = site.config
    async with anyio.create_task_group() as tasks:
        if config.run.rollout_only:
            ends = (*ends, rolled_out := anyio.Event())
            tasks.start_soon(until_rolled_out, broker, config, rolled_out)
        elif not site.share.trainer:
            ends = (*ends, trained := anyio.Event())
            tasks.start_soon(_until_trained, broker, start, trained)
        await _until_done(supervisor, stopped, *ends)
        tasks.cancel_scope.cancel()
    await _until_evaluated(config, broker, start, supervisor, stopped)
    await supervisor.stop(servers=not (config.run.rollout_only or site.in_topology))


async def _until_done(supervisor: Supervisor, *others: anyio.Event) -> None:
    """Until the trainer has finished, a process is given up, or one of the other events comes (somebody stops the run)."""
    trainer = supervisor.processes.get("trainer")
    await first_of(*([trainer.finished] if trainer else []), supervisor.failed, *others)


async def _until_trained(broker: Broker, start: int, done: anyio.Event) -> None:
    """Set the event once the trainer of another node has done its work."""
    while int((await state_bytes(broker, TRAINED_KEY)) or b"-1") < start:
        await anyio.sleep(_LOOK_S)
    done.set()


async def _dismiss(site: Site, supervisor: Supervisor, broker: Broker) -> None:
    """Let the other nodes leave while the servers that their workers use are still there. When something failed here they stay:
    this node may be started again.
    """
    if site.in_topology and supervisor.failure is None:
        await say_over(broker)
        await until_all_left(broker)


async def _say_ended(site: Site, supervisor: Supervisor, broker: Broker) -> None:
    """Let the NATS servers of other nodes leave."""
    if site.in_topology and supervisor.failure is None:
        await say_ended(broker)


async def _until_evaluated(
    config: RunConfig, broker: Broker, start: int, supervisor: Supervisor, stopped: anyio.Event
) -> None:
    """The trainer is done; what evaluates its last versions goes on until sampling says the run's end."""
    if config.run.from_run or config.run.rollout_only or not sampling_settings(config).evaluations:
        return
    finished = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_finished, broker, start, finished)
        await first_of(finished, supervisor.failed, stopped)
        tasks.cancel_scope.cancel()
