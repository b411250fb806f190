"""What the log's commands print with: JSON lines on stdout, progress on stderr, nothing else in either's way."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ops.cli.pipes import forget_stdout
from ops.stopping import until_stopped


def write_json(value: object) -> None:
    """One JSON value on a line of stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


class _Stdout(Console):
    """Says that nobody reads any more by the error that any other writer gets."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Stdout for people: as wide as the terminal."""
    return _Stdout(highlight=False)


def progress_bar(*, quiet: bool) -> Progress:
    """A bar on stderr; nothing where stderr is no terminal."""
    screen = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=screen,
        disable=quiet or not screen.is_terminal,
        transient=True,
    )


def run_until_interrupt(work: Callable[[], Awaitable[None]]) -> bool:
    """Run `work` to its end or to Ctrl-C or a closed pipe; whether it was ended from outside."""
    interrupted = False

    async def whole() -> None:
        nonlocal interrupted
        async with anyio.create_task_group() as tasks:

            def stop() -> None:
                nonlocal interrupted
                interrupted = True
                tasks.cancel_scope.cancel()

            async with until_stopped(stop):
                await work()

    try:
        anyio.run(whole)
    except* BrokenPipeError:
        interrupted = True
        forget_stdout()
    return interrupted
