"""`headrace report SOURCE -o report.html`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import msgspec
from cyclopts import Parameter

from ops.cli.failing import plain_errors
from ops.cli.incomplete import tell_soundness
from ops.cli.output import console, write_json
from ops.logtools.soundness import Soundness, soundness
from ops.logtools.sources import LiveSource, open_source
from ops.report.figures import ReportFigures
from ops.report.gather import gather
from ops.report.page import page
from ops.status import run_status
from ops.wiring import STAGES


def report(
    source: str | None = None,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("report.html"),
    url: str | None = None,
    json: bool = False,
) -> int:
    """Write a run or a recording as one HTML file that needs no network: rewards, staleness, speed, losses, waits, drops, faults.

    Exit code 3 when the recording is damaged or messages are missing in it: what can be read is told.

    Examples:
        headrace report
        headrace report runs/quickstart -o quickstart.html
        headrace report q.hrrec --json

    Parameters
    ----------
    source
        A recording, or a run's folder or name; the newest run below ./runs when left out. With --url, the run's id.
    output
        Where the file goes.
    url
        Broker of a run whose folder is elsewhere.
    json
        The figures as one JSON object, with `damages` and `gaps`, and no file.
    """

    async def work() -> tuple[ReportFigures, Soundness]:
        async with open_source(source, url=url) as opened:
            figures = await gather(opened)
            if isinstance(opened, LiveSource) and opened.is_running:
                now = await run_status(opened.broker, STAGES)
                figures = msgspec.structs.replace(figures, troubles=now.troubles)
            sound = soundness(opened)
            return msgspec.structs.replace(figures, damages=sound.damages, gaps=sound.gaps), sound

    with plain_errors(OSError):
        figures, sound = anyio.run(work)
        if json:
            write_json(figures)
            return tell_soundness(sound)
        output.write_text(page(figures), encoding="utf-8")
    size_kib = output.stat().st_size / 1024
    console().print(f"{output}  {size_kib:,.0f} KiB: run {figures.run}, {figures.account.steps} steps", markup=False)
    return tell_soundness(sound)
