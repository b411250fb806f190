"""`headrace record RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import anyio
from cyclopts import Parameter

from broker.recording import Recorder, RecorderFigures, RecorderSettings
from ops.cli.failing import plain_errors
from ops.cli.output import console, progress_bar, write_json
from ops.connection import open_run
from ops.logtools.plain import size
from ops.logtools.record import DEFAULT_ROTATE_BYTES, record_run
from ops.stopping import until_stopped
from pipeline.logs import set_up_logs
from schemas.errors import ConfigError


def record(
    run: str | None = None,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    until_end: bool = False,
    redact: Annotated[list[str] | None, Parameter(negative=())] = None,
    rotate_bytes: int = DEFAULT_ROTATE_BYTES,
    weights: Literal["none", "first", "all"] = "first",
    url: str | None = None,
    quiet: bool = False,
    json: bool = False,
) -> int:
    """Record a run: every message of its log, and the payloads they name, in one self-describing file.

    Goes on until Ctrl-C; a file that stands there already is gone on with, also after a crash.

    Examples:
        headrace record -o quickstart.hrrec
        headrace record runs/quickstart -o q.hrrec --until-end
        headrace record runs/quickstart -o q.hrrec --redact secrets --redact interaction.recorded.tokens.messages_json=drop

    Parameters
    ----------
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    output
        The recording. Rotated parts stand beside it as NAME.0001.hrrec and so on.
    until_end
        End at the log's present end instead of following it.
    redact
        What must not be written: TOPIC.FIELD=drop, =mask or =hash, or `secrets`. May be repeated.
    rotate_bytes
        Begin a new part when one is this large.
    weights
        Weight files to keep: those of the first version, none, or all. They are large.
    url
        Broker of a run whose folder is elsewhere.
    quiet
        No progress.
    json
        One JSON object at the end.
    """
    set_up_logs(process="record", level="WARNING")
    stop = anyio.Event()

    async def work() -> RecorderFigures:
        async with open_run(run, url=url, name="record") as broker:
            bar = progress_bar(quiet=quiet)

            async def show(recorder: Recorder) -> None:
                task = bar.add_task("recording", total=None, detail="")
                while True:
                    figures = recorder.figures
                    last = (await broker.log_status()).last_sequence
                    detail = f"{figures.payloads:,} payloads, {size(figures.payload_bytes)}"
                    bar.update(task, completed=figures.last_sequence, total=last, detail=detail)
                    await anyio.sleep(0.5)

            async with until_stopped(stop.set):
                with bar:
                    return await record_run(
                        broker,
                        output,
                        RecorderSettings(weights=weights),
                        rules=redact or (),
                        rotate_bytes=rotate_bytes,
                        follow=not until_end,
                        stop=stop,
                        on_started=show,
                    )

    with plain_errors(OSError):
        if rotate_bytes < 1:
            raise ConfigError(f"--rotate-bytes: expected at least 1, found {rotate_bytes}")
        figures = anyio.run(work)
    if json:
        write_json(figures)
    else:
        missing = f", {figures.missing} payloads were gone" if figures.missing else ""
        console().print(
            f"recorded {figures.messages:,} messages up to sequence {figures.last_sequence:,}, "
            f"{figures.payloads:,} payloads{missing}: {output}"
        )
    return 0
