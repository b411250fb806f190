"""`headrace dead list | show | retry | drop`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import cyclopts
import msgspec
from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from ops.cli.failing import EXIT_USAGE, plain_errors
from ops.cli.incomplete import tell_soundness
from ops.cli.output import console, write_json
from ops.connection import open_run
from ops.logtools.dead import Letter, LetterState, content, find_letter, letters
from ops.logtools.dead import drop as drop_letter
from ops.logtools.dead import retry as retry_letter
from ops.logtools.plain import Plain, size
from ops.logtools.soundness import Soundness, soundness
from ops.logtools.sources import LiveSource, open_source
from schemas.errors import ConfigError
from schemas.messages.sampling import DeadDropped, DeadRetry
from schemas.topics import topic_named

app = cyclopts.App(name="dead", help="Messages that a stage gave up: list, show, retry, drop.")

_NARROW = 120


@app.command(name="list")
def list_letters(
    source: Annotated[str | None, Parameter(name=["--in", "-i"])] = None,
    *,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    url: str | None = None,
    json: bool = False,
) -> int:
    """List the dead letters that need somebody. Exit code 3 when the recording is damaged or messages are missing in it.

    Examples:
        headrace dead list
        headrace dead list --in q.hrrec --all --json

    Parameters
    ----------
    source
        A recording, or a run's folder or name; the newest run below ./runs when left out. With --url, the run's id.
    all_
        Also those that were dropped or dealt with.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: `letters`, and `damages` and `gaps` of the recording.
    """

    async def work() -> tuple[list[Letter], Soundness]:
        async with open_source(source, url=url) as opened:
            return await letters(opened, everything=all_), soundness(opened)

    with plain_errors():
        found, sound = anyio.run(work)
    if json:
        write_json({"letters": [_listed(letter) for letter in found], "damages": sound.damages, "gaps": sound.gaps})
    else:
        _print_letters(found)
    return tell_soundness(sound)


def _print_letters(found: list[Letter]) -> None:
    screen = console()
    if not found:
        screen.print("no dead letters")
        return
    if screen.width < _NARROW:
        for letter in found:
            head = Text.assemble((letter.id, "bold"), f"  {letter.state.value}  {letter.topic} {'.'.join(letter.key)}")
            screen.print(head, f"  {letter.error}", sep="\n", no_wrap=True, overflow="ellipsis", markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("id", "state", "message", "reason"):
        table.add_column(name, no_wrap=True)
    table.add_column("attempts", justify="right")
    table.add_column("error", overflow="ellipsis", no_wrap=True)
    for letter in found:
        message = f"{letter.topic} {'.'.join(letter.key)}"
        table.add_row(letter.id, letter.state.value, message, letter.reason, str(letter.attempts), Text(letter.error))
    screen.print(table)


def _listed(letter: Letter) -> dict[str, object]:
    shown = msgspec.structs.asdict(letter)
    del shown["letter"]
    return shown


@app.command
def show(
    letter: str,
    /,
    *,
    source: Annotated[str | None, Parameter(name=["--in", "-i"])] = None,
    url: str | None = None,
    json: bool = False,
) -> int:
    """Show one letter with its message.

    Examples:
        headrace dead show map_rewards:4711

    Parameters
    ----------
    letter
        Its id, STAGE:SEQUENCE, as the list shows it.
    source
        A recording, or a run's folder or name; the newest run below ./runs when left out. With --url, the run's id.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: the letter, and `damages` and `gaps` of the recording.
    """

    async def work() -> tuple[dict[str, Plain], Soundness]:
        async with open_source(source, url=url) as opened:
            return content(await find_letter(opened, letter)), soundness(opened)

    with plain_errors():
        found, sound = anyio.run(work)
    if json:
        write_json({**found, "damages": sound.damages, "gaps": sound.gaps})
    else:
        _print_letter(found)
    return tell_soundness(sound)


def _print_letter(found: dict[str, Plain]) -> None:
    screen = console()
    screen.print(Text.assemble((str(found["id"]), "bold"), f"  {found['state']}, {found['time']}"))
    screen.print(f"{found['subject']}", markup=False)
    screen.print(f"{found['reason']} after {found['attempts']} attempts: {found['error']}", markup=False, style="red")
    if found["undecodable"]:
        screen.print(f"its message can't be decoded: {found['undecodable']}", markup=False)
        raw = found["size_bytes"]
        screen.print(f"{size(raw) if isinstance(raw, int) else raw}, beginning {found['first_bytes']}", markup=False)
    else:
        screen.print_json(msgspec.json.encode(found["message"]).decode())
    screen.print(
        f"headrace dead retry {found['id']}    or    headrace dead drop {found['id']} --reason TEXT", style="dim"
    )


@app.command
def retry(
    *letter: str,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    stage: str | None = None,
    mended: Path | None = None,
    run: str | None = None,
    url: str | None = None,
    json: bool = False,
) -> int:
    """Send letters to their stages again, each as a new attempt. If it fails again, there is a new letter.

    Examples:
        headrace dead retry map_rewards:4711
        headrace dead retry --all --stage arena_launch
        headrace dead retry map_rewards:4711 --mended fixed.json

    Parameters
    ----------
    letter
        Their ids, STAGE:SEQUENCE, as the list shows them.
    all_
        All letters that nobody has retried.
    stage
        With --all: only letters of this stage.
    mended
        JSON file of the message to handle in its place.
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON value.
    """

    async def work() -> list[DeadRetry]:
        async with open_run(run, url=url, name="dead") as broker:
            source = LiveSource(broker)
            if all_:
                open_letters = [found for found in await letters(source) if found.state is LetterState.OPEN]
                chosen = [found for found in open_letters if stage in (None, found.stage)]
            else:
                chosen = [await find_letter(source, name) for name in letter]
            return [await retry_letter(broker, found, mended=_mended(found, mended)) for found in chosen]

    if bool(letter) == all_ or (mended is not None and len(letter) != 1):
        console().print("headrace dead retry: expected ids, or --all; --mended takes one id")
        return EXIT_USAGE
    with plain_errors(OSError):
        done = anyio.run(work)
    if json:
        write_json([{"id": f"{one.stage}:{one.sequence}", "attempt": one.attempt} for one in done])
    else:
        for one in done:
            console().print(f"{one.stage}:{one.sequence} is sent again, attempt {one.attempt}")
        if not done:
            console().print("no dead letters to retry")
    return 0


def _mended(letter: Letter, path: Path | None) -> bytes | None:
    if path is None:
        return None
    topic = topic_named(letter.topic)
    if topic is None:
        raise ConfigError(f"--mended: {letter.topic} is no topic of this version")
    try:
        return topic.encode(msgspec.json.decode(path.read_bytes(), type=topic.message))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--mended {path}: expected a {topic.message.__name__} as JSON: {error}") from error


@app.command
def drop(
    *letter: str,
    reason: str = "",
    run: str | None = None,
    url: str | None = None,
    json: bool = False,
) -> int:
    """Say that letters need nothing more. They stay on the log and leave the list.

    Examples:
        headrace dead drop map_rewards:4711 --reason 'test prompt'

    Parameters
    ----------
    letter
        Their ids, STAGE:SEQUENCE, as the list shows them.
    reason
        Why they need nothing more; stays on the log.
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON value.
    """

    async def work() -> list[DeadDropped]:
        async with open_run(run, url=url, name="dead") as broker:
            source = LiveSource(broker)
            chosen = [await find_letter(source, name) for name in letter]
            return [await drop_letter(broker, found, reason=reason) for found in chosen]

    if not letter:
        console().print("headrace dead drop: expected at least one id")
        return EXIT_USAGE
    with plain_errors():
        done = anyio.run(work)
    if json:
        write_json([{"id": f"{one.stage}:{one.sequence}", "reason": one.reason} for one in done])
    else:
        for one in done:
            console().print(f"{one.stage}:{one.sequence} is dropped{f': {one.reason}' if one.reason else ''}")
    return 0
