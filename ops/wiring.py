"""What a run is made of: each stage with the ports it needs, from config and log. Read this to see how all hangs together.

sampling · fan_out · arena_launch · rewards · assembly · weights      light stages; several may share a process
gateway                                                               with the built-in or scripted engine in it, or the router
engine                                                                one process per vLLM or SGLang server
trainer                                                               one process per rank
ranks                                                                 starts a node's ranks of a trainer over several nodes
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from ops.adapters import LogWeights, published_generations
from ops.config import assembly_settings, run_streams, sampling_settings
from ops.evaluations import following
from ops.store_readers import StoreReaders
from ops.topology import FAN_OUT, REWARDS, WEIGHTS, consumer_settings, fold_settings
from ops.workers.context import WorkerContext
from pipeline.fold import FoldRunner
from pipeline.runner import RunnerSettings, StageRunner
from pipeline.sessions import SessionReader
from pipeline.stage import bind
from pipeline.ticks import Ticker
from schemas.errors import ConfigError
from schemas.messages.sampling import Tick
from stages.assembly.fold import AssemblyFold
from stages.fan_out import fan_out
from stages.rewards.map_rewards import RewardSettings, map_rewards
from stages.rewards.transforms import load_rewards
from stages.sampling.fold import SamplingFold
from stages.weights.broadcast import broadcast_weights
from stages.weights.shelf import Shelf

LIGHT_STAGES: Final = ("sampling", "fan_out", "arena_launch", "rewards", "assembly", "weights", "retention")
FROM_RUN_STAGES: Final = ("bridge", "assembly", "retention", "trainer")
"""What a run has that trains from another one's trajectories; its bridge works in the supervising process."""
STAGES: Final = (*LIGHT_STAGES, "gateway", "trainer")
WORKER_STAGES: Final = (*STAGES, "engine", "ranks")
"""What a worker can be told to run."""


async def run_service(stage: str, context: WorkerContext) -> None:
    """Run one stage of a run until the worker drains.

    Raises:
        ConfigError: no such stage.
        ContractError: the stage stopped rather than guess.
    """
    try:
        await _service(stage)(context)
    except Exception as error:
        await context.last_word(stage, error)
        raise


def _service(stage: str) -> Callable[[WorkerContext], Awaitable[None]]:
    # What only some stages need (HTTP servers and clients, tokenizers, engines) is imported by those: an idle worker is light.
    match stage:
        case "sampling":
            return _sampling
        case "fan_out":
            return _fan_out
        case "arena_launch":
            from ops.workers.arena import run_arena_launch  # noqa: PLC0415 - see above

            return run_arena_launch
        case "rewards":
            return _rewards
        case "assembly":
            return _assembly
        case "weights":
            return _weights
        case "retention":
            from ops.workers.retention import run_retention  # noqa: PLC0415 - see above

            return run_retention
        case "gateway":
            from ops.workers.gateway import run_gateway  # noqa: PLC0415 - see above

            return run_gateway
        case "engine":
            from ops.workers.engine import run_engine  # noqa: PLC0415 - see above

            return run_engine
        case "trainer":
            from ops.workers.trainer import run_trainer  # noqa: PLC0415 - see above

            return run_trainer
        case "ranks":
            from ops.workers.ranks import run_ranks  # noqa: PLC0415 - see above

            return run_ranks
        case _:
            raise ConfigError(f"stage {stage!r}: expected one of {', '.join(WORKER_STAGES)}")


async def _sampling(context: WorkerContext) -> None:
    from ops.streams import list_streams  # noqa: PLC0415 - see `_service`

    metrics = context.metrics("sampling")
    metrics.wait_for("the Arena's datasets")
    await list_streams(context)
    settings = sampling_settings(context.config)
    runner = FoldRunner(SamplingFold(settings), context.broker, metrics, fold_settings(context.config))
    context.on_drain(runner.drain)
    await runner.run(beside=following(context.log, metrics) if settings.evaluations else None)


async def _fan_out(context: WorkerContext) -> None:
    settings = RunnerSettings(consumer=consumer_settings(FAN_OUT, context.config))
    runner = StageRunner(bind(fan_out), context.broker, context.metrics("fan_out"), settings)
    context.on_drain(runner.drain)
    await runner.run()


async def _rewards(context: WorkerContext) -> None:
    reward = context.config.reward
    streams = run_streams(context.config)
    stage = bind(
        map_rewards,
        sessions=SessionReader(context.log, deadline_s=reward.read_deadline_s),
        payloads=context.payloads,
        settings=RewardSettings(
            export="individual" if reward.export == "individual" else "concat",
            turn_discount=reward.turn_discount,
            shared_tokens="all" if reward.shared_tokens == "all" else "first",
            rewards=load_rewards(streams),
            expected_rewards={
                name: f"{stream.expected_reward_ref.key}@{stream.expected_reward_ref.version}"
                for name, stream in streams.items()
                if stream.expected_reward_ref is not None
            },
        ),
    )
    settings = RunnerSettings(consumer=consumer_settings(REWARDS, context.config))
    runner = StageRunner(stage, context.broker, context.metrics("rewards"), settings)
    context.on_drain(runner.drain)
    await runner.run()


async def _assembly(context: WorkerContext) -> None:
    ticker = Ticker(context.broker, period_s=context.config.sampling.tick_period_s, now=context.now)
    metrics = context.metrics("assembly")
    copies = bool(context.config.run.from_run)  # the bridge copies the first run's ticks, too
    found = (await context.broker.log_status()).last_sequence

    def see(sequence: int, message: object) -> None:
        if isinstance(message, Tick):
            ticker.seen(message.ordinal)
        if sequence > found:
            fold.refuse_stall(runner.state)

    fold = AssemblyFold(assembly_settings(context.config))
    runner = FoldRunner(fold, context.broker, metrics, fold_settings(context.config), on_message=see)
    context.on_drain(runner.drain)

    async def tick() -> None:
        ticker.seen(runner.state.tick)  # earlier ticks may be purged
        await ticker.run()

    await runner.run(beside=None if copies else tick)


async def _weights(context: WorkerContext) -> None:
    training = context.config.training
    readers = StoreReaders(context.broker, hold_s=training.hold_weights_s)
    shelf = None
    if training.weights_through_store:
        shelf = Shelf(
            context.payloads,
            LogWeights(context.log),
            keep_versions=training.keep_weight_versions,
            held=readers.held,
        )
    stage = bind(
        broadcast_weights,
        payloads=context.payloads,
        shelf=shelf,
        weights_dir=str(context.folder.weights),
        generations=await published_generations(context.log),
    )
    settings = RunnerSettings(consumer=consumer_settings(WEIGHTS, context.config))
    runner = StageRunner(stage, context.broker, context.metrics("weights"), settings)
    context.on_drain(runner.drain)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(readers.listen)
        await runner.run()
        tasks.cancel_scope.cancel()
