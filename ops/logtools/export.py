"""`headrace export`: a log or a recording as Parquet tables, for DuckDB, pandas and polars.

    episodes.parquet        one line an attempt at a slot, with its result, and its slot's reward
    interactions.parquet    one line a model call, with its tokens, log-probs and versions
    rows.parquet            one line a trained row, with advantage, weight and its step
    steps.parquet           one line a step, with its statistics

Written in batches: memory does not grow with the log, but for one small line an open slot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio.to_thread
import msgspec

from broker.errors import BrokerError
from ops.logtools.row_places import row_places
from ops.logtools.slot_life import shown_error
from ops.logtools.sources import LogSource, tell
from pipeline.generations import Generations
from schemas.errors import ConfigError, SchemaError
from schemas.messages.rollout import EpisodeEnded, InteractionRecorded, InteractionTokens, Trajectory
from schemas.messages.training import Manifest, StepAssembled, StepTrained
from schemas.subjects import PREFIX

if TYPE_CHECKING:
    import pyarrow as pa

TABLES: Final = ("episodes", "interactions", "rows", "steps")
_BATCH: Final = 2048

Cell = None | bool | int | float | str | bytes | list[int] | list[float] | list[str]
Line = dict[str, Cell]


def _schema(table: str) -> pa.Schema:  # pyright: ignore[reportUnknownParameterType] - pyarrow ships no types
    import pyarrow as pa  # noqa: PLC0415 - an extra that only tables need

    text, whole, number, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    time = pa.timestamp("us", tz="UTC")
    columns: dict[str, dict[str, pa.DataType]] = {
        "episodes": {
            "group": text, "slot": whole, "attempt": whole, "stream": text, "harness": text, "data_id": text,
            "tags": pa.list_(text), "session": text, "outcome": text, "final": flag, "status": text, "error": text, "score": number,
            "reward_key": text, "evaluation": flag, "seconds": number, "sequence": whole, "time": time,
            "reward": number, "rejected": flag, "reason": text, "solved": flag, "num_rows": whole,
            "num_interactions": whole, "num_completion_tokens": whole,
        },
        "interactions": {
            "session": text, "ordinal": whole, "group": text, "interaction_id": text, "parent": whole,
            "num_context": whole, "num_prompt": whole, "num_completion": whole, "min_version": whole,
            "max_version": whole, "finish_reason": text, "trainable": flag, "untrainable_reason": text,
            "temperature": number, "protocol": text, "prompt_ids": pa.list_(pa.int32()),
            "completion_ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32()),
            "versions": pa.list_(pa.int32()), "messages_json": text, "sequence": whole, "time": time,
        },
        "rows": {
            "row": text, "step": whole, "group": text, "slot": whole, "stream": text, "reward": number,
            "advantage": number, "loss_weight": number, "mini_batch": whole, "num_tokens": whole,
            "num_loss_tokens": whole, "min_version": whole, "max_version": whole, "staleness": whole, "payload_id": text,
        },
        "steps": {
            "step": whole, "groups": pa.list_(text), "num_rows": whole, "num_tokens": whole, "num_mini_batches": whole,
            "num_dropped": whole, "min_version": whole, "mean_reward": number, "assembled_time": time,
            "trained_time": time, "generation": whole, "digest": text, "skipped": text, "seconds": number,
            "stats_json": text,
        },
    }  # fmt: skip
    return pa.schema([pa.field(name, kind) for name, kind in columns[table].items()])


class _Table:
    """One Parquet file that is being written."""

    def __init__(self, folder: Path, name: str) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra that only tables need

        self.num_lines = 0
        self._schema: Final = _schema(name)
        self._part: Final = folder / f".{name}.parquet.part"
        self._target: Final = folder / f"{name}.parquet"
        self._writer: Final = pq.ParquetWriter(self._part, self._schema, compression="zstd")
        self._lines: Final[list[Line]] = []

    def add(self, line: Line) -> None:
        self._lines.append(line)
        if len(self._lines) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - same

        if self._lines:
            self._writer.write_table(pa.Table.from_pylist(self._lines, schema=self._schema))
            self.num_lines += len(self._lines)
            self._lines.clear()

    def close(self) -> None:
        """Write the rest; only a whole file gets its name."""
        self._flush()
        self._writer.close()
        self._part.replace(self._target)

    def abandon(self) -> None:
        self._writer.close()
        self._part.unlink(missing_ok=True)


async def export_tables(
    source: LogSource, folder: Path, tables: Iterable[str] = TABLES, *, problems: list[str] | None = None
) -> dict[str, int]:
    """Write tables; the number of lines of each.

    Args:
        problems: takes what could not be written whole, and why.

    Raises:
        ConfigError: pyarrow is not installed, or there is no such table.
    """
    wanted = list(tables)
    unknown = [name for name in wanted if name not in TABLES]
    if unknown:
        raise ConfigError(f"table {unknown[0]!r}: expected {', '.join(TABLES)}")
    try:
        import pyarrow  # noqa: ICN001, PLC0415, F401 # pyright: ignore[reportUnusedImport] - whether it is there
    except ImportError as error:
        raise ConfigError("tables need pyarrow: pip install 'headrace[tables]'") from error
    await anyio.to_thread.run_sync(lambda: folder.mkdir(parents=True, exist_ok=True))
    problems = [] if problems is None else problems
    open_tables = {name: _Table(folder, name) for name in wanted}
    try:
        if "episodes" in open_tables:
            await _episodes(source, open_tables["episodes"])
        if "interactions" in open_tables:
            await _interactions(source, open_tables["interactions"], problems)
        if "rows" in open_tables or "steps" in open_tables:
            await _steps(source, open_tables.get("steps"), open_tables.get("rows"), problems)
    except BaseException:
        for table in open_tables.values():
            table.abandon()
        raise
    for table in open_tables.values():
        table.close()
    return {name: table.num_lines for name, table in open_tables.items()}


async def _episodes(source: LogSource, table: _Table) -> None:
    """An attempt's line waits for its slot's trajectory, which follows it on the log."""
    run = f"{PREFIX}.{source.run}"
    waiting: dict[tuple[str, int], Line] = {}
    async for record in source.read([f"{run}.episode.ended.>", f"{run}.trajectory.ready.>"]):
        match tell(record).message:
            case EpisodeEnded() as ended:
                line: Line = {
                    "group": ended.group, "slot": ended.slot, "attempt": ended.attempt, "stream": ended.stream,
                    "harness": ended.harness, "data_id": ended.data_id, "tags": list(ended.tags), "session": ended.session,
                    "outcome": ended.outcome.value, "final": ended.final, "status": ended.status,
                    "error": shown_error(ended),
                    "score": ended.score, "reward_key": ended.reward_key, "evaluation": ended.evaluation,
                    "seconds": ended.seconds, "sequence": record.sequence, "time": int(record.unix_time_s * 1e6),
                }  # fmt: skip
                if ended.final:
                    waiting[ended.group, ended.slot] = line
                else:
                    table.add(line)
            case Trajectory() as ready:
                line = waiting.pop((ready.group, ready.slot), {"group": ready.group, "slot": ready.slot})
                table.add(
                    line
                    | {
                        "reward": ready.reward, "rejected": ready.rejected, "reason": ready.reason,
                        "solved": ready.solved, "num_rows": len(ready.rows),
                        "num_interactions": ready.num_interactions,
                        "num_completion_tokens": ready.num_completion_tokens,
                    }
                )  # fmt: skip
            case _:
                pass
    for line in waiting.values():
        table.add(line)


async def _interactions(source: LogSource, table: _Table, problems: list[str]) -> None:
    unread, reason = 0, ""
    async for record in source.read([f"{PREFIX}.{source.run}.interaction.recorded.>"]):
        call = tell(record).message
        if not isinstance(call, InteractionRecorded):
            continue
        tokens, missing = await _tokens(source, call)
        if missing:
            unread, reason = unread + 1, reason or missing
        table.add(
            {
                "session": call.session, "ordinal": call.ordinal, "group": call.session.partition("-")[0],
                "interaction_id": call.interaction_id, "parent": call.parent, "num_context": call.num_context,
                "num_prompt": call.num_prompt, "num_completion": call.num_completion, "min_version": call.min_version,
                "max_version": call.max_version, "finish_reason": call.finish_reason.value,
                "trainable": call.trainable, "untrainable_reason": call.untrainable_reason,
                "temperature": call.temperature, "protocol": call.protocol,
                "prompt_ids": tokens.prompt_ids.as_numpy().tolist() if tokens else None,
                "completion_ids": tokens.completion_ids.as_numpy().tolist() if tokens else None,
                "logprobs": tokens.logprobs.as_numpy().tolist() if tokens else None,
                "versions": tokens.versions.as_numpy().tolist() if tokens else None,
                "messages_json": tokens.messages_json.decode("utf-8", "replace") if tokens else None,
                "sequence": record.sequence, "time": int(record.unix_time_s * 1e6),
            }
        )  # fmt: skip
    if unread:
        calls = "1 interaction has" if unread == 1 else f"{unread:,} interactions have"
        problems.append(f"{calls} no tokens; the first because {reason}")


async def _tokens(source: LogSource, call: InteractionRecorded) -> tuple[InteractionTokens | None, str]:
    """A call's tokens; without them, why: the columns stay empty, the line stays."""
    if not call.tokens.size_bytes:
        return None, ""  # dropped by a redaction rule
    try:
        return msgspec.msgpack.decode(await source.payload(call.tokens), type=InteractionTokens), ""
    except (BrokerError, SchemaError, msgspec.MsgspecError) as error:
        return None, str(error)


