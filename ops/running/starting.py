"""What every node of a run does before and while its workers work: policy, places of servers, local Arena, disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.abc
import msgspec

from broker.api import Broker
from broker.settings import ConnectSettings
from ops.arena_access import LOCAL, uses_arena
from ops.config import RunConfig
from ops.engines.server_process import free_port
from ops.extras import check_torch_is_there
from ops.local_arena import local_arena_config
from ops.metrics.serving import serve_metrics
from ops.nodes.asking import ARENA_KEY, state_bytes
from ops.run_folder import Endpoints, RunFolder, write_private
from ops.running.disk import watch_disk
from ops.running.plan import arena_process
from ops.running.site import Site
from ops.supervise.process import ProcessSpec, RestartPolicy, python
from ops.supervise.supervisor import Supervisor
from ops.watchdog import RunWatch
from pipeline.watchdog import WATCHDOG

_ONCE: Final = RestartPolicy(max_restarts=0)
_LOOK_S: Final = 0.3


class RunFailedError(Exception):
    """The run ended before its time; the text says why."""


class RunInterruptedError(RunFailedError):
    """Somebody stopped the run before it began."""

    exit_code = 130


async def prepare(folder: RunFolder, supervisor: Supervisor, stopped: anyio.Event) -> None:
    """Make or check the policy, and what only torch can check, in a process of its own: this one stays light.

    Raises:
        ConfigError: an extra is missing.
        RunFailedError: a setting can't work.
        ProcessGivenUpError, RunInterruptedError.
    """
    check_torch_is_there(folder.read_config())
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
    await first_of(process.finished, supervisor.failed, stopped)
    if supervisor.failure is not None:
        _, _, reason = process.last_error().partition(": ") if supervisor.failure.for_good else ("", "", "")
        raise RunFailedError(reason) if reason else supervisor.failure
    if stopped.is_set() and not process.finished.is_set():
        raise RunInterruptedError("interrupted while the policy was made ready; the same command starts again")


def keep_endpoints(site: Site, folder: RunFolder, url: str, settings: ConnectSettings) -> Endpoints:
    """Where the servers are; ports that were chosen once are kept."""
    config, former = site.config, ""
    port = config.gateway.port
    if folder.endpoints_file.is_file():
        known = folder.read_endpoints()
        port, former = port or known.gateway_port, known.arena_url
    endpoints = Endpoints(
        run=config.run.id,
        node=site.share.node if site.in_topology else "",
        broker_url=url,
        broker_login=settings,
        arena_url=former,
        gateway_port=port or free_port(config.gateway.host),
    )
    folder.write_endpoints(endpoints)
    return endpoints


async def reach_arena(
    site: Site, folder: RunFolder, environment: dict[str, str], supervisor: Supervisor, broker: Broker
) -> None:
    """Start the local Arena, or hear where it is; nothing where the run has none."""
    if site.share.arena:
        await _start_arena(site, folder, environment, supervisor)
        url = folder.read_endpoints().arena_url
        await broker.save_state(ARENA_KEY, url.encode())
    elif site.in_topology and has_local_arena(site.config):
        while not (found := await state_bytes(broker, ARENA_KEY)):
            await anyio.sleep(_LOOK_S)
        folder.write_endpoints(msgspec.structs.replace(folder.read_endpoints(), arena_url=found.decode()))


def has_local_arena(config: RunConfig) -> bool:
    """Whether the run has an Arena of its own."""
    return config.arena.url == LOCAL and not config.run.from_run and uses_arena(config)


async def _start_arena(site: Site, folder: RunFolder, environment: dict[str, str], supervisor: Supervisor) -> None:
    """Start the local Arena on a port that it keeps over restarts, its node's included: launchers of other nodes know it by that."""
    config_file = folder.path / "arena.json"
    served = local_arena_config(site.config)
    if site.in_topology:
        served = msgspec.structs.replace(served, host=site.address)
    former = urlsplit(folder.read_endpoints().arena_url).port or 0
    port = served.port or free_port(served.host, former=former)
    write_private(config_file, msgspec.json.encode(msgspec.structs.replace(served, port=port)))

    def ready(line: str) -> None:
        url = msgspec.json.decode(line, type=dict[str, object])["url"]
        folder.write_endpoints(msgspec.structs.replace(folder.read_endpoints(), arena_url=str(url)))

    restart = RestartPolicy(max_restarts=site.config.run.max_restarts)
    await supervisor.start(arena_process(folder, str(config_file), environment, restart), on_ready=ready)


async def look_after(site: Site, folder: RunFolder, broker: Broker, supervisor: Supervisor) -> None:
    """The node's disk, and on the node that controls the run all workers, for ever."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_disk, folder, site.config.run.min_free_disk_bytes, supervisor.fail)
        if site.share.control:
            watch = RunWatch(broker, site.config.watchdog)
            tasks.start_soon(watch.run)
            if site.config.metrics.port:
                tasks.start_soon(serve_metrics, site.config.metrics, WATCHDOG, watch.reports)


@asynccontextmanager
async def looked_after(
    tasks: anyio.abc.TaskGroup, site: Site, folder: RunFolder, broker: Broker, supervisor: Supervisor
) -> AsyncGenerator[None]:
    """The same until it is left: no broker is missed that its owner closes."""
    scope = anyio.CancelScope()

    async def look() -> None:
        with scope:
            await look_after(site, folder, broker, supervisor)

    tasks.start_soon(look)
    try:
        yield
    finally:
        scope.cancel()


async def first_of(*events: anyio.Event) -> None:
    """Wait for whichever event comes first."""
    async with anyio.create_task_group() as tasks:

        async def end_when(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(end_when, event)
