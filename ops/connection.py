"""Which run is meant, and a connection to its log.

A run that is over has no broker: its store is served here for as long as somebody looks, and its folder is locked as long,
so that nobody resumes it meanwhile.
"""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import anyio
import msgspec

from broker.api import Broker
from broker.connect import connect
from broker.embedded import embedded_server
from broker.errors import NoSuchStreamError, NotConnectedError, StoreLockedError
from broker.settings import ConnectSettings
from ops.nodes.file import is_topology, load_cluster
from ops.run_folder import Endpoints, RunFolder, RunFolderError
from pipeline.log import RunLog
from pipeline.presence import missing, roll_call
from schemas.config import BrokerSection
from schemas.topics import RUN_FINISHED, RUN_STARTED

_ANSWER_S: Final = 2.0
"""A server on this machine that has not answered within this time is not there."""
_OPEN_DEADLINE_S: Final = 15.0
"""A run that starts or stops, and another look at it, hold its folder for a moment without its server answering."""
_TRY_AGAIN_S: Final = 0.3


class OpenedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can be looked at."""

    broker: Broker
    is_running: bool = True
    """False: the run is over or stopped, nothing new comes; an embedded store is served for this look only."""


def find_run(target: str | None) -> RunFolder:
    """The folder that a person means: a run folder's path, a run's name below ./runs, or, with None, the newest there (of a
    run's nodes one that has the log). A topology file means the folder of one of its nodes on this machine, the control node's before others'.

    Raises:
        RunFolderError: there is no such run.
    """
    if target is not None:
        if is_topology(target):
            return _node_folder(target)
        for path in (Path(target), Path("runs") / target):
            if (path / "endpoints.json").is_file():
                return RunFolder(path)
        raise RunFolderError(f"{target}: expected the folder of a run that was started, or its name below ./runs")
    candidates = sorted(
        [*Path("runs").glob("*/endpoints.json"), *Path("runs").glob("*/*/endpoints.json")],
        key=lambda path: path.stat().st_mtime,
    )
    if not candidates:
        raise RunFolderError("no run below ./runs: name a run's folder, or give --url and --run")
    newest = RunFolder(candidates[-1].parent)
    if newest.read_endpoints().node and not newest.nats.is_dir():
        for beside in newest.path.parent.glob(
            "*/endpoints.json"
        ):  # a node whose server's store can be served when the run is over
            if (other := RunFolder(beside.parent)).nats.is_dir():
                return other
    return newest


def _node_folder(topology: str) -> RunFolder:
    cluster = load_cluster(topology)
    for node in sorted(cluster.file.nodes, key=lambda node: not node.control):
        folder = RunFolder(cluster.run_dir(node.name))
        if folder.endpoints_file.is_file():
            return folder
    for node in cluster.file.nodes:
        if (pid := RunFolder(cluster.run_dir(node.name)).holder()) is not None:
            raise RunFolderError(
                f"{topology}: node {node.name} (pid {pid}) waits on this machine for the run's control node: start that, or end "
                f"the wait by kill {pid}"
            )
    raise RunFolderError(f"{topology}: no node of it was started on this machine; run this where one was")


@asynccontextmanager
async def open_run(
    target: str | None = None, *, url: str | None = None, name: str = "headrace"
) -> AsyncGenerator[Broker]:
    """A run's log: by the run's folder, also when the run is over, or by a broker's URL and the run's id as `target`.

    Raises:
        RunFolderError: there is no such run, or it is over and its store can't be served.
        NotConnectedError: its broker does not answer.
    """
    async with look_at_run(target, url=url, name=name) as opened:
        yield opened.broker


@asynccontextmanager
async def look_at_run(
    target: str | None = None, *, url: str | None = None, name: str = "headrace"
) -> AsyncGenerator[OpenedRun]:
    """As `open_run`, and whether the run is running."""
    async with AsyncExitStack() as stack:
        if url is not None:
            if target is None:
                raise RunFolderError("--url needs the run's id beside it")
            if url.startswith("amqp"):
                raise RunFolderError(
                    f"{target}: expected the folder of a run on RabbitMQ, where its payloads and last values are, found only its broker's URL"
                )
            broker = await stack.enter_async_context(connect_to(Endpoints(run=target, broker_url=url), name=name))
            yield OpenedRun(broker=broker, is_running=await _somebody_works(broker) or not await _is_finished(broker))
            return
        folder = find_run(target)
        if folder.nats.is_dir():
            yield await _answering_or_served(folder, name, stack)
        else:
            endpoints = folder.read_endpoints()
            broker = await stack.enter_async_context(connect_to(endpoints, name=name))
            elsewhere = "" if endpoints.node else socket.gethostname()
            yield OpenedRun(
                broker=broker, is_running=folder.holder() is not None or await _somebody_works(broker, not_on=elsewhere)
            )


async def _somebody_works(broker: Broker, *, not_on: str = "") -> bool:
    """Whether a process of the run is there.

    Args:
        not_on: a host whose processes are known to be gone.
    """
    presences = await roll_call(broker)
    dead = missing(presences, heard=frozenset(), now=time.time())
    return any(one not in dead and one.host != not_on for one in presences)


async def _is_finished(broker: Broker) -> bool:
    """Whether the run's latest start has reached its end."""
    run_log = RunLog(broker)
    ordinal = -1
    while await run_log.find(RUN_STARTED, ordinal + 1) is not None:
        ordinal += 1
    return ordinal >= 0 and await run_log.find(RUN_FINISHED, ordinal) is not None


async def _answering_or_served(folder: RunFolder, name: str, stack: AsyncExitStack) -> OpenedRun:
    """The broker that a run in this folder embeds, or, if it is over, a server over its store."""
    run, reason = folder.read_endpoints().run, ""
    with anyio.move_on_after(_OPEN_DEADLINE_S):
        while True:
            try:
                # The server of a run that restarts may have moved: its place is read anew.
                return OpenedRun(broker=await _answering(folder, name, stack))
            except (NotConnectedError, NoSuchStreamError) as error:
                reason = str(error)
            try:
                broker = await stack.enter_async_context(served_store(folder, run, name=name))
            except (RunFolderError, StoreLockedError) as error:
                reason = str(error)
            else:
                return OpenedRun(broker=broker, is_running=False)
            await anyio.sleep(_TRY_AGAIN_S)
    raise RunFolderError(
        f"run {run!r} in {folder.path}: its server did not answer for {_OPEN_DEADLINE_S:g} s and its store is held ({reason})"
    )


async def _answering(folder: RunFolder, name: str, stack: AsyncExitStack) -> Broker:
    async with AsyncExitStack() as attempt:
        endpoints = folder.read_endpoints()
        await check_port(endpoints.broker_url)
        broker = await attempt.enter_async_context(connect_to(endpoints, name=name, deadline_s=_ANSWER_S))
        await broker.log_status()  # another run's server may have taken the port
        stack.push_async_exit(attempt.pop_all().__aexit__)
        return broker


async def check_port(url: str) -> None:
    """See at once that nobody listens there, where a client would try for a while. Of a cluster any server will do: nothing is
    said of one.

    Raises:
        NotConnectedError: nobody does.
    """
    if "," in url:
        return
    place = urlsplit(url)
    try:
        with anyio.fail_after(_ANSWER_S):
            stream = await anyio.connect_tcp(place.hostname or "127.0.0.1", place.port or 4222)
            await stream.aclose()
    except (OSError, TimeoutError) as error:
        raise NotConnectedError(f"expected a NATS server at {url}, nobody listens there") from error


@asynccontextmanager
async def served_store(folder: RunFolder, run: str, *, name: str) -> AsyncGenerator[Broker]:
    """The log of a run that is over, through a server of one's own over its store.

    Raises:
        RunFolderError, StoreLockedError: the run goes on, or somebody else looks at it.
    """
    with folder.lock():
        async with embedded_server(folder.nats) as server, AsyncExitStack() as stack:
            settings = server.connect_settings(ConnectSettings(name=name))
            yield await stack.enter_async_context(connect(server.url, run, settings))


@asynccontextmanager
async def connect_to(endpoints: Endpoints, *, name: str, deadline_s: float | None = None) -> AsyncGenerator[Broker]:
    """A connection to the run's broker."""
    settings = msgspec.structs.replace(endpoints.broker_login, name=name)
    if deadline_s is not None:
        settings = msgspec.structs.replace(settings, connect_deadline_s=deadline_s)
    async with connect(endpoints.broker_url, endpoints.run, settings) as broker:
        yield broker


def broker_login(broker: BrokerSection, folder: RunFolder) -> ConnectSettings:
    """How a run's processes log in at its broker, and where its payloads are: names of files and folders, no secret."""
    payload_dir = "" if broker.payloads == "broker" else broker.payloads
    if not payload_dir and urlsplit(broker.url).scheme in ("amqp", "amqps"):
        payload_dir = str(folder.path / "store")  # RabbitMQ keeps neither payloads nor last values
    return ConnectSettings(
        user=broker.user,
        password_file=broker.password_file,
        token_file=broker.token_file,
        creds_file=broker.creds_file,
        nkey_seed_file=broker.nkey_seed_file,
        inbox_prefix=broker.inbox_prefix,
        tls_ca_file=broker.tls_ca_file,
        tls_cert_file=broker.tls_cert_file,
        tls_key_file=broker.tls_key_file,
        payload_dir=payload_dir,
    )
