"""`headrace record` and `headrace run --record`: follow a run into a file."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import structlog

from broker.api import Broker
from broker.recording import (
    Recorder,
    RecorderFigures,
    RecorderSettings,
    RecordingWriter,
    check_log,
    new_header,
    parse_rule,
)
from pipeline.holds import held

log = structlog.get_logger("headrace.record")

DEFAULT_ROTATE_BYTES: Final = 4 * 1024**3


async def record_run(
    broker: Broker,
    path: str | Path,
    settings: RecorderSettings | None = None,
    *,
    rules: Sequence[str] = (),
    rotate_bytes: int = DEFAULT_ROTATE_BYTES,
    follow: bool = True,
    stop: anyio.Event | None = None,
    on_started: Callable[[Recorder], Coroutine[None, None, None]] | None = None,
) -> RecorderFigures:
    """Record a run's log with its payloads; a file that stands at `path` is gone on with. What is not yet in the file is held on
    the log meanwhile.

    Args:
        rules: redaction rules, see broker.recording.redaction.
        follow: go on until `stop` is set; else end at the log's present end.
        stop: when set, what stands then is still recorded before this returns.
        on_started: called beside the recording and cancelled at its end (progress).

    Raises:
        ConfigError: a rule that can't be used.
        RecordingError: `path` can't be appended to: it holds another run, or another log of this run's id.
        BrokerError: the broker is away.
    """
    parsed = [parse_rule(rule) for rule in rules]
    settings = settings or RecorderSettings()
    await check_log(broker, Path(path))
    writer = await anyio.to_thread.run_sync(
        lambda: open_recording(path, broker.run, rules=rules, weights=settings.weights, rotate_bytes=rotate_bytes)
    )
    try:
        first = writer.last_sequence + 1
        async with held(broker, f"recorder.{Path(path).name}", sequence=first, what=_what(path), own=False) as hold:
            if hold.purged_below > first:
                log.warning("messages were purged before they could be recorded", first=first, below=hold.purged_below)

            async def move(last_sequence: int) -> None:
                hold.move(last_sequence + 1)

            recorder = Recorder(broker, writer, settings, rules=parsed, on_written=move)
            async with anyio.create_task_group() as tasks:
                if stop is not None:
                    tasks.start_soon(_stop_when, stop, recorder)
                if on_started is not None:
                    tasks.start_soon(on_started, recorder)
                await recorder.run(follow=follow)
                tasks.cancel_scope.cancel()
    finally:
        writer.close()
    return recorder.figures


def open_recording(
    path: str | Path, run: str, *, rules: Sequence[str], weights: str, rotate_bytes: int = DEFAULT_ROTATE_BYTES
) -> RecordingWriter:
    """A run's recording: begun, or gone on with where one stands.

    Raises:
        RecordingError: the file is no recording, of another run, or of a newer version.
        OSError: it can't be written.
    """
    header = new_header(run, headrace_version=_installed_version(), redactions=list(rules), weights=weights)
    return RecordingWriter.open(Path(path), header, rotate_bytes=rotate_bytes)


def _what(path: str | Path) -> str:
    return f"recorder of {Path(path).name} on {socket.gethostname()}"


async def _stop_when(stop: anyio.Event, recorder: Recorder) -> None:
    await stop.wait()
    recorder.stop()


def _installed_version() -> str:
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "unknown"