async def _steps(source: LogSource, steps: _Table | None, rows: _Table | None, problems: list[str]) -> None:
    waiting: dict[int, Line] = {}
    generations = Generations()
    async for record in source.read([f"{PREFIX}.{source.run}.step.*.>"]):
        match tell(record).message:
            case StepAssembled() as step if step.step not in waiting:
                waiting[step.step] = {
                    "step": step.step, "groups": list(step.groups), "num_rows": step.num_rows,
                    "num_tokens": step.num_tokens, "num_mini_batches": step.num_mini_batches,
                    "num_dropped": len(step.dropped), "min_version": step.min_version,
                    "mean_reward": step.mean_reward, "assembled_time": int(record.unix_time_s * 1e6),
                }  # fmt: skip
                if rows is not None:
                    await _rows(source, step, rows, problems)
            case StepTrained() as trained if not generations.admits(trained.generation):
                pass
            case StepTrained() as trained if "digest" not in waiting.get(trained.step, {"digest": ""}):
                waiting[trained.step] |= {
                    "trained_time": int(record.unix_time_s * 1e6), "generation": trained.generation,
                    "digest": trained.digest, "skipped": trained.skipped, "seconds": trained.seconds,
                    "stats_json": json.dumps(dict(sorted(trained.stats.items()))),
                }  # fmt: skip
            case _:
                pass
    if steps is not None:
        for _, line in sorted(waiting.items()):
            steps.add(line)


async def _rows(source: LogSource, step: StepAssembled, table: _Table, problems: list[str]) -> None:
    try:
        manifest = msgspec.msgpack.decode(await source.payload(step.manifest), type=Manifest)
    except (BrokerError, SchemaError, msgspec.MsgspecError) as error:
        problems.append(f"step {step.step} has no rows, its manifest can't be read: {error}")
        return
    groups: list[int] = manifest.row_group.as_numpy().tolist()
    streams: list[int] = manifest.row_stream.as_numpy().tolist()
    for number, place in enumerate(row_places(manifest)):
        table.add(
            {
                **msgspec.structs.asdict(place),
                "staleness": place.staleness,
                "group": manifest.groups[groups[number]],
                "stream": manifest.streams[streams[number]],
                "payload_id": manifest.payload_ids[number],
            }
        )
