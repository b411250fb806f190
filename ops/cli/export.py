"""`headrace export SOURCE FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
from cyclopts import Parameter

from ops.cli.failing import plain_errors
from ops.cli.output import console, write_json
from ops.logtools.export import TABLES, export_tables
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

    Examples:
        headrace export q.hrrec tables
        headrace export runs/quickstart tables --table episodes --table steps
        duckdb -c "select stream, avg(reward) from 'tables/episodes.parquet' group by 1"

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
        One JSON object: lines by table.
    """

    async def work() -> dict[str, int]:
        async with open_source(source, url=url) as opened:
            return await export_tables(opened, folder, table or TABLES)

    with plain_errors(OSError):
        counts = anyio.run(work)
    if json:
        write_json(counts)
    else:
        for name, lines in counts.items():
            console().print(f"{folder / name}.parquet  {lines:,} lines")
    return 0
