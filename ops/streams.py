"""Lists the rows of a run's streams on the log, once a run: sampling then depends on the log alone."""

from __future__ import annotations

import msgspec
import structlog

from ops.arena_access import arena_access
from ops.config import run_streams
from ops.workers.context import WorkerContext
from schemas.config_arena import StreamConfig, StreamRunner
from schemas.errors import ConfigError
from schemas.messages.sampling import StreamListed, StreamRow
from schemas.topics import STREAM_LISTED
from stages.clients.arena.client import open_arena

log = structlog.get_logger("headrace.streams")


async def list_streams(context: WorkerContext) -> None:
    """Put every stream's rows on the log that are not there yet.

    Raises:
        ArenaError: a dataset can't be listed.
        ConfigError: a stream has no rows.
    """
    missing = [
        stream
        for stream in run_streams(context.config).values()
        if not stream.evaluate_every_versions and await context.log.find(STREAM_LISTED, stream.name) is None
    ]
    if not missing:
        return
    async with open_arena(arena_access(context.config, context.endpoints)) as arena:
        for stream in missing:
            if stream.runner is not StreamRunner.ARENA:
                continue
            await arena.get_stream(stream.stream_id)
            rows = [
                StreamRow(data_id=row.data_id, tags=list(row.tags))
                for row in await arena.list_dataset(stream.stream_id)
            ]
            await _publish(context, stream, rows)


async def _publish(context: WorkerContext, stream: StreamConfig, rows: list[StreamRow]) -> None:
    if not rows:
        raise ConfigError(
            f"stream {stream.name!r} has weight {stream.sampling_weight} and no rows: fill it or remove it"
        )
    listed = StreamListed(
        stream=stream.name,
        rows=await context.payloads.put(msgspec.msgpack.encode(rows)),
        num_rows=len(rows),
        weight=stream.sampling_weight,
    )
    await context.log.publish(listed)
    log.info("stream listed", stream=stream.name, rows=len(rows))
