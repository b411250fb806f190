"""`headrace run CONFIG`."""

from __future__ import annotations

import sys
from typing import Annotated

import anyio
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.live import Live

from ops.cli.failing import EXIT_INTERRUPTED, plain_errors
from ops.config import RunConfig, load_config
from ops.running.progress import Progress
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
    no_training: bool = False,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    json: bool = False,
    quiet: bool = False,
    log_level: str = "WARNING",
) -> int:
    """Train a policy through all stages on this machine. The same command resumes a run.

    Examples:
        headrace run examples/quickstart.toml
        headrace run examples/quickstart.toml --steps 3 --json --set run.dir=runs/try
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
    set_
        Override one setting, a.b=value; may be repeated.
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
    console = Console(stderr=True)
    with plain_errors(RunFailedError):
        loaded = load_config(config, overrides)
        live = console.is_terminal and not quiet
        outcome = _watched(loaded, console) if live else anyio.run(run_run, loaded, backend_options=_UVLOOP)
    print_summary(outcome.account, console, folder=loaded.run.dir, interrupted=outcome.interrupted)
    if json:
        sys.stdout.write(msgspec.json.encode(outcome.account).decode() + "\n")
        sys.stdout.flush()
    return EXIT_INTERRUPTED if outcome.interrupted else 0


_UVLOOP = {"use_uvloop": True}


def _watched(loaded: RunConfig, console: Console) -> RunOutcome:
    with Live(console=console, auto_refresh=False, screen=True) as live:

        def show(progress: Progress) -> None:
            live.update(draw(progress, width=console.width), refresh=True)

        async def watched() -> RunOutcome:
            return await run_run(loaded, on_progress=show)

        return anyio.run(watched, backend_options=_UVLOOP)
