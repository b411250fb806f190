"""The engines of a run on this machine: a worker process for each that the config names or a person adds, and a word when none is left."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import anyio
import msgspec
import structlog

from broker.api import Broker
from ops.config import RunConfig
from ops.engines.plan import EngineChoice, EnginePlan, attached_name, chosen_engine, has_servers
from ops.engines.registry import EngineReply, EngineRequest, forget, keep, registered, registry_subject
from ops.nodes.share import Share
from ops.run_folder import RunFolder
from ops.supervise.process import ProcessSpec, RestartPolicy, python
from ops.supervise.supervisor import Supervisor
from schemas.errors import ConfigError
from schemas.ids import is_safe_token
from schemas.messages.engines import EngineAnnouncement, EngineState, engines_pattern

log = structlog.get_logger("headrace.run")

_STOP_DEADLINE_S: Final = 12.0


def engine_process(plan: EnginePlan, folder: RunFolder, environment: Mapping[str, str]) -> ProcessSpec:
    """The worker of one engine. It starts its server again itself; that it is started again itself is for accidents."""
    where = ("--url", plan.url) if plan.url else ("--slot", str(plan.slot))
    return ProcessSpec(
        name=plan.name,
        argv=python(
            *("-m", "ops", "worker", "engine", "--name", plan.name, "--kind", plan.kind.value),
            *where,
            *("--run-dir", str(folder.path)),
        ),
        env=environment,
        log_file=str(folder.logs / f"{plan.name}.log"),
        restart=RestartPolicy(max_restarts=8, window_s=120.0),
        essential=False,
        stop_deadline_s=_STOP_DEADLINE_S,
        serves_others=True,
    )


class EngineKeeper:
    """Starts the workers of a run's engines and those that are added while it goes."""

    def __init__(
        self,
        config: RunConfig,
        share: Share,
        folder: RunFolder,
        environment: Mapping[str, str],
        supervisor: Supervisor,
        broker: Broker,
    ) -> None:
        self._config: Final = config
        self._share: Final = share
        self._folder: Final = folder
        self._environment: Final = environment
        self._supervisor: Final = supervisor
        self._broker: Final = broker
        self._names: Final[set[str]] = set()
        self._lost: Final[dict[str, str]] = {}
        self.serving: Final = anyio.Event()
        """Set once any engine takes requests."""

    async def start(self) -> None:
        """Start a worker for every engine of the node's share; the node that controls the run has those that were added, too."""
        added = await registered(self._broker) if self._share.control else []
        for plan in [*self._share.engines, *added]:
            if plan.name not in self._names:
                await self._start(plan)

    async def listen(self) -> None:
        """Until the first engine takes requests, whoever started it."""
        async with self._broker.listen(engines_pattern(self._broker.run)) as announcements:
            async for _subject, data in announcements:
                if msgspec.msgpack.decode(data, type=EngineAnnouncement).state is EngineState.SERVING:
                    self.serving.set()
                    return

    async def answer(self, data: bytes) -> bytes:
        """Add or remove a server."""
        request = msgspec.msgpack.decode(data, type=EngineRequest)
        try:
            name = await (self._register(request) if request.action == "register" else self._deregister(request.name))
            reply = EngineReply(name=name)
        except ConfigError as error:
            reply = EngineReply(error=str(error))
        return msgspec.msgpack.encode(reply)

    async def _start(self, plan: EnginePlan) -> None:
        self._names.add(plan.name)
        self._lost.pop(plan.name, None)
        spec = engine_process(plan, self._folder, self._environment)
        await self._supervisor.start(spec, on_given_up=lambda reason: self._given_up(plan.name, reason))

    def _given_up(self, name: str, reason: str) -> None:
        self._lost[name] = reason
        left = self._names - self._lost.keys()
        if left:
            log.error("an engine is given up; the others go on", engine=name, left=len(left))
        else:
            self._supervisor.fail(f"no engine is left. {reason}")

    async def _register(self, request: EngineRequest) -> str:
        place = urlsplit(request.url)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise ConfigError(f"{request.url!r}: expected http://host:port")
        name = request.name or attached_name(request.url)
        if not is_safe_token(name):
            raise ConfigError(f"--name {name!r}: expected letters, digits, '_' and '-'")
        plan = chosen_engine(EngineChoice(name=name, kind=request.kind, url=request.url), self._config.engine)
        if name in self._names:
            raise ConfigError(f"{name}: an engine of that name is in the run; give another --name, or deregister it")
        await keep(self._broker, plan)
        await self._start(plan)
        log.info("an engine is added", engine=name, url=plan.url)
        return name

    async def _deregister(self, name: str) -> str:
        if name not in self._names:
            known = ", ".join(sorted(self._names)) or "none"
            raise ConfigError(f"{name}: no such engine; this run looks after {known}")
        if not await forget(self._broker, name):
            raise ConfigError(
                f"{name}: it comes from the config, and would be back at the next start: change engine.count or engine.urls"
            )
        self._names.discard(name)
        self._lost.pop(name, None)
        await self._supervisor.end(name)
        log.info("an engine is removed", engine=name)
        return name


@asynccontextmanager
async def kept_engines(
    config: RunConfig,
    share: Share,
    folder: RunFolder,
    environment: Mapping[str, str],
    supervisor: Supervisor,
    broker: Broker,
) -> AsyncGenerator[anyio.Event]:
    """A node's engines, starting; the event that one of the run's serves, set at once where it has no servers."""
    if not has_servers(config.engine) or config.run.from_run:
        there = anyio.Event()
        there.set()
        yield there
        return
    keeper = EngineKeeper(config, share, folder, environment, supervisor, broker)
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        if share.control:
            await stack.enter_async_context(broker.serve(registry_subject(broker.run), keeper.answer))
        tasks.start_soon(keeper.listen)
        await keeper.start()
        yield keeper.serving
        tasks.cancel_scope.cancel()
