"""`headrace engine ps | register | deregister | logs`."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Final, Literal

import anyio
import cyclopts
from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from ops.cli.failing import plain_errors
from ops.cli.output import console, run_until_interrupt, write_json
from ops.connection import find_run, look_at_run
from ops.engines.listening import STYLES, heard_engines
from ops.engines.registry import EngineRequest, ask_registry
from ops.logtools.plain import duration
from schemas.errors import ConfigError
from schemas.messages.engines import EngineAnnouncement, EngineState

app = cyclopts.App(name="engine", help="Inference servers: list, add, remove, read their logs.")

_POLL_S: Final = 0.3
RunName = Annotated[str | None, Parameter(name=["--run", "-r"])]


@app.command
def ps(run: str | None = None, /, *, url: str | None = None, json: bool = False) -> int:
    """Show each engine: state, version, load, where it answers.

    Examples:
        headrace engine ps
        headrace engine ps runs/quickstart --json

    Parameters
    ----------
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON list of announcements.
    """

    async def look() -> list[EngineAnnouncement]:
        async with look_at_run(run, url=url, name="engine-ps") as opened:
            return await heard_engines(opened.broker) if opened.is_running else []

    with plain_errors():
        found = anyio.run(look)
    if json:
        write_json(found)
        return 0
    if not found:
        console().print("no engine says anything: is the run running, with engine.kind vllm or sglang?", style="yellow")
        return 0
    console().print(engine_table(found, time.time()))
    return 0


def engine_table(engines: list[EngineAnnouncement], now_s: float) -> Table:
    """One line an engine."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("engine", "kind", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("version", "running", "queued", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("since", no_wrap=True)
    table.add_column("url, or why not serving", overflow="fold")
    for one in engines:
        serving = one.state is EngineState.SERVING
        table.add_row(
            one.name,
            one.kind + (" (attached)" if one.attached else ""),
            Text(one.state.value, style=STYLES[one.state]),
            str(one.version),
            f"{one.running}/{one.capacity}",
            str(one.waiting),
            str(one.num_restarts),
            duration(max(0.0, now_s - one.since_unix_s)),
            Text(one.url if serving else one.reason or one.url),
        )
    return table


@app.command
def register(
    server: str,
    /,
    *,
    run: RunName = None,
    name: str = "",
    kind: Literal["", "vllm", "sglang"] = "",
    url: str | None = None,
    json: bool = False,
) -> int:
    """Add a server that runs already. It gets the current weights first, then requests; the run keeps it over restarts.

    Weights are loaded from a folder that the server must see under the same path as this machine does.

    Examples:
        headrace engine register http://127.0.0.1:8000
        headrace engine register http://gpu-7:30000 --kind sglang --name gpu-7 --run runs/quickstart

    Parameters
    ----------
    server
        Its address.
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    name
        How it is called in the run; made of its address when left out.
    kind
        vllm or sglang; the run's when left out.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: its name.
    """
    added = _ask(EngineRequest(action="register", name=name, kind=kind, url=server), run, url)
    if json:
        write_json({"name": added})
    else:
        console().print(f"{added} is added; `headrace engine ps` shows when it serves")
    return 0


@app.command
def deregister(name: str, /, *, run: RunName = None, url: str | None = None, json: bool = False) -> int:
    """Take a server out that was registered. What it is sampling goes on elsewhere; the server itself runs on.

    Examples:
        headrace engine deregister gpu-7

    Parameters
    ----------
    name
        Its name, as `headrace engine ps` shows it.
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: its name.
    """
    removed = _ask(EngineRequest(action="deregister", name=name), run, url)
    if json:
        write_json({"name": removed})
    else:
        console().print(f"{removed} is removed")
    return 0


@app.command
def logs(
    name: str,
    /,
    *,
    run: RunName = None,
    worker: bool = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"])] = 40,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"])] = False,
) -> int:
    """Print the end of what an engine's server wrote.

    Examples:
        headrace engine logs engine-0
        headrace engine logs engine-0 --worker -f

    Parameters
    ----------
    name
        Its name, as `headrace engine ps` shows it.
    run
        A run's folder or name; the newest below ./runs when left out.
    worker
        The worker that looks after it, instead of the server.
    lines
        How many, from the end.
    follow
        Go on as more comes, until Ctrl-C.
    """
    with plain_errors():
        path = _log_file(find_run(run).logs, name, worker=worker)
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in deque(file, maxlen=max(lines, 0)):
                sys.stdout.write(line)
            sys.stdout.flush()
            if follow:

                async def more() -> None:
                    while True:
                        text = file.read()
                        sys.stdout.write(text)
                        sys.stdout.flush()
                        await anyio.sleep(_POLL_S)

                run_until_interrupt(more)
    return 0


def _log_file(folder: Path, name: str, *, worker: bool) -> Path:
    """Raises:
    ConfigError: the engine has no such log.
    """
    path = folder / (f"{name}.log" if worker else f"{name}.server.log")
    if path.is_file() and path.parent == folder:
        return path
    known = sorted(found.name.removesuffix(".server.log") for found in folder.glob("*.server.log"))
    if not worker and (folder / f"{name}.log").is_file():
        raise ConfigError(
            f"{name}: its server was not started by this run, and writes elsewhere; --worker shows who looks after it"
        )
    raise ConfigError(f"{name}: no log at {path}; servers with a log here: {', '.join(known) or 'none'}")


def _ask(request: EngineRequest, run: str | None, url: str | None) -> str:
    async def work() -> str:
        async with look_at_run(run, url=url, name="engine") as opened:
            if not opened.is_running:
                raise ConfigError(f"run {opened.broker.run} is not running: set engine.urls in its config instead")
            return await ask_registry(opened.broker, request)

    with plain_errors():
        return anyio.run(work)
