"""Whether a stream takes published prompts, by what the run's log says: its config and what is closed.

It must not know where prompts come from.
"""

from __future__ import annotations

from broker.api import Broker
from ops.config import run_streams
from ops.logtools.recorded import config_of
from pipeline.log import RunLog
from schemas.config_arena import StreamConfig, StreamRunner
from schemas.errors import ConfigError
from schemas.topics import RUN_STARTED, STREAM_LISTED


class NoPromptStreamError(ConfigError):
    """The stream takes no prompts; the text says why, and which ones do."""


async def check_prompt_stream(broker: Broker, name: str, *, lists: bool = False, allow_unknown: bool = False) -> None:
    """See that what is published into a stream can be drawn. A run that was never started takes every stream.

    Args:
        lists: the stream is listed afterwards, which harms nothing where it is listed with the same rows.
        allow_unknown: take also a stream that the run's config does not name.

    Raises:
        NoPromptStreamError: it is closed, it is not in the config, or its rows come from elsewhere.
    """
    log = RunLog(broker)
    listed = await log.find(STREAM_LISTED, name)
    started = await log.find(RUN_STARTED, 0)
    if started is not None:
        streams = run_streams(config_of(started))
        reason = "" if name in streams or allow_unknown else f"run {broker.run!r} has no such stream"
        reason = reason or (_not_published(streams[name]) if name in streams else "")
        if reason:
            takes = ", ".join(sorted(found for found, stream in streams.items() if not _not_published(stream)))
            others = ", ".join(sorted(found for found, stream in streams.items() if _not_published(stream)))
            raise NoPromptStreamError(
                f"stream {name!r}: {reason}; streams that take prompts: {takes or 'none'}"
                + (f"; others: {others}" if others else "")
            )
    if listed is not None and not lists:
        raise NoPromptStreamError(
            f"stream {name!r} is closed with {listed.num_rows:,} rows: what is published now would never be drawn"
        )


def _not_published(stream: StreamConfig) -> str:
    """Why nothing is drawn from what is published into a stream; empty where it is."""
    match stream.runner:
        case StreamRunner.ARENA:
            return "its tasks are the Arena's"
        case StreamRunner.VERIFIERS:
            return "its tasks are those of its verifiers environment"
        case _:
            return f"its rows are those of the config (rows = {stream.rows!r})" if stream.rows else ""
