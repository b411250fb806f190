"""A launch worker as a process: the real stage, runner, broker, client, registrations and route; sessions are a stand-in's.

python launcher_process.py BROKER_URL TOKEN_FILE ARENA_URL GATEWAY_URL
"""

import signal
import sys

import anyio
import msgspec

from broker.api import ConsumerSettings
from broker.connect import connect
from broker.settings import ConnectSettings
from ops.rollout_adapters import LogLaunches
from pipeline.log import RunLog
from pipeline.metrics import Metrics
from pipeline.runner import RunnerSettings, StageRunner
from pipeline.stage import bind
from schemas.config_arena import ArenaRoute, ArenaSettings, StreamConfig, StreamRunner
from schemas.messages.rollout import SessionClosed
from stages.arena_launch.arena_runner import ArenaRunner
from stages.arena_launch.polling import Pace
from stages.arena_launch.ports import SessionTicket
from stages.arena_launch.routes import make_route
from stages.arena_launch.stage import LaunchSettings, launch_episode
from stages.clients.arena.client import ArenaAccess, open_arena
from stages.clients.arena.registration import RegistrationSettings, open_registrations
from stages.clients.arena.secret import Secret


class Sessions:
    def __init__(self, gateway_url: str) -> None:
        self.gateway_url = gateway_url

    async def serves(self, version: int) -> bool:
        return version == 0

    async def open(self, session: str, *, min_version: int) -> SessionTicket:
        return SessionTicket(session=session, token=Secret("t"), base_url=self.gateway_url)

    async def close(self, session: str) -> SessionClosed:
        return SessionClosed(session=session, num_interactions=1)


async def main(broker_url: str, token_file: str, arena_url: str, gateway_url: str) -> None:
    access = ArenaAccess(base_url=arena_url, token=Secret("control"), llm_api_key=Secret("gateway"))
    arena_settings = ArenaSettings(poll_interval_s=0.5)
    settings = LaunchSettings(streams={"s": StreamConfig(name="s", stream_id="sums")}, arena=arena_settings, attempts=3)
    async with (
        connect(broker_url, "chaos", ConnectSettings(token_file=token_file)) as broker,
        open_arena(access) as arena,
        open_registrations(arena, RegistrationSettings(run_label="chaos")) as registrations,
        anyio.create_task_group() as tasks,
    ):
        route = make_route(
            ArenaRoute.SESSION_GATEWAY,
            registrations,
            access,
            run_label="chaos",
            worker="w",
            generation_key=Secret("generation"),
        )
        route.know(gateway_url)
        metrics = Metrics("chaos", "arena_launch")
        stage = bind(
            launch_episode, launches=LogLaunches(RunLog(broker), metrics), sessions=Sessions(gateway_url),
            runners={StreamRunner.ARENA: ArenaRunner(arena, route, arena_settings, pace=Pace(0.5))},
            settings=settings, metrics=metrics,
        )  # fmt: skip
        consumer = ConsumerSettings(ack_wait_s=2.0, prefetch=256)
        runner = StageRunner(
            msgspec.structs.replace(stage, concurrency=256), broker, metrics, RunnerSettings(consumer=consumer)
        )

        async def drain_when_told() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                async for _ in signals:
                    runner.drain()

        tasks.start_soon(drain_when_told)
        await runner.run()
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
