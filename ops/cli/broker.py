"""`headrace broker apply | verify | diff | show`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

import anyio
import cyclopts
import msgspec
from cyclopts import Parameter

from broker.connect import open_admin
from broker.errors import NotConnectedError, TopologyError
from broker.jetstream import Admin
from ops.cli.failing import EXIT_FAILED, plain_errors
from ops.cli.output import console, write_json
from ops.config import RunConfig, load_config
from ops.connection import broker_login, check_port
from ops.run_folder import RunFolder, RunFolderError
from ops.topology import declared_topology

app = cyclopts.App(name="broker", help="A run's streams and durables on its broker: apply, verify, diff, show.")
Overrides = Annotated[list[str] | None, Parameter(name="--set", negative=())]


@app.command
def apply(config: str, /, *, set_: Overrides = None, update: bool = False, json: bool = False) -> int:
    """Make what a run's config declares and is missing on the broker: for an admin, before workers without that right start.

    Exit code 1 when something stands there with other settings and --update is not given; nothing of that is changed then.

    Examples:
        headrace broker apply my.toml
        headrace broker apply my.toml --set broker.max_bytes=8589934592 --update

    Parameters
    ----------
    config
        A run's TOML file.
    set_
        Override one setting, a.b=value. May be repeated.
    update
        Change what stands there with other settings, too, where the server allows it.
    json
        One JSON object: run, changes.
    """

    async def work(loaded: RunConfig) -> int:
        topology = declared_topology(loaded)
        async with _admin(loaded) as admin:
            try:
                changes = await admin.apply(topology, update=update)
            except TopologyError as error:
                _print({"run": topology.run, "applied": False, "error": str(error)}, [str(error)], json=json)
                return EXIT_FAILED
        lines = [f"{change.done:<10} {change.what}" for change in changes]
        _print({"run": topology.run, "applied": True, "changes": changes}, lines, json=json)
        return 0

    return _run(config, set_, work)


@app.command
def diff(config: str, /, *, set_: Overrides = None, json: bool = False) -> int:
    """Tell what is missing on the broker, or stands there otherwise than a run's config declares. Exit code 1 if anything is.

    Examples:
        headrace broker diff my.toml --json

    Parameters
    ----------
    config
        A run's TOML file.
    set_
        Override one setting, a.b=value. May be repeated.
    json
        One JSON object: run, differences.
    """

    async def work(loaded: RunConfig) -> int:
        topology = declared_topology(loaded)
        async with _admin(loaded) as admin:
            lines = await admin.diff(topology)
        _print({"run": topology.run, "differences": lines}, lines or ["all stands as declared"], json=json)
        return EXIT_FAILED if lines else 0

    return _run(config, set_, work)


@app.command
def verify(config: str, /, *, set_: Overrides = None, json: bool = False) -> int:
    """Say whether all stands on the broker as a run's config declares, and nothing else that reads its log. Exit code 1 if not.

    Parameters
    ----------
    config
        A run's TOML file.
    set_
        Override one setting, a.b=value. May be repeated.
    json
        One JSON object: run, verified, differences.
    """

    async def work(loaded: RunConfig) -> int:
        topology = declared_topology(loaded)
        known = {spec.name for spec in topology.durables}
        async with _admin(loaded) as admin:
            lines = await admin.diff(topology)
            if not any(line == f"stream {topology.log.name}: missing" for line in lines):
                found = [info.name for info in await admin.consumers(topology.run)]
                lines += [f"durable {name}: not declared" for name in found if name not in known]
        told = {"run": topology.run, "verified": not lines, "differences": lines}
        _print(told, lines or ["all stands as declared"], json=json)
        return EXIT_FAILED if lines else 0

    return _run(config, set_, work)


@app.command
def show(config: str, /, *, set_: Overrides = None) -> int:
    """Print what a run's config declares, as JSON. No broker is asked.

    Parameters
    ----------
    config
        A run's TOML file.
    set_
        Override one setting, a.b=value. May be repeated.
    """
    with plain_errors():
        write_json(declared_topology(load_config(config, set_ or (), with_imports=False)))
    return 0


def _run(config: str, overrides: list[str] | None, work: object) -> int:
    with plain_errors():
        loaded = load_config(config, overrides or (), with_imports=False)
        return anyio.run(work, loaded)  # pyright: ignore[reportArgumentType] - one of the functions above


@asynccontextmanager
async def _admin(config: RunConfig) -> AsyncGenerator[Admin]:
    """The rights that the config's credentials have; of an embedded server, while the run goes on."""
    folder = RunFolder(config.run.dir)
    url, login = config.broker.url, broker_login(config.broker, folder)
    if url == "embedded":
        endpoints = folder.read_endpoints()
        url, login = endpoints.broker_url, endpoints.broker_login
        try:
            await check_port(url)
        except NotConnectedError as error:
            raise RunFolderError(
                f"run {config.run.id!r} in {folder.path}: its server runs while the run does, and it is not running: start it, or "
                "name a broker of your own by broker.url"
            ) from error
    async with open_admin(url, msgspec.structs.replace(login, name="admin")) as admin:
        yield admin


def _print(value: object, lines: list[str], *, json: bool) -> None:
    if json:
        write_json(value)
        return
    for line in lines:
        console().print(line, markup=False)
