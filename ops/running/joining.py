"""A node that joins a run which another one controls: it comes, works, and leaves when told, when the run is over or when it fails.

lock folder ─▶ policy ─▶ its NATS server, if it has one ─▶ wait for run.started ─▶ same policy, same keys? ─▶ workers ─▶ … ─▶ drain
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

import anyio
import structlog

from broker.api import Broker
from broker.connect import connect
from broker.errors import BrokerError, NoSuchStreamError, NotConnectedError, TopologyError
from broker.settings import ConnectSettings
from ops.config import fold_digest
from ops.nodes.asking import ENDED_KEY, OVER_KEY, SECRETS_KEY, TRAINED_KEY, answers, nodes_of, say_gone, state_bytes
from ops.nodes.service import NodeProcesses, known_node
from ops.policy_folder import prepared_digest
from ops.run_folder import RunFolder
from ops.running.disk import check_disk
from ops.running.engines import kept_engines
from ops.running.plan import run_environment
from ops.running.server import run_broker
from ops.running.site import Site
from ops.running.starting import (
    RunFailedError,
    RunInterruptedError,
    first_of,
    has_local_arena,
    keep_endpoints,
    look_after,
    prepare,
    reach_arena,
)
from ops.secrets import RunSecrets, run_secrets, secrets_digest
from ops.stopping import until_stopped
from ops.supervise.process import ProcessGivenUpError
from ops.supervise.supervisor import Supervisor
from ops.topology import limits_of
from pipeline.log import RunLog
from schemas.errors import ConfigError
from schemas.messages.sampling import RunStarted
from schemas.topics import RUN_STARTED

log = structlog.get_logger("headrace.node")

_LOOK_S: Final = 0.3
_SAY_S: Final = 10.0
_LAST_OUT_S: Final = 60.0
"""After the run's end: how long the control node waits for the others, and a NATS server for those that may still need it."""
_FORM_S: Final = 120.0
"""How long the NATS servers of a topology may take until most of them are there."""


async def join_run(site: Site) -> str:
    """Run this node's share until told to leave; why it left.

    Raises:
        ConfigError, RunFolderError, ServerStartError: before anything started.
        RunFailedError: a process was given up.
    """
    folder = RunFolder(site.config.run.dir)
    folder.create()
    check_disk(folder, site.config.run.min_free_disk_bytes)
    with folder.lock():
        folder.write_config(site.config)
        secrets = run_secrets(folder.path, site.secrets_file, may_make=False)
        stopped, reason = anyio.Event(), ""
        async with anyio.create_task_group() as tasks:
            supervisor = Supervisor(tasks)
            async with until_stopped(stopped.set, on_force=supervisor.kill):
                try:
                    await prepare(folder, supervisor, stopped)
                    async with run_broker(site, folder, secrets, tasks) as (url, settings):
                        reason = await _work(site, folder, secrets, supervisor, stopped, (url, settings))
                except ProcessGivenUpError as error:
                    raise RunFailedError(str(error)) from error
                finally:
                    await supervisor.stop()
                    tasks.cancel_scope.cancel()
    return reason


async def _work(
    site: Site,
    folder: RunFolder,
    secrets: RunSecrets,
    supervisor: Supervisor,
    stopped: anyio.Event,
    place: tuple[str, ConnectSettings],
) -> str:
    async with standing_run(site, *place, stopped) as broker:
        before, ended = await state_bytes(broker, OVER_KEY), await state_bytes(broker, ENDED_KEY)
        start = await _started(broker, site, stopped)
        await _check_same(site, broker, start, prepared_digest(folder), secrets)
        keep_endpoints(site, folder, *place)
        environment = run_environment(site.config, secrets, local_arena=has_local_arena(site.config))
        over = anyio.Event()
        processes = NodeProcesses(
            site.share,
            site.config,
            folder,
            environment,
            supervisor,
            broker,
            address=site.address,
            has_broker=site.server is not None,
            on_stop=stopped.set,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_over, broker, before, over)
            tasks.start_soon(look_after, site, folder, broker, supervisor)
            async with (
                kept_engines(site.config, site.share, folder, environment, supervisor, broker),
                known_node(processes, broker),
            ):
                with anyio.CancelScope() as starting, suppress(ProcessGivenUpError):  # told by supervisor.failed below
                    tasks.start_soon(_cancel_when, starting, stopped, over)
                    await reach_arena(site, folder, environment, supervisor, broker)
                    await processes.start()
                    log.info("the node works", node=site.share.node)
                    folder.say_ready()
                    tasks.start_soon(_say_trained, broker, supervisor)
                await first_of(stopped, over, supervisor.failed)
                await supervisor.stop()
            tasks.cancel_scope.cancel()
        if over.is_set() and site.server is not None:
            await _until_ended(broker, ended)
    if supervisor.failure is not None:
        raise RunFailedError(str(supervisor.failure))
    return "the run is over" if over.is_set() else "told to leave"


