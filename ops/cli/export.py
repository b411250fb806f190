"""`headrace export SOURCE FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
from cyclopts import Parameter

from ops.cli.failing import plain_errors
from ops.cli.incomplete import tell_soundness
from ops.cli.output import console, write_json
from ops.logtools.export import TABLES, export_tables
from ops.logtools.soundness import Soundness, soundness
from ops.logtools.sources import open_source


def export(
    source: str,
    folder: Path,
    /,
    *,
    table: Annotated[list[str] | None, Parameter(negative=())] = None,
    url: str | None = None,
    json: bool = False,
) -> int:
    """Write a recording or a run's log as Parquet tables: episodes, interactions, rows, steps.

    What can be read is written. Exit code 3 when something was damaged or missing; stderr says what.

    Examples:
        headrace export q.hrrec tables
        headrace export runs/quickstart tables --table episodes --table steps
        duckdb -c "select stream, harness, avg(reward) from 'tables/episodes.parquet' group by all"

    Parameters
    ----------
    source
        A recording, a run's folder or name; with --url a run's id.
    folder
        Where the files go.
    table
        Only these tables. May be repeated.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: lines by table, and `damages`, `gaps` and `problems`.
    """
    problems: list[str] = []

    async def work() -> tuple[dict[str, int], Soundness]:
        async with open_source(source, url=url) as opened:
            return await export_tables(opened, folder, table or TABLES, problems=problems), soundness(opened)

    with plain_errors(OSError):
        counts, sound = anyio.run(work)
    if json:
        write_json({**counts, "damages": sound.damages, "gaps": sound.gaps, "problems": problems})
    else:
        for name, lines in counts.items():
            console().print(f"{folder / name}.parquet  {lines:,} lines")
    return tell_soundness(sound, problems)
