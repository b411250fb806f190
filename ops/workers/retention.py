"""The service that keeps a run's store within its limits."""

from __future__ import annotations

from broker.api import CollectablePayloads, PayloadStore
from ops.config import RunConfig
from ops.retention.owner import Readers, RetentionOwner
from ops.topology import durables_of
from ops.workers.context import WorkerContext
from schemas.errors import ConfigError


async def run_retention(context: WorkerContext) -> None:
    """Purge and collect until drained."""
    owner = RetentionOwner(
        context.broker.inner,
        _collectable(context.store),
        context.metrics("retention"),
        readers(context.config),
        context.config.retention,
    )
    context.on_drain(owner.drain)
    await owner.run()


def readers(config: RunConfig) -> Readers:
    """Who reads the log of a run with this config."""
    folds = ("assembly",) if config.run.from_run else ("sampling", "assembly")
    return Readers(
        folds=folds,
        durables=durables_of(config),
        trains=not config.run.rollout_only,
        groups_per_step=0 if config.run.from_run else 1 if config.run.rollout_only else config.sampling.groups_per_step,
    )


def _collectable(store: PayloadStore) -> CollectablePayloads:
    if not hasattr(store, "collect"):
        raise ConfigError(f"payload store {store.name!r}: expected one that lists what it holds")
    return store  # pyright: ignore[reportReturnType] - just checked