@asynccontextmanager
async def made_streams(site: Site, url: str, settings: ConnectSettings, stopped: anyio.Event) -> AsyncGenerator[Broker]:
    """A connection that makes the run's streams. Servers of a cluster answer once most of them are there; the first time as many as there
    are copies must be.

    Raises:
        BrokerError: see `connect`.
    """
    async with AsyncExitStack() as stack:

        async def attempt() -> Broker:
            limits = limits_of(site.config)
            return await stack.enter_async_context(
                connect(url, site.config.run.id, settings, create=True, limits=limits)
            )

        if not (site.servers_share_token and site.config.broker.replicas > 1):
            yield await attempt()
            return
        deadline = anyio.current_time() + _FORM_S
        while True:
            try:
                broker = await attempt()
            except TopologyError:
                raise
            except BrokerError as error:
                if stopped.is_set() or anyio.current_time() > deadline:
                    raise
                log.info("waiting for the NATS servers of other nodes", error=str(error))
                await anyio.sleep(_LOOK_S)
            else:
                yield broker
                return


@asynccontextmanager
async def standing_run(site: Site, url: str, settings: ConnectSettings, stopped: anyio.Event) -> AsyncGenerator[Broker]:
    """A connection to a run that another node makes, whenever that is.

    Raises:
        RunInterruptedError: told to leave before.
    """
    async with AsyncExitStack() as stack:
        said = -_SAY_S
        while True:
            try:
                async with AsyncExitStack() as attempt:
                    broker = await attempt.enter_async_context(connect(url, site.config.run.id, settings))
                    await broker.log_status()
                    stack.push_async_exit(attempt.pop_all().__aexit__)
            except (NotConnectedError, NoSuchStreamError) as error:
                if anyio.current_time() >= said + _SAY_S:
                    said = anyio.current_time()
                    log.warning("waiting for the run's control node", run=site.config.run.id, found=str(error))
                with anyio.move_on_after(_LOOK_S):
                    await stopped.wait()
                if stopped.is_set():
                    raise RunInterruptedError("told to leave before the run was there") from error
            else:
                yield broker
                return


async def _started(broker: Broker, site: Site, stopped: anyio.Event) -> RunStarted:
    """The newest start of the run, once its control node is there.

    Raises:
        RunInterruptedError: told to leave before.
    """
    while True:
        for state in (await nodes_of(broker)).values():
            start = await newest_start(broker) if state.control and await answers(broker, state.node) else None
            if start is not None:
                return start
        if stopped.is_set():
            raise RunInterruptedError(f"told to leave before run {site.config.run.id!r} began")
        await anyio.sleep(_LOOK_S)


async def newest_start(broker: Broker) -> RunStarted | None:
    """The newest start of the run."""
    newest, run_log = None, RunLog(broker)
    while (start := await run_log.find(RUN_STARTED, 0 if newest is None else newest.ordinal + 1)) is not None:
        newest = start
    return newest


async def _check_same(site: Site, broker: Broker, start: RunStarted, policy_digest: str, secrets: RunSecrets) -> None:
    """What decides the log must be the same on all nodes.

    Raises:
        ConfigError: what differs.
    """
    run, node = site.config.run.id, site.share.node
    if start.config_digest != fold_digest(site.config):
        raise ConfigError(
            f"node {node}: its config has other [sampling], [assembly] or stream settings than run {run!r} began with: "
            "copy the control node's config here"
        )
    if start.policy_digest != policy_digest:
        raise ConfigError(
            f"node {node}: the policy that was made or found here has the weights {policy_digest or '(none)'}, run {run!r} "
            f"began with {start.policy_digest or '(none)'}: copy the control node's policy folder here and name it by policy.folder"
        )
    if await state_bytes(broker, SECRETS_KEY) != secrets_digest(secrets):
        raise ConfigError(f"node {node}: {site.secrets_file} differs from the control node's: copy that one here")


async def _until_over(broker: Broker, before: bytes, over: anyio.Event) -> None:
    """Set the event once the control node says the run's end."""
    await _until_changed(broker, OVER_KEY, before)
    over.set()


async def _until_changed(broker: Broker, key: str, before: bytes) -> None:
    while True:
        try:
            if await state_bytes(broker, key) != before:
                return
        except BrokerError as error:
            log.debug("the broker is away", error=str(error))
        await anyio.sleep(_LOOK_S)


async def _say_trained(broker: Broker, supervisor: Supervisor) -> None:
    """Tell the control node when this node's trainer has done its work."""
    trainer = supervisor.processes.get("trainer")
    if trainer is not None:
        await trainer.finished.wait()
        start = await newest_start(broker)
        await broker.save_state(TRAINED_KEY, str(0 if start is None else start.ordinal).encode())


async def _cancel_when(scope: anyio.CancelScope, *events: anyio.Event) -> None:
    await first_of(*events)
    scope.cancel()


async def until_all_left(broker: Broker) -> None:
    """Until all nodes have stopped their workers; those that died don't count."""
    with anyio.move_on_after(_LAST_OUT_S):
        while True:
            try:
                others = list(await nodes_of(broker))
                for node in others:
                    if not await answers(broker, node):
                        await say_gone(broker, node)
                if not others:
                    return
            except BrokerError as error:
                log.debug("the broker is away", error=str(error))
            await anyio.sleep(_LOOK_S)


async def _until_ended(broker: Broker, before: bytes) -> None:
    """Until nobody needs this node's NATS server any more."""
    with anyio.move_on_after(_LAST_OUT_S):
        await _until_changed(broker, ENDED_KEY, before)
