"""What one node runs, as processes: pure. A run on one machine is the node that runs everything."""

from __future__ import annotations

from typing import Final

import msgspec

from ops.arena_access import LOCAL, uses_arena
from ops.config import RunConfig
from ops.engines.plan import EnginePlan, engine_plans
from ops.nodes.file import NodeSection
from ops.nodes.ranks import RankGroup
from ops.wiring import LIGHT_STAGES
from schemas.errors import ConfigError

ONLY_NODE: Final = "main"
"""The node of a run on one machine."""
FOLDS: Final = ("sampling", "assembly", "retention")
SHARED: Final = ("fan_out", "arena_launch", "rewards")
"""Stateless stages: any number of processes, anywhere, share their work by a durable."""
SCALABLE: Final = (*SHARED, "gateway")
_MOST_PROCESSES: Final = 256
_REASONS: Final = {
    "sampling": "it is a fold: one process folds the log in its order",
    "assembly": "it is a fold: one process folds the log in its order",
    "retention": "one holder of its lease purges; more processes would only wait",
    "weights": "it reads the trainer's files, so it runs once, beside the trainer",
    "trainer": "its ranks are one process group; set training.ranks and start it again: it resumes from its checkpoint",
    "engine": "servers have GPUs and ports of their own; `headrace engine register` adds one while the run goes on",
}


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a node runs of a run."""

    node: str = ONLY_NODE
    control: bool = True
    """The folds; it announces the run and ends it."""
    arena: bool = False
    trainer: bool = True
    """Rank 0 of the trainer, and weight broadcast, which reads its files."""
    ranks: RankGroup | None = None
    """Of a trainer over several nodes that has ranks here, too."""
    counts: dict[str, int] = {}
    """Processes of each scalable stage."""
    together: bool = False
    """The light stages share one process; what is more of them has processes of its own."""
    engines: tuple[EnginePlan, ...] = ()


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a node, the trainer's excepted."""

    name: str
    stages: tuple[str, ...]
    slot: int = 0
    """Place among the processes of its stage on this node."""


def whole(config: RunConfig) -> Share:
    """Everything, on the only node."""
    if config.run.from_run:
        return Share(together=True)
    return Share(
        arena=config.arena.url == LOCAL and uses_arena(config),
        trainer=not config.run.rollout_only,
        counts=dict.fromkeys(SCALABLE, 1),
        together=config.run.stage_processes == "together",
        engines=tuple(engine_plans(config.engine)),
    )


def share_of(node: NodeSection, config: RunConfig, ranks: RankGroup | None = None) -> Share:
    """What a topology gives a node.

    Args:
        config: the node's own.
        ranks: of a trainer over several nodes, this one among them.
    """
    plans = [
        plan if plan.attached else msgspec.structs.replace(plan, name=f"{node.name}-{plan.name}")
        for plan in engine_plans(config.engine)
        if node.control or not plan.attached  # servers that run already are looked after once
    ]
    counts = {
        "fan_out": node.fan_out,
        "arena_launch": node.launchers,
        "rewards": node.rewards,
        "gateway": node.gateways,
    }
    return Share(
        node=node.name,
        control=node.control,
        arena=node.arena,
        trainer=node.trainer and (ranks is None or ranks.leads),
        ranks=ranks,
        counts={} if config.run.from_run else counts,
        engines=() if config.run.from_run else tuple(plans),
    )


def workers(share: Share, config: RunConfig) -> list[Worker]:
    """A node's worker processes in the order of their start, the trainer's and the engines' excepted."""
    gateways = scaled(share, "gateway", share.counts.get("gateway", 0))
    if share.together:
        stages = ("assembly", "retention") if config.run.from_run else LIGHT_STAGES
        light = [Worker(name="stages", stages=stages)]
    else:
        fixed = {*(FOLDS if share.control else ()), *(("weights",) if share.trainer else ())}
        wanted = [stage for stage in LIGHT_STAGES if stage in fixed]
        if config.run.from_run:
            wanted = [stage for stage in wanted if stage not in ("sampling", "weights")]
        if config.run.stage_processes == "apart":
            light = [Worker(name=stage, stages=(stage,)) for stage in wanted]
        else:
            light = [Worker(name="stages", stages=tuple(wanted))] if wanted else []
    shared = [worker for stage in SHARED for worker in scaled(share, stage, share.counts.get(stage, 0))]
    return [*gateways, *light, *shared]


def scaled(share: Share, stage: str, count: int) -> list[Worker]:
    """The processes that a scalable stage has of its own on a node."""
    first = 1 if share.together and stage in SHARED else 0  # the first one is in the process of all light stages
    return [
        Worker(name=stage if slot == 0 else f"{stage}-{slot + 1}", stages=(stage,), slot=slot)
        for slot in range(first, count)
    ]


def check_scale(share: Share, stage: str, count: int) -> None:
    """Whether a node can run so many processes of a stage.

    Raises:
        ConfigError: with the reason.
    """
    refuse_unscalable(stage)
    least = 1 if share.together and stage in SHARED else 0
    if not least <= count <= _MOST_PROCESSES:
        why = (
            ' (the first one shares a process with the folds; run.stage_processes = "apart" parts them)'
            if least
            else ""
        )
        raise ConfigError(f"{stage}={count}: expected {least} to {_MOST_PROCESSES}{why}")


def refuse_unscalable(stage: str) -> None:
    """Whether a stage may have any number of processes.

    Raises:
        ConfigError: with the reason.
    """
    if stage not in SCALABLE:
        known = f"{stage}: expected one of {', '.join(SCALABLE)}"
        raise ConfigError(f"{stage} can't be scaled: {_REASONS[stage]}" if stage in _REASONS else known)


def spread(total: int, nodes: dict[str, int]) -> dict[str, int]:
    """Share out `total` processes over nodes, as evenly as possible, more to those that have more now.

    Args:
        total: of the whole run.
        nodes: node → what it runs now.
    """
    order = sorted(nodes, key=lambda name: (-nodes[name], name))
    return {name: total // len(order) + (place < total % len(order)) for place, name in enumerate(order)}
