"""Which run is meant, and a connection to its log."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.api import Broker
from broker.connect import connect
from broker.settings import ConnectSettings
from ops.run_folder import Endpoints, RunFolder, RunFolderError


def find_run(target: str | None) -> RunFolder:
    """The folder that a person means: a run folder's path, a run's name below ./runs, or, with None, the newest there.

    Raises:
        RunFolderError: there is no such run.
    """
    if target is not None:
        for path in (Path(target), Path("runs") / target):
            if (path / "endpoints.json").is_file():
                return RunFolder(path)
        raise RunFolderError(f"{target}: expected the folder of a run that was started, or its name below ./runs")
    candidates = sorted(Path("runs").glob("*/endpoints.json"), key=lambda path: path.stat().st_mtime)
    if not candidates:
        raise RunFolderError("no run below ./runs: name a run's folder, or give --url and --run")
    return RunFolder(candidates[-1].parent)


@asynccontextmanager
async def open_run(
    target: str | None = None, *, url: str | None = None, name: str = "headrace"
) -> AsyncGenerator[Broker]:
    """Connect to a run: by its folder, or by a broker's URL and the run's id as `target`.

    Raises:
        RunFolderError: there is no such run.
        NotConnectedError: its broker does not answer.
    """
    if url is not None:
        if target is None:
            raise RunFolderError("--url needs the run's id beside it")
        endpoints = Endpoints(run=target, broker_url=url)
    else:
        endpoints = find_run(target).read_endpoints()
    async with connect_to(endpoints, name=name) as broker:
        yield broker


@asynccontextmanager
async def connect_to(endpoints: Endpoints, *, name: str) -> AsyncGenerator[Broker]:
    """A connection to the run's broker."""
    settings = ConnectSettings(name=name, token_file=endpoints.broker_token_file)
    async with connect(endpoints.broker_url, endpoints.run, settings) as broker:
        yield broker
