"""`headrace audit export`."""

from __future__ import annotations

from pathlib import Path

import anyio
import cyclopts

from ops.audit import audit_records
from ops.audit_files import AuditFileError, write_audit
from ops.cli.failing import plain_errors
from ops.cli.incomplete import tell_soundness
from ops.cli.output import console, write_json
from ops.logtools.soundness import Soundness, soundness
from ops.logtools.sources import open_source

app = cyclopts.App(name="audit", help="One record per episode, kept or rejected.")


@app.command
def export(source: str, folder: Path, /, *, url: str | None = None, json: bool = False) -> int:
    """Write a run's episodes as JSON lines that only their owner can read: FOLDER/RUN.jsonl (folder 0700, file 0600).

    Exit code 3 when the recording is damaged or messages are missing in it: what can be read is written.

    Examples:
        headrace audit export runs/quickstart audit

    Parameters
    ----------
    source
        A recording, a run's folder or name; with --url a run's id.
    folder
        Where the file goes. A symbolic link is refused.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: file, records, damages, gaps.
    """

    async def work() -> tuple[str, int, Soundness]:
        async with open_source(source, url=url) as opened:
            records = [record async for record in audit_records(opened)]
            name = f"{opened.run}.jsonl"
            return name, write_audit(folder, name, records), soundness(opened)

    with plain_errors(AuditFileError):
        name, written, sound = anyio.run(work)
    if json:
        write_json({"file": str(folder / name), "records": written, "damages": sound.damages, "gaps": sound.gaps})
    else:
        console().print(f"{folder / name}  {written:,} records")
    return tell_soundness(sound)
