"""What the log's commands print with: JSON lines on stdout, progress on stderr, nothing else in either's way."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def write_json(value: object) -> None:
    """One JSON value on a line of stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def console() -> Console:
    """Stdout for people: as wide as the terminal."""
    return Console(highlight=False)


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


@asynccontextmanager
async def until_stopped(on_stop: Callable[[], None]) -> AsyncGenerator[None]:
    """Call `on_stop` at the first Ctrl-C or SIGTERM; a second one ends the program at once."""

    async def watch() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                on_stop()
                signal.signal(number, signal.SIG_DFL)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        yield
        tasks.cancel_scope.cancel()


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
        sys.stderr.close()
    return interrupted
