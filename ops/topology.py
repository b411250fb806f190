"""What a run needs on its broker, from its config alone: limits, retention, replicas, and its durables. Pure.

`headrace broker apply | verify | diff` and the workers take it from here, so neither can declare anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from broker.api import ConsumerSettings
from broker.topology import RunLimits, Topology, durable, run_topology
from ops.config import RunConfig
from pipeline.fold import FoldSettings
from pipeline.retries import retries_of
from pipeline.stage import AnyTopic
from schemas.topics import EPISODE_ENDED, EPISODE_REQUESTED, GROUP_ISSUED, STEP_TRAINED

FAN_OUT: Final = "fan_out"
ARENA_LAUNCH: Final = "arena_launch"
REWARDS: Final = "map_rewards"
WEIGHTS: Final = "broadcast_weights"
_CONSUMES: Final[Mapping[str, AnyTopic]] = {
    FAN_OUT: GROUP_ISSUED,
    ARENA_LAUNCH: EPISODE_REQUESTED,
    REWARDS: EPISODE_ENDED,
    WEIGHTS: STEP_TRAINED,
}


_LAUNCHERS: Final = 64
"""Launchers of a run whose episodes may all be under way at once: the broker's own bound is for all of them together."""


def durables_of(config: RunConfig) -> tuple[str, ...]:
    """The stateless stages of a run, which share their work by a durable each."""
    if config.run.from_run:
        return ()
    stages = (FAN_OUT, ARENA_LAUNCH, REWARDS)
    return stages if config.run.rollout_only else (*stages, WEIGHTS)


def consumer_settings(stage: str, config: RunConfig) -> ConsumerSettings:
    """How a stage's durable hands out work."""
    match stage:
        case "arena_launch":
            # Prefetched work of a dead worker comes back after ack_wait: hold no more than can be worked on.
            episodes = config.rollout.max_concurrent_episodes
            return ConsumerSettings(ack_wait_s=8.0, prefetch=episodes, max_ack_pending=max(4096, _LAUNCHERS * episodes))
        case "map_rewards":
            return ConsumerSettings(prefetch=128)
        case "broadcast_weights":
            return ConsumerSettings(prefetch=2, ack_wait_s=30.0)
        case _:
            return ConsumerSettings()


def limits_of(config: RunConfig) -> RunLimits:
    """How much the run may hold on the broker."""
    return RunLimits(
        log_max_bytes=config.broker.max_bytes,
        payload_max_bytes=config.broker.max_payload_store_bytes,
        replicas=config.broker.replicas,
    )


def declared_topology(config: RunConfig) -> Topology:
    """All streams and durables of a run."""
    run = config.run.id
    durables = [
        durable(stage, [_CONSUMES[stage].filter(run), retries_of(run, stage)], consumer_settings(stage, config))
        for stage in durables_of(config)
    ]
    return run_topology(run, limits_of(config), durables)


def fold_settings(config: RunConfig) -> FoldSettings:
    """How a run's folds are checkpointed."""
    return FoldSettings(checkpoint_period_s=config.retention.checkpoint_period_s)
