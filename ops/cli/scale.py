"""`headrace scale STAGE=N [RUN]`."""

from __future__ import annotations

import anyio

from broker.api import Broker
from ops.cli.failing import plain_errors
from ops.cli.output import console, write_json
from ops.connection import look_at_run
from ops.nodes.asking import NodeRequest, NodeState, answers, ask_node, nodes_of
from ops.nodes.share import refuse_unscalable, spread
from ops.run_folder import RunFolderError
from schemas.errors import ConfigError


def scale(what: str, run: str | None = None, /, *, node: str = "", url: str | None = None, json: bool = False) -> int:
    """Change how many processes a stage has while the run goes on: fan_out, arena_launch, rewards or gateway.

    Without --node, N is the whole run's, shared out over the nodes that run the stage. Nodes obey again at their next start.
    What can't be scaled says why: folds, weights, the trainer.

    Examples:
        headrace scale gateway=4 examples/cluster.toml
        headrace scale arena_launch=2 runs/quickstart
        headrace scale rewards=0 examples/cluster.toml --node rollout-2

    Parameters
    ----------
    what
        STAGE=N.
    run
        A run's folder or name, or its topology file; the newest below ./runs when left out. With --url, the run's id.
    node
        Only this node's processes.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: run, stage, nodes (node → processes).
    """

    async def work(stage: str, count: int) -> tuple[str, dict[str, int]]:
        async with look_at_run(run, url=url, name="scale") as opened:
            if not opened.is_running:
                raise RunFolderError(f"run {opened.broker.run!r} is not running: expected one that is, to scale it")
            wanted = await _wanted(opened.broker, stage, count, node)
            for name, number in sorted(wanted.items(), key=lambda item: -item[1]):
                await ask_node(opened.broker, name, NodeRequest(action="scale", stage=stage, count=number))
            return opened.broker.run, wanted

    with plain_errors():
        stage, count = _parsed(what)
        name, wanted = anyio.run(work, stage, count)
    if json:
        write_json({"run": name, "stage": stage, "nodes": wanted})
    else:
        told = ", ".join(f"{number} on {place}" for place, number in wanted.items())
        console().print(f"run {name}: {stage}: {told}", markup=False)
    return 0


def _parsed(what: str) -> tuple[str, int]:
    stage, equals, number = what.partition("=")
    if not equals or not number.isdecimal():
        raise ConfigError(f"{what}: expected STAGE=N, for example gateway=2")
    refuse_unscalable(stage)
    return stage, int(number)


async def _wanted(broker: Broker, stage: str, count: int, node: str) -> dict[str, int]:
    if node:
        return {node: count}
    found: list[NodeState] = [state for state in (await nodes_of(broker)).values() if state.counts.get(stage, 0)]
    there = {state.node: state.counts[stage] for state in found if await answers(broker, state.node)}
    if not there:
        raise ConfigError(f"{stage}: no node of run {broker.run} runs it now; say which shall with --node NAME")
    return spread(count, there)
