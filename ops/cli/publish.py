"""`headrace publish prompts SOURCE`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import anyio
import cyclopts
import msgspec
import xxhash
from cyclopts import Parameter

from ops.cli.failing import EXIT_INTERRUPTED, plain_errors
from ops.cli.output import console, progress_bar, write_json
from ops.connection import open_run
from ops.logtools.closing import CloseFigures, close_stream
from ops.logtools.dataset_folders import folder_files
from ops.logtools.prompt_streams import check_prompt_stream
from ops.logtools.prompts import Prompt, RowError, check_row, read_rows
from ops.logtools.publish import PublishFigures, Publishing, PublishSettings
from ops.stopping import until_stopped
from schemas.errors import ConfigError

app = cyclopts.App(name="publish", help="Put prompts on a run's log.")

_ERRORS_SHOWN = 20


@app.command
def prompts(
    source: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    stream: str,
    run: str | None = None,
    tag: Annotated[list[str] | None, Parameter(negative=())] = None,
    rate: float = 0.0,
    list_stream: bool = False,
    weight: float = 1.0,
    split: str = "",
    unknown_stream: Annotated[bool, Parameter(negative=())] = False,
    dry_run: bool = False,
    url: str | None = None,
    quiet: bool = False,
    json: bool = False,
) -> int:
    """Publish the rows of a file, a dataset, stdin or a generator as prompts of a stream. Publishing them twice is harmless.

    A row is a string, or an object with `prompt` (a string, chat messages, or an object for the stream's runner) or
    `messages`, and optional `id` (or `data_id`) and `tags`. Other fields are left out, and stderr names them. All rows of a
    file are checked before the first is published. An interrupted command goes on where it was.

    A stream that is closed, or that the run's config does not have or fills itself, is refused.

    Examples:
        headrace publish prompts train.jsonl --stream math
        headrace publish prompts train.parquet --stream math --list-stream --weight 2
        headrace publish prompts - --stream math --rate 50 < more.jsonl
        headrace publish prompts mytasks.words:rows --stream words --dry-run

    Parameters
    ----------
    source
        A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a folder of such files, as `datasets` or a hub saves them, `-` for stdin, or package.module:generator.
    stream
        The stream they belong to.
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    tag
        Added to each row. May be repeated.
    rate
        Rows a second; 0 = as fast as the broker takes them.
    list_stream
        Then list the stream with exactly these rows: it can be sampled from, and takes no more.
    weight
        Sampling weight of a stream that is listed.
    split
        Of a folder with several splits (train-*.parquet, test.jsonl, a saved DatasetDict): the one to publish; `train` when
        left out.
    unknown_stream
        Publish also into a stream that the run's config does not have.
    dry_run
        Only check the rows.
    url
        Broker of a run whose folder is elsewhere.
    quiet
        No progress.
    json
        One JSON object at the end.
    """
    with plain_errors(OSError):
        if weight <= 0 or rate < 0:
            raise ConfigError(f"expected --weight > 0 and --rate >= 0, found {weight} and {rate}")
        path = Path(source).expanduser()
        in_files = path.exists()
        left_out = Counter[str]()
        total = _check_all(source, split, left_out) if in_files or dry_run else None
        if dry_run:
            _tell_left_out(left_out)
            shown = {"rows": total, "left_out": left_out}
            write_json(shown) if json else console().print(f"{total:,} rows are fine; nothing was published")
            return 0
        settings = PublishSettings(
            stream=stream, tags=tuple(tag or ()), per_second=rate, list_stream=list_stream, weight=weight
        )
        identity = _identity(path, settings, split) if in_files else ""
        left_out.clear()
        rows = _checked(source, split, left_out)
        figures, stopped = anyio.run(_publish, rows, settings, identity, total, run, url, quiet or json, unknown_stream)
        figures.left_out = dict(left_out)
    _tell_left_out(left_out)
    if json:
        write_json(figures)
    else:
        console().print(
            f"{figures.published:,} published, {figures.standing + figures.skipped:,} stood already"
            + (f", stream {stream} is listed" if figures.listed else "")
            + (", interrupted: the same command goes on" if stopped else "")
        )
    return EXIT_INTERRUPTED if stopped else 0


@app.command
def close(
    stream: str, /, *, run: str | None = None, weight: float = 1.0, url: str | None = None, json: bool = False
) -> int:
    """Close a stream: what any client published into it so far, in the order of the log, is what sampling draws from.

    Examples:
        headrace publish close math
        headrace publish close math --run runs/mine --weight 2

    Parameters
    ----------
    stream
        The stream.
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    weight
        Its sampling weight.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object.
    """

    async def work() -> CloseFigures:
        async with open_run(run, url=url, name="publish") as broker:
            return await close_stream(broker, stream, weight=weight)

    with plain_errors():
        if weight <= 0:
            raise ConfigError(f"expected --weight > 0, found {weight}")
        figures = anyio.run(work)
    if json:
        write_json(figures)
    else:
        left = f", {figures.undecodable:,} messages that are no prompts left out" if figures.undecodable else ""
        again = " (it was already)" if figures.stood_already else ""
        console().print(f"stream {stream} is closed with {figures.rows:,} rows{left}{again}")
    return 0


def _checked(source: str, split: str, left_out: Counter[str]) -> Iterator[Prompt]:
    for row in read_rows(source, split=split):
        prompt = check_row(row)
        left_out.update(prompt.left_out)
        yield prompt


def _tell_left_out(left_out: Counter[str]) -> None:
    """Say once what of the rows is not published."""
    if left_out:
        fields = ", ".join(f"{name} ({rows:,} row{'s' * (rows != 1)})" for name, rows in sorted(left_out.items()))
        sys.stderr.write(
            f"headrace: left out, as a prompt has no such fields: {fields}; what the stream's runner needs stands inside prompt\n"
        )


def _check_all(source: str, split: str, left_out: Counter[str]) -> int:
    """The number of rows, all of them fine.

    Raises:
        RowError: the first rows that are not, each with its line.
    """
    errors: list[str] = []
    places: dict[str, tuple[str, bytes]] = {}
    rows = 0
    for row in read_rows(source, split=split):
        rows += 1
        try:
            prompt = check_row(row)
        except RowError as error:
            errors.append(str(error))
            if len(errors) == _ERRORS_SHOWN:
                errors.append(f"… and perhaps more; the first {_ERRORS_SHOWN} are shown")
                break
            continue
        left_out.update(prompt.left_out)
        content = xxhash.xxh3_64_digest(prompt.prompt)
        place, former = places.setdefault(prompt.data_id, (prompt.place, content))
        if former != content:
            errors.append(
                f"{prompt.place}: another prompt has the id {prompt.data_id!r} in {place}: ids must be unique"
            )
    if errors:
        raise RowError("\n".join(errors))
    if not rows:
        raise ConfigError(f"{source}: expected at least one row, found none")
    return rows


def _identity(path: Path, settings: PublishSettings, split: str) -> str:
    """One id for the content of a file or folder and for how it is published."""
    hasher = xxhash.xxh3_64(msgspec.msgpack.encode((settings.stream, settings.tags)))
    files = [path] if path.is_file() else folder_files(path, split)
    for name in files:
        with name.open("rb") as file:
            while chunk := file.read(1 << 20):
                hasher.update(chunk)
    return hasher.hexdigest()


async def _publish(
    rows: Iterator[Prompt],
    settings: PublishSettings,
    identity: str,
    total: int | None,
    run: str | None,
    url: str | None,
    quiet: bool,
    unknown_stream: bool,
) -> tuple[PublishFigures, bool]:
    stopped = False
    async with open_run(run, url=url, name="publish") as broker:
        await check_prompt_stream(broker, settings.stream, lists=settings.list_stream, allow_unknown=unknown_stream)
        publishing = Publishing(broker, settings, source=identity)
        with progress_bar(quiet=quiet) as bar:
            task = bar.add_task("publishing", total=total, detail="")
            async with anyio.create_task_group() as tasks:

                def stop() -> None:
                    nonlocal stopped
                    stopped = True
                    tasks.cancel_scope.cancel()

                async with until_stopped(stop):
                    await publishing.run(rows, on_row=lambda: bar.advance(task))
        if stopped:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5.0):
                await publishing.save_position()
    sys.stderr.flush()
    return publishing.figures, stopped
