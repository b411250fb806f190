"""`headrace run --record FILE`: a recorder beside the run, from its first message to what stands when all workers are gone.

    recorder opened ─▶ … the run … ─▶ workers stopped ─▶ the rest is stored ─▶ the broker may stop

A recorder that fails does not end the run: it is told at once, and again at the end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from broker.recording import Recorder, RecorderFigures, RecorderSettings, check_log, parse_rule
from ops.logtools.record import DEFAULT_ROTATE_BYTES, open_recording, record_run
from schemas.errors import SchemaError

log = structlog.get_logger("headrace.run")

_STORE_DEADLINE_S: Final = 120.0
"""For what stands at the run's end and is not yet in the file."""


class RunRecording(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded beside a run."""

    path: str
    rules: tuple[str, ...] = ()
    """Redaction rules."""
    weights: str = "first"
    """Weight files to keep: none | first | all."""


class RecordingOutcome(msgspec.Struct, kw_only=True):
    """How far a recording came."""

    path: str
    figures: RecorderFigures = msgspec.field(default_factory=RecorderFigures)
    failure: str = ""
    """Why it ended before the run did; empty = everything that stood at the end is in the file."""


def check_recording(wanted: RunRecording | None, run: str) -> None:
    """Begin the file, or see that the one that stands there can be gone on with.

    Raises:
        ConfigError: a rule that can't be used.
        RecordingError: the file is no recording, of another run, or of a newer version.
        OSError: it can't be written.
    """
    if wanted is None:
        return
    for rule in wanted.rules:
        parse_rule(rule)
    open_recording(wanted.path, run, rules=wanted.rules, weights=wanted.weights).close()


@asynccontextmanager
async def recorded(
    wanted: RunRecording | None, broker: Broker, tasks: anyio.abc.TaskGroup
) -> AsyncGenerator[RecordingOutcome | None]:
    """Record while the context is open; on leaving it, whatever stands then. Nothing without `wanted`.

    Raises:
        RecordingError: on entering: the file was recorded from another log of this run's id.
    """
    if wanted is None:
        yield None
        return
    await check_log(broker, Path(wanted.path))
    outcome = RecordingOutcome(path=wanted.path)
    stop, ended = anyio.Event(), anyio.Event()
    # A cancelled run still leaves what stood: only the deadline below ends the recorder before that.
    scope = anyio.CancelScope(shield=True)
    tasks.start_soon(_record, wanted, broker, outcome, stop, ended, scope)
    try:
        yield outcome
    finally:
        stop.set()
        with anyio.move_on_after(_STORE_DEADLINE_S, shield=True):
            await ended.wait()
        if not ended.is_set():
            scope.cancel()
            _tell(outcome, f"the rest of the log could not be stored within {_STORE_DEADLINE_S:g} s")


async def _record(
    wanted: RunRecording,
    broker: Broker,
    outcome: RecordingOutcome,
    stop: anyio.Event,
    ended: anyio.Event,
    scope: anyio.CancelScope,
) -> None:
    async def keep_figures(recorder: Recorder) -> None:
        outcome.figures = recorder.figures

    with scope:
        try:
            await record_run(
                broker,
                wanted.path,
                RecorderSettings(weights=wanted.weights),
                rules=wanted.rules,
                rotate_bytes=DEFAULT_ROTATE_BYTES,
                stop=stop,
                on_started=keep_figures,
            )
        except* (BrokerError, SchemaError, OSError) as group:
            _tell(outcome, str(_first(group)))
    ended.set()


def _tell(outcome: RecordingOutcome, failure: str) -> None:
    outcome.failure = failure
    log.error(
        "the run is no longer recorded; `headrace record` goes on with the file",
        file=outcome.path,
        sequence=outcome.figures.last_sequence,
        reason=failure,
    )


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error: Exception | BaseExceptionGroup[Exception] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
