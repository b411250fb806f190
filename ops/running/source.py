"""The run that another run assembles from: where its log is, a connection to it, and whether the two fit.

A run that goes on answers through its own broker. One that is over is read through a server over its store, which is
started here; its folder is locked as long, so that nobody resumes it meanwhile. Nothing is written to its log.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.connect import connect
from broker.errors import NoSuchStreamError, NotConnectedError, StoreLockedError
from broker.settings import ConnectSettings
from ops.config import RunConfig
from ops.connection import broker_login, check_port, find_run, served_store
from ops.run_folder import RunFolder, RunFolderError
from pipeline.log import RunLog
from schemas.config import RolloutSection, SamplingSection
from schemas.errors import ConfigError
from schemas.messages.sampling import RunStarted
from schemas.messages.training import StepTrained
from schemas.topics import RUN_STARTED, STEP_TRAINED

log = structlog.get_logger("headrace.source")

_ANSWER_S: Final = 2.0
"""A local server that has not answered within this time is not there."""
_OPEN_DEADLINE_S: Final = 60.0
"""A run that starts or stops holds its folder for so long at most, without its server answering."""


class SourceRunError(RunFolderError):
    """The first run's log can't be read, or not as a whole."""


class SourceRun(msgspec.Struct, frozen=True, kw_only=True):
    """Where the first run is."""

    run: str
    url: str
    settings: ConnectSettings
    folder: str = ""
    """Its folder, where its embedded server keeps the log; empty: a broker that goes on without the run."""


class SourceEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How far the first run is meant to go, and is."""

    steps: int | None = None
    """Its last step, as its latest start set it."""
    trained: int = 0
    generation: int = 0
    """Newest generation of its trainer that was heard."""

    @property
    def reached(self) -> bool:
        """Nothing that matters will follow."""
        return self.steps is not None and self.trained >= self.steps

    def after(self, message: msgspec.Struct) -> SourceEnd:
        """The same, one message later."""
        match message:
            case RunStarted(steps=steps):
                return msgspec.structs.replace(self, steps=steps)
            case StepTrained(step=step, generation=generation) if generation >= self.generation:
                return msgspec.structs.replace(self, trained=max(step, self.trained), generation=generation)
            case _:
                return self


def find_source(config: RunConfig) -> SourceRun:
    """The run that `run.from_run` names: by its folder, by its name below ./runs, or by its id on the same broker.

    Raises:
        RunFolderError: there is no such run.
        ConfigError: it is the very run that is to be started.
    """
    try:
        folder = find_run(config.run.from_run)
    except RunFolderError:
        if config.broker.url == "embedded":
            raise
        found = SourceRun(
            run=config.run.from_run,
            url=config.broker.url,
            settings=broker_login(config.broker, RunFolder(config.run.dir)),
        )
    else:
        if folder.path == RunFolder(config.run.dir).path:
            raise ConfigError(f"run.dir: expected another folder than the first run's, found {config.run.dir}")
        endpoints, broker = folder.read_endpoints(), folder.read_config().broker
        found = SourceRun(
            run=endpoints.run,
            url=endpoints.broker_url,
            settings=endpoints.broker_login,
            folder=str(folder.path) if broker.url == "embedded" else "",
        )
    if found.run == config.run.id:
        raise ConfigError(
            f"run.id: expected another id than the first run's, found {config.run.id!r}; give the second run one with "
            "--set run.id=… (and a folder with --set run.dir=…)"
        )
    return found


@asynccontextmanager
async def open_source(source: SourceRun) -> AsyncGenerator[tuple[Broker, bool]]:
    """The first run's log, and whether it is over: then it ends where it ends.

    Raises:
        SourceRunError: neither its broker answers nor can its store be served.
    """
    async with AsyncExitStack() as stack:
        try:
            opened = await _connected(source, stack), False
        except (NotConnectedError, NoSuchStreamError) as error:
            if not source.folder:
                raise SourceRunError(f"run {source.run!r}: its broker {source.url} does not answer: {error}") from error
            opened = await _served(source, stack)
        yield opened


async def _connected(source: SourceRun, stack: AsyncExitStack) -> Broker:
    settings = source.settings
    if source.folder:
        settings = msgspec.structs.replace(settings, connect_deadline_s=_ANSWER_S)
        await check_port(source.url)
    broker = await stack.enter_async_context(connect(source.url, source.run, settings))
    await broker.log_status()
    return broker


async def _served(source: SourceRun, stack: AsyncExitStack) -> tuple[Broker, bool]:
    """Serve the store of a run that is over; one that is only just starting or stopping is waited for."""
    folder = RunFolder(source.folder)
    reason = ""
    with anyio.move_on_after(_OPEN_DEADLINE_S):
        while True:
            try:
                broker = await stack.enter_async_context(served_store(folder, source.run, name="from-run"))
            except (RunFolderError, StoreLockedError) as error:
                reason = str(error)
            else:
                log.info("serving the log of a run that is over", run=source.run, folder=source.folder)
                return broker, True
            try:
                return await _connected(source, stack), False
            except (NotConnectedError, NoSuchStreamError):
                await anyio.sleep(0.5)
    raise SourceRunError(
        f"run {source.run!r} in {source.folder}: its server did not answer for {_OPEN_DEADLINE_S:g} s and its "
        f"store is held ({reason})"
    )


async def read_end(broker: Broker) -> SourceEnd:
    """How far the first run is."""
    end = SourceEnd()
    async with RunLog(broker).read([RUN_STARTED, STEP_TRAINED], follow=False) as entries:
        async for entry in entries:
            end = end.after(entry.message)
    return end


class _Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """What of the first run's config the second must share, or its rows would mean something else."""

    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()


async def check_source(source: SourceRun, config: RunConfig) -> None:
    """Compare the two configs where rows depend on them.

    Raises:
        ConfigError: they differ in what can't be changed after sampling.
        SourceRunError: the first run's log can't be read from its start.
    """
    async with open_source(source) as (broker, _):
        started = await RunLog(broker).find(RUN_STARTED, 0)
    if started is None:
        raise SourceRunError(
            f"run {source.run!r}: expected run.started at the beginning of its log, found none: it never began, or "
            "the beginning was purged"
        )
    first = msgspec.json.decode(started.config_json, type=_Sampled)
    for key, found, expected in (
        ("sampling.slots_per_group", config.sampling.slots_per_group, first.sampling.slots_per_group),
        ("rollout.temperature", config.rollout.temperature, first.rollout.temperature),
    ):
        if found != expected:
            raise ConfigError(
                f"{key}: expected {expected}, as the rows of run {source.run!r} were sampled, found {found}"
            )
