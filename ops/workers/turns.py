"""Time-shared engines: the side of an engine's process, by the run's config."""

from __future__ import annotations

import anyio

from ops.config import RunConfig
from ops.workers.context import WorkerContext
from pipeline.turns import TurnGiver, TurnSettings
from stages.ports import EngineError, InferenceEngine, Sleeps


def turn_settings(config: RunConfig) -> TurnSettings:
    """How patient engines and trainer are with each other."""
    return TurnSettings(ttl_s=config.engine.time_share_ttl_s, wait_s=config.engine.time_share_wait_s)


def turn_giver(context: WorkerContext, engine: InferenceEngine, incarnation: str, turn: anyio.Lock) -> TurnGiver | None:
    """Lets the engine rest while the trainer of the same machines computes; None where they share nothing.

    Args:
        turn: the receiver's: new weights are loaded when the engine is awake.
    """
    if not context.config.engine.time_shared:
        return None
    sleeps = isinstance(engine, Sleeps)
    return TurnGiver(
        context.broker,
        f"{engine.name}-{incarnation}",
        turn_settings(context.config),
        rest=engine.sleep if sleeps else engine.pause,
        wake=engine.wake if sleeps else engine.resume,
        turn=turn,
        errors=(EngineError,),
    )
