"""Lists the rows of a run's streams on the log, once a run: sampling then depends on the log alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import anyio
import msgspec
import structlog

from ops.agents.pool import open_pool
from ops.agents.runner import agent_program
from ops.arena_access import arena_access
from ops.config import run_streams
from ops.logtools.prompts import PlacedRow, Prompt, check_row, read_rows
from ops.workers.context import WorkerContext
from schemas.config_arena import StreamConfig, StreamRunner
from schemas.errors import ConfigError
from schemas.messages.sampling import StreamListed, StreamRow
from schemas.payload import PayloadRef
from schemas.topics import STREAM_LISTED
from stages.clients.arena.client import ArenaClient, open_arena

log = structlog.get_logger("headrace.streams")

_STORED_AT_ONCE: Final = 32


async def list_streams(context: WorkerContext) -> None:
    """Put every stream's rows on the log that are not there yet; those of a stream that is published are waited for.

    Raises:
        ArenaError: a dataset can't be listed.
        ConfigError: a stream has no rows, or they can't be read.
    """
    missing = [
        stream
        for stream in run_streams(context.config).values()
        if await context.log.find(STREAM_LISTED, stream.name) is None
    ]
    in_arena = [stream for stream in missing if stream.runner is StreamRunner.ARENA]
    if in_arena:
        async with open_arena(arena_access(context.config, context.endpoints)) as arena:
            for stream in in_arena:
                await _publish(context, stream, await _rows_of_arena(arena, stream))
    for stream in missing:
        if stream.runner is StreamRunner.VERIFIERS:
            await _publish(context, stream, await _rows_of_environment(context, stream))
        elif stream.runner is StreamRunner.ONLINE and stream.rows.isdecimal():
            tasks = [StreamRow(data_id=str(number)) for number in range(int(stream.rows))]
            await _publish(context, stream, tasks)
        elif stream.rows:
            await _publish(context, stream, await _store(context, _prompts(stream)))


async def _rows_of_arena(arena: ArenaClient, stream: StreamConfig) -> list[StreamRow]:
    await arena.get_stream(stream.stream_id)
    dataset = await arena.list_dataset(stream.stream_id)
    return [StreamRow(data_id=row.data_id, tags=list(row.tags)) for row in dataset]


async def _rows_of_environment(context: WorkerContext, stream: StreamConfig) -> list[StreamRow]:
    async with open_pool(agent_program(stream, context.config.arena)) as pool:
        found = await pool.rows(int(stream.rows or 0))
    placed = [PlacedRow(place=f"{stream.name} task {number}", value=row) for number, row in enumerate(found)]
    return await _store(context, _checked(stream, placed))


def _prompts(stream: StreamConfig) -> list[Prompt]:
    return _checked(stream, read_rows(stream.rows))


def _checked(stream: StreamConfig, placed: Iterable[PlacedRow]) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    for row in placed:
        prompt = check_row(row)
        if prompt.left_out:
            raise ConfigError(
                f"stream {stream.name!r}: {prompt.place}: expected no fields but prompt or messages, id (or data_id) and tags, found "
                f"{', '.join(prompt.left_out)}; move what the stream's runner needs into prompt and remove the rest, or leave the "
                "stream's rows empty and publish them: `headrace publish prompts` leaves such fields out and names them"
            )
        if (former := prompts.setdefault(prompt.data_id, prompt)) is not prompt:
            raise ConfigError(
                f"stream {stream.name!r}: {former.place} and {prompt.place} both have the id {prompt.data_id!r}; "
                "expected one row an id"
            )
    return list(prompts.values())


async def _store(context: WorkerContext, prompts: Sequence[Prompt]) -> list[StreamRow]:
    """Rows with their prompts stored beside them: each group and episode names its prompt and does not carry it."""
    stored: dict[int, PayloadRef] = {}

    async def store(number: int, prompt: Prompt) -> None:
        stored[number] = await context.payloads.put(prompt.prompt)

    for start in range(0, len(prompts), _STORED_AT_ONCE):
        async with anyio.create_task_group() as tasks:
            for number, prompt in enumerate(prompts[start : start + _STORED_AT_ONCE], start):
                tasks.start_soon(store, number, prompt)
    return [
        StreamRow(data_id=prompt.data_id, tags=prompt.tags, payload=stored[number])
        for number, prompt in enumerate(prompts)
    ]


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
