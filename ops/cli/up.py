"""`headrace up TOPOLOGY`, `headrace down RUN`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import anyio
import msgspec
from cyclopts import Parameter
from rich.console import Console

from ops.cli.failing import EXIT_FAILED, EXIT_INTERRUPTED, plain_errors
from ops.cli.output import console, write_json
from ops.connection import find_run, open_run
from ops.nodes.asking import NodeRequest, NodeSilentError, ask_node, nodes_of
from ops.nodes.file import load_cluster, this_node
from ops.run_folder import RunFolder, RunFolderError
from ops.running.joining import join_run
from ops.running.run import control_run
from ops.running.screen import print_summary
from ops.running.site import Site, site_of
from ops.running.starting import RunFailedError
from ops.supervise.process import python
from pipeline.logs import set_up_logs
from schemas.errors import ConfigError

_LOOK_S: Final = 0.1
_TELL_AFTER_S: Final = 15.0
_TAIL_LINES: Final = 8
Overrides = Annotated[list[str] | None, Parameter(name="--set", negative=())]
Addresses = Annotated[list[str] | None, Parameter(name="--address", negative=())]


def up(
    topology: str,
    /,
    *,
    node: str = "",
    detach: bool = False,
    set_: Overrides = None,
    address: Addresses = None,
    json: bool = False,
    log_level: str = "INFO",
) -> int:
    """Start this node's share of a run and supervise it, until the run is over, `headrace down`, Ctrl-C or SIGTERM.

    Nodes may come and go while the run goes on; the one with `control = true` announces it and ends it.

    Examples:
        headrace up examples/cluster.toml --node head
        headrace up cluster.toml --detach
        headrace up cluster.toml --node rollout-2 --address rollout-2=10.0.0.7

    Parameters
    ----------
    topology
        A topology file (TOML): the run's config, the nodes, their addresses and what each runs.
    node
        Which of the nodes this is; left out: the one whose address or name is this machine's.
    detach
        Return once the node works, and leave it running; a node waits for the control node. Its log goes to logs/up.log of its run folder.
    set_
        Override one setting of the run's config, a.b=value; the same on all nodes. May be repeated.
    address
        NAME=ADDRESS of a node, instead of the file's. May be repeated.
    json
        Control node: the last line on stdout is one JSON object, as of `headrace run`.
    log_level
        DEBUG, INFO, WARNING or ERROR.
    """
    set_up_logs(process="up", level=log_level)
    with plain_errors(RunFailedError, OSError):
        cluster = load_cluster(topology, overrides=set_ or (), addresses=_addresses(address or ()))
        section = cluster.node(node) if node else this_node(cluster)
        site = site_of(cluster, section.name)
        if detach:
            return _detached(site, topology, _repeated("--set", set_) + _repeated("--address", address), log_level)
        if site.share.control:
            return _control(site, json=json)
        reason = anyio.run(join_run, site, backend_options={"use_uvloop": True})
    sys.stderr.write(f"headrace: node {section.name} left: {reason}\n")
    return 0


def down(run: str, /, *, node: str = "", json: bool = False) -> int:
    """Stop a whole run in good order, or let one node leave it. The same `headrace up` or `headrace run` resumes, and the node comes back.

    A node that leaves gives back what it had in hand; the others go on with it.

    Examples:
        headrace down examples/cluster.toml
        headrace down examples/cluster.toml --node rollout-2
        headrace down runs/quickstart

    Parameters
    ----------
    run
        The topology file, on a machine where a node of it runs, or a run's folder or name.
    node
        Only this node leaves.
    json
        One JSON object: run, asked (names of nodes; of a run without nodes its process).
    """
    with plain_errors():
        if _is_a_file(run):
            cluster = load_cluster(run)
            name, leaving = cluster.config.run.id, cluster.node(node).name if node else ""
            asked = anyio.run(_stop_nodes, run, leaving)
        else:
            folder = find_run(run)
            name, has_nodes = folder.read_endpoints().run, bool(folder.read_endpoints().node)
            if node and not has_nodes:
                raise ConfigError(f"--node {node}: run {name!r} in {folder.path} has no nodes; expected none")
            asked = anyio.run(_stop_nodes, run, node) if has_nodes else [_stop_process(folder, name)]
    if json:
        write_json({"run": name, "asked": asked})
    else:
        console().print(f"run {name}: told to leave: {', '.join(asked)}", markup=False)
    return 0


def _is_a_file(target: str) -> bool:
    """Whether a topology is meant, there or not."""
    return Path(target).suffix == ".toml" and not Path(target).is_dir()


async def _stop_nodes(target: str, node: str) -> list[str]:
    """Tell one node, or all, to leave; those that were asked."""
    async with open_run(target, name="down") as broker:
        found = await nodes_of(broker)
        if node:
            names = [node]
        else:  # the control node tells all others; without one, each is told
            controlling = [state.node for state in found.values() if state.control]
            names = [name for name in controlling if await _stop(broker, name)]
            if names:
                return names
            names = list(found)
        asked = [name for name in names if await _stop(broker, name)]
        if not asked:
            raise NodeSilentError(f"no node of run {broker.run} answers ({', '.join(names) or 'none is known'})")
        return asked


def _stop_process(folder: RunFolder, name: str) -> str:
    """Tell the command of a run on this machine to end, as Ctrl-C does.

    Raises:
        RunFolderError: it does not run here.
    """
    pid = folder.holder()
    if pid is None or not folder.is_ready(pid):  # another command may look at what is over
        raise RunFolderError(f"run {name!r} in {folder.path} is not running on this machine")
    os.kill(pid, signal.SIGTERM)
    return f"pid {pid}"


async def _stop(broker: object, name: str) -> bool:
    try:
        await ask_node(broker, name, NodeRequest(action="stop"))  # pyright: ignore[reportArgumentType] - a Broker
    except NodeSilentError:
        return False
    return True


def _control(site: Site, *, json: bool) -> int:
    async def work() -> int:
        outcome = await control_run(site)
        print_summary(
            outcome.account, Console(stderr=True), folder=site.config.run.dir, interrupted=outcome.interrupted
        )
        if json:
            sys.stdout.write(msgspec.json.encode(outcome.account).decode() + "\n")
            sys.stdout.flush()
        return EXIT_INTERRUPTED if outcome.interrupted else 0

    return anyio.run(work, backend_options={"use_uvloop": True})


def _addresses(given: list[str] | tuple[()]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, place = text.partition("=")
        if not (name and equals and place):
            raise ConfigError(f"--address {text}: expected NAME=ADDRESS")
        found[name] = place
    return found


def _repeated(option: str, values: list[str] | None) -> list[str]:
    return [part for value in values or () for part in (option, value)]


def _detached(site: Site, topology: str, options: list[str], log_level: str) -> int:
    """Start the same command in a session of its own; return once its workers are started."""
    folder = RunFolder(site.config.run.dir)
    folder.create()
    folder.ready_file.unlink(missing_ok=True)
    log_file = folder.logs / "up.log"
    command = python("-m", "ops", "up", topology, "--node", site.share.node, "--log-level", log_level, *options)
    with log_file.open("ab") as sink:
        begin = sink.tell()
        process = subprocess.Popen(  # noqa: S603 - this very command
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    told_at = time.monotonic() + _TELL_AFTER_S
    while process.poll() is None and not folder.is_ready(process.pid):
        if time.monotonic() > told_at:
            told_at = float("inf")
            waits = "" if site.share.control else " the control node may have to be started first;"
            sys.stderr.write(
                f"headrace: node {site.share.node} is not ready yet (pid {process.pid}): {log_file} has what it does;{waits} "
                "Ctrl-C leaves it on its own\n"
            )
        time.sleep(_LOOK_S)
    if process.returncode is not None:
        with log_file.open("rb") as written:
            written.seek(begin)
            lines = written.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
        sys.stderr.write("\n".join([*lines, f"headrace: node {site.share.node} ended; see {log_file}"]) + "\n")
        return EXIT_FAILED
    console().print(f"node {site.share.node} works (pid {process.pid}); its log: {log_file}", markup=False)
    return 0
