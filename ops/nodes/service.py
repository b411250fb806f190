"""A node's processes as they change while it runs: started as its share says, scaled as a person asks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from ops.config import RunConfig
from ops.engines.server_process import free_port
from ops.nodes.asking import (
    NodeReply,
    NodeRequest,
    NodeState,
    keep_scales,
    node_subject,
    say_gone,
    say_here,
    scales_of,
)
from ops.nodes.share import Share, Worker, check_scale, scaled, workers
from ops.run_folder import RunFolder
from ops.running.plan import trainer_process, worker_process
from ops.supervise.process import ProcessSpec
from ops.supervise.supervisor import Supervisor
from schemas.errors import ConfigError

log = structlog.get_logger("headrace.node")

_LEAVE_S: Final = 5.0


class NodeProcesses:
    """Starts and ends the workers of one node."""

    def __init__(
        self,
        share: Share,
        config: RunConfig,
        folder: RunFolder,
        environment: Mapping[str, str],
        supervisor: Supervisor,
        broker: Broker,
        *,
        address: str = "",
        has_broker: bool = False,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._share: Final = share
        self._config: Final = config
        self._folder: Final = folder
        self._environment: Final = environment
        self._supervisor: Final = supervisor
        self._broker: Final = broker
        self._on_stop: Final = on_stop
        self._changing: Final = anyio.Lock()
        self.state = NodeState(
            node=share.node, address=address, control=share.control, broker=has_broker, counts=dict(share.counts)
        )

    async def start(self) -> None:
        """Start the share, and more or less of it as a person asked before."""
        for worker in workers(self._share, self._config):
            await self._supervisor.start(self._spec(worker))
        if self._share.trainer or self._share.ranks is not None:
            trainer = trainer_process(self._config, self._folder, self._environment, self._share.ranks)
            await self._supervisor.start(trainer)
        for stage, count in (await scales_of(self._broker, self._share.node)).items():
            try:
                await self._scale(stage, count)
            except ConfigError as error:  # the topology was changed meanwhile
                log.warning("a former scale is not obeyed", stage=stage, count=count, error=str(error))

    async def answer(self, data: bytes) -> bytes:
        """One request of a person."""
        request, error = msgspec.msgpack.decode(data, type=NodeRequest), ""
        try:
            match request.action:
                case "ping":
                    pass
                case "stop":
                    log.info("the node is told to leave")
                    self._on_stop()
                case "scale":
                    await self._scale(request.stage, request.count)
                    kept = await scales_of(self._broker, self._share.node)
                    await keep_scales(self._broker, self._share.node, {**kept, request.stage: request.count})
                    await say_here(self._broker, self.state)
        except (ConfigError, BrokerError) as refused:
            error = str(refused)
        return msgspec.msgpack.encode(NodeReply(state=self.state, error=error))

    async def _scale(self, stage: str, count: int) -> None:
        check_scale(self._share, stage, count)
        async with self._changing:
            known = self.state.counts.get(stage, 0)
            now = {worker.name: worker for worker in scaled(self._share, stage, known)}
            wanted = {worker.name: worker for worker in scaled(self._share, stage, count)}
            for name in sorted(now.keys() - wanted.keys()):
                await self._supervisor.end(name)
            for name in [name for name in wanted if name not in now]:
                await self._supervisor.start(msgspec.structs.replace(self._spec(wanted[name]), essential=False))
            self.state = msgspec.structs.replace(self.state, counts={**self.state.counts, stage: count})
        if count != known:
            log.info("scaled", stage=stage, count=count, before=known)

    def _spec(self, worker: Worker) -> ProcessSpec:
        """A gateway beside the first one of its node has a port of its own, which it keeps over restarts."""
        beside = worker.stages == ("gateway",) and worker.slot > 0
        port = free_port(self._config.gateway.host) if beside else 0
        return worker_process(worker, self._folder, self._config, self._environment, port=port)


@asynccontextmanager
async def known_node(processes: NodeProcesses, broker: Broker) -> AsyncGenerator[None]:
    """The node answers people, and is listed as long as it runs."""
    node = processes.state.node
    async with broker.serve(node_subject(broker.run, node), processes.answer):
        await say_here(broker, processes.state)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LEAVE_S):
                try:
                    await say_gone(broker, node)
                except BrokerError as error:
                    log.warning("the node could not take leave", error=str(error))
