"""`headrace run CONFIG`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from ops.cli.failing import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, plain_errors
from ops.config import RunConfig, load_config
from ops.running.progress import Progress
from ops.running.recording import RecordingOutcome, RunRecording
from ops.running.run import RunFailedError, RunOutcome
from ops.running.run import run as run_run
from ops.running.screen import draw, print_summary
from pipeline.logs import set_up_logs


def run(
    config: str,
    /,
    *,
    steps: int | None = None,
    from_run: str | None = None,
    no_training: Annotated[bool, Parameter(negative=())] = False,
    post_exit: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    record: Path | None = None,
    redact: Annotated[list[str] | None, Parameter(negative=())] = None,
    json: bool = False,
    quiet: bool = False,
    log_level: str = "WARNING",
) -> int:
    """Train a policy through all stages on this machine. The same command resumes a run.

    Examples:
        headrace run examples/quickstart.toml
        headrace run examples/quickstart.toml --steps 3 --json --set run.dir=runs/try
        headrace run examples/quickstart.toml --record quickstart.hrrec
        headrace run other-loss.toml --from-run runs/quickstart

    Parameters
    ----------
    config
        A config file (TOML).
    steps
        Trained steps after which the run ends; short for --set run.steps=N.
    from_run
        Train from the trajectories of this run (its folder, or its id on the same broker), which is only read; short for
        --set run.from_run=RUN.
    no_training
        Roll out, score and audit only: one epoch unless run.epochs or run.steps say otherwise; short for
        --set run.rollout_only=true.
    post_exit
        Shell command to run when everything has ended, however (LOG_DIR names the logs' folder, 600 s); short for
        --set run.post_exit=….
    set_
        Override one setting, a.b=value; may be repeated.
    record
        Record the whole run into this file, as `headrace record` does; a resumed run goes on with it. A recording that
        fails does not end the run: it is told at once, and the exit code is 1.
    redact
        With --record: what must not be written, TOPIC.FIELD=drop, =mask or =hash, or `secrets`. May be repeated.
    json
        Make the last line on stdout one JSON object; progress and logs go to stderr.
    quiet
        No live progress.
    log_level
        DEBUG, INFO, WARNING or ERROR.
    """
    set_up_logs(process="run", level=log_level)
    overrides = [*(set_ or []), *([] if steps is None else [f"run.steps={steps}"])]
    if no_training:
        overrides.append("run.rollout_only=true")
    if from_run is not None:
        overrides.append(f"run.from_run={msgspec.json.encode(from_run).decode()}")
    if post_exit is not None:
        overrides.append(f"run.post_exit={msgspec.json.encode(post_exit).decode()}")
    console = Console(stderr=True)
    if redact and record is None:
        sys.stderr.write("headrace run: --redact belongs to --record FILE\n")
        return EXIT_USAGE
    recording = None if record is None else RunRecording(path=str(record), rules=tuple(redact or ()))
    with plain_errors(RunFailedError, OSError):
        loaded = load_config(config, overrides)
        outcome = _run(loaded, recording, console if console.is_terminal and not quiet else None)
    print_summary(outcome.account, console, folder=loaded.run.dir, interrupted=outcome.interrupted)
    if json:
        sys.stdout.write(msgspec.json.encode(outcome.account).decode() + "\n")
        sys.stdout.flush()
    if outcome.recording is not None:
        _print_recording(outcome.recording, console)
        if outcome.recording.failure:
            return EXIT_FAILED
    return EXIT_INTERRUPTED if outcome.interrupted else 0


def _run(loaded: RunConfig, recording: RunRecording | None, screen: Console | None) -> RunOutcome:
    with nullcontext() if screen is None else Live(console=screen, auto_refresh=False, screen=True) as live:

        def show(progress: Progress) -> None:
            if live is not None and screen is not None:
                live.update(draw(progress, width=screen.width), refresh=True)

        async def work() -> RunOutcome:
            return await run_run(loaded, on_progress=None if live is None else show, recording=recording)

        return anyio.run(work, backend_options={"use_uvloop": True})


def _print_recording(recording: RecordingOutcome, console: Console) -> None:
    figures = recording.figures
    console.print(
        f"recorded {figures.messages:,} messages up to sequence {figures.last_sequence:,}, {figures.payloads:,} payloads: "
        f"{recording.path}",
        highlight=False,
        soft_wrap=True,
    )
    if recording.failure:
        console.print(
            f"[bold red]not all of the run is recorded:[/] {escape(recording.failure)}\n"
            f"`headrace record RUN -o {recording.path}` goes on with the file",
            highlight=False,
            soft_wrap=True,
        )
