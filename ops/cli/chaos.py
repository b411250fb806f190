"""`headrace chaos`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import anyio
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from ops.chaos.plan import parse_kinds
from ops.chaos.result import ChaosResult
from ops.chaos.run import ChaosSettings, run_chaos
from ops.cli.failing import EXIT_FAILED, plain_errors
from ops.cli.output import console, write_json
from pipeline.logs import set_up_logs


def chaos(
    *,
    faults: int = 20,
    seed: int = 0,
    nodes: Literal[1, 3] = 1,
    broker: Literal["nats", "rabbitmq"] = "nats",
    config: Path | None = None,
    only: Annotated[list[str] | None, Parameter(negative=())] = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    folder: Path | None = None,
    json: bool = False,
) -> int:
    """Kill, stop, cut off and fill up a run of its own, then account for all that it issued. Exit code 1 if anything is wrong.

    Examples:
        headrace chaos --faults 20 --seed 1
        headrace chaos --faults 200 --seed 1 --nodes 3 --json
        headrace chaos --faults 10 --only broker_killed --json

    Parameters
    ----------
    faults
        How many.
    seed
        Which, and in which order.
    nodes
        Broker nodes: one, or three with replicated streams.
    broker
        Which broker: an embedded NATS, or a RabbitMQ that is installed here (one node, and the faults that can be played on it).
    config
        A config file instead of the built-in run (scripted engine, stand-in trainer, local Arena, an agent's stream).
    only
        Faults of these kinds alone; may be repeated.
    set_
        Override one setting of the config, a.b=value; may be repeated.
    folder
        Keep everything here; without it all is removed at the end.
    json
        Print the result as one JSON line.
    """
    progress = Console(stderr=True, highlight=False)

    def tell(line: str) -> None:
        progress.print(line, soft_wrap=True)

    set_up_logs(process="chaos", level="ERROR")  # a broker that is away is no news here
    with plain_errors(OSError, TimeoutError):
        settings = ChaosSettings(
            num_faults=faults,
            seed=seed,
            nodes=nodes,
            broker=broker,
            kinds=parse_kinds(only or ()),
            config="" if config is None else str(config),
            overrides=set_ or (),
            folder="" if folder is None else str(folder),
        )
        result = anyio.run(partial(run_chaos, settings, tell=tell), backend_options={"use_uvloop": True})
    if json:
        write_json(result)
    else:
        _print(result)
    return 0 if result.holds else EXIT_FAILED


def _print(result: ChaosResult) -> None:
    table = Table("fault", "times", "moving again", "next step", box=None)
    for kind, times in result.faults.items():
        recovery = result.recovery.get(kind)
        table.add_row(
            kind,
            str(times),
            "" if recovery is None else f"{recovery.moving_s:.1f} s",
            "" if recovery is None else f"{recovery.step_s:.1f} s",
        )
    screen = console()
    screen.print(table)
    screen.print(
        f"{result.num_faults} faults in {result.seconds:.0f} s: {result.unexplained} unexplained, {result.doubled} doubled, "
        f"{result.lost} lost, {result.refold_differs} differ when folded again "
        f"({result.groups} groups, {result.steps} steps, {result.answered_calls} answered calls)"
    )
    for line in result.details:
        screen.print(f"  {line}", soft_wrap=True)
