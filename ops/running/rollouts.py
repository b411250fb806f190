"""A run without training: when it is over, and what it left in the Arena."""

from __future__ import annotations

import anyio

from broker.api import Broker
from ops.config import RunConfig, sampling_settings
from pipeline.log import RunLog
from schemas.config_arena import ArenaRoute
from schemas.messages.rollout import EpisodeLaunched
from schemas.messages.sampling import GroupClosed, RunFinished, StreamListed
from schemas.topics import EPISODE_LAUNCHED, GROUP_CLOSED, RUN_FINISHED, STREAM_LISTED
from stages.clients.arena.client import ArenaAccess, open_arena

_LOOK_S = 10.0
"""How long the end of a run may take to look for registrations that were left."""
_AT_ONCE = 16
_REGISTERS = frozenset((ArenaRoute.SESSION_GATEWAY.value, ArenaRoute.GATEWAY.value))


async def until_rolled_out(broker: Broker, config: RunConfig, done: anyio.Event) -> None:
    """Set the event once every group that the run will issue is closed, its evaluations' included."""
    settings = sampling_settings(config)
    evaluated = {stream.name for stream in settings.evaluations}
    open_streams = {stream.name for stream in settings.open_streams}
    listed: dict[str, int] = {}
    closed: set[str] = set()
    evaluations: set[str] = set()
    async with RunLog(broker).read([STREAM_LISTED, GROUP_CLOSED, RUN_FINISHED]) as entries:
        async for entry in entries:
            message = entry.message
            if isinstance(message, StreamListed) and message.stream in {*settings.streams, *evaluated}:
                listed.setdefault(message.stream, message.num_rows)
            elif isinstance(message, GroupClosed):
                (evaluations if message.evaluation else closed).add(message.group)
            elif isinstance(message, RunFinished) and message.reason == "streams":
                done.set()  # every row of streams that were closed is drawn, and every group has ended
                return
            if len(listed) < len(settings.streams) + len(evaluated):
                continue
            union = sum(rows for stream, rows in listed.items() if stream not in evaluated)
            to_evaluate = sum(listed.values()) - union  # no version but the first
            most = num_groups(config, union, endless=bool(open_streams))
            if most is not None and len(closed) >= most and len(evaluations) >= to_evaluate:
                done.set()
                return


async def until_finished(broker: Broker, ordinal: int, done: anyio.Event) -> None:
    """Set the event once sampling has said the end of this start of the run: evaluations of its last version are over."""
    async with RunLog(broker).read([RUN_FINISHED]) as entries:
        async for entry in entries:
            if isinstance(entry.message, RunFinished) and entry.message.ordinal >= ordinal:
                done.set()
                return


def num_groups(config: RunConfig, union: int, *, endless: bool = False) -> int | None:
    """Groups that a run without training issues: so many epochs, or so many steps' worth, whichever is less.

    Args:
        endless: a stream is open: there are no epochs, and without steps no number (None).
    """
    epoch = config.sampling.epoch_size_groups or union
    bounds = [config.run.epochs * epoch] if config.run.epochs is not None else []
    if config.run.steps is not None:
        bounds.append(config.run.steps * config.sampling.groups_per_step)
    return min(bounds, default=None if endless else epoch)


async def registrations_left(broker: Broker, access: ArenaAccess) -> int | None:
    """How many of the run's registrations still stand in the Arena; None where it can't be asked in time."""
    names: set[str] = set()
    async with RunLog(broker).read([EPISODE_LAUNCHED], follow=False) as entries:
        async for entry in entries:
            launched = entry.message
            if isinstance(launched, EpisodeLaunched) and launched.route in _REGISTERS:
                names.add(launched.model_name)
    standing = 0
    limiter = anyio.CapacityLimiter(_AT_ONCE)
    with anyio.move_on_after(_LOOK_S):
        async with open_arena(access) as arena, anyio.create_task_group() as tasks:

            async def look(name: str) -> None:
                nonlocal standing
                async with limiter:
                    standing += await arena.get_model(name) is not None

            for name in names:
                tasks.start_soon(look, name)
        return standing
    return None
