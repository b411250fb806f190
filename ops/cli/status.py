"""`headrace status`."""

from __future__ import annotations

import sys
import time
from itertools import groupby

import anyio
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ops.cli.engine import engine_table
from ops.cli.failing import plain_errors
from ops.connection import look_at_run
from ops.engines.listening import load_line
from ops.logtools.plain import duration
from ops.status import RunStatus, run_status
from ops.troubles import ADVICE
from ops.wiring import STAGES


def status(run: str | None = None, /, *, url: str | None = None, json: bool = False) -> int:
    """What each stage of a run does, or waits for and since when.

    Examples:
        headrace status
        headrace status runs/quickstart --json

    Parameters
    ----------
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object.
    """

    async def look() -> RunStatus:
        async with look_at_run(run, url=url, name="status") as opened:
            if opened.is_running:
                return await run_status(opened.broker, STAGES)
            found = await run_status(opened.broker, STAGES, listen_s=0)
            return msgspec.structs.replace(found, is_running=False)

    with plain_errors():
        found = anyio.run(look)
    if json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        _print(found, Console())
    return 0


def _print(found: RunStatus, console: Console) -> None:
    log = found.log
    console.print(
        f"[bold]run {found.run}[/]   log {log.num_messages:,} messages, {log.size_bytes / 1e6:,.1f} MB"
        f"   payloads {log.payload_bytes / 1e6:,.1f} MB   {log.connected_url}"
    )
    if not found.is_running:
        console.print(
            "not running; this is what its log holds; the command that started it goes on with it", style="yellow"
        )
    if found.asked.word:
        why = f" ({found.asked.reason})" if found.asked.reason else ""
        told = f"{found.asked.word} for {duration(found.unix_time_s - found.asked.since_unix_s)}{why}: `headrace resume` goes on"
        console.print(Text(told, style="bold yellow"))
    engines = load_line(found.engines)
    nodes = ", ".join(f"{line.node} {line.presence}" for line in found.nodes)
    for line in (found.pacing, f"engines {engines}" if engines else "", f"nodes {nodes}" if nodes else ""):
        if line:
            console.print(Text(line))
    for kind, troubles in groupby(found.troubles, key=lambda trouble: trouble.kind):
        for trouble in troubles:
            console.print(Text(str(trouble), style="bold red"))
        console.print(Text(f"  → {ADVICE[kind]}", style="dim"))
    listed = found.stages if found.is_running else [stage for stage in found.stages if stage.pending or stage.in_hand]
    if not listed:
        console.print("nothing waits before any stage; `headrace report` tells what was done", style="dim")
        return
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("stage", no_wrap=True)
    for name in ("workers", "in", "out", "pending", "in hand", "dead"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("waits for", ratio=1)
    now = time.time()
    for stage in listed:
        received = sum(report.received for report in stage.workers)
        published = sum(report.published for report in stage.workers)
        dead = sum(report.dead for report in stage.workers)
        waits = Text("no worker says anything", style="bold red") if found.is_running else Text("")
        if stage.workers:
            waits = Text("\n").join(
                Text(
                    f"{report.waiting_for}, for {now - report.waiting_since_unix_s:.0f} s"
                    if report.waiting_for
                    else "working",
                    style="" if report.waiting_for else "green",
                )
                for report in stage.workers
            )
        table.add_row(
            stage.stage,
            str(len(stage.workers)),
            *(f"{number:,}" for number in (received, published, stage.pending, stage.in_hand, dead)),
            waits,
        )
    console.print(table)
    if found.engines:
        console.print(engine_table(found.engines, now))
