"""A step's batch as one columnar manifest: every row with its ids and numbers, every dropped group with its reason.

Deterministic bytes: no clock, no broker sequence, fields in the order of the schema. Knows no fold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pipeline.errors import ContractError
from schemas.arrays import float64, int32, int64
from schemas.messages.training import DroppedGroup, Manifest, StepAssembled
from schemas.payload import PayloadRef, run_ref
from stages.assembly.batch import Batch
from stages.assembly.settings import AssemblySettings
from stages.assembly.state import Tally
from stages.assembly.stats import step_stats, stream_stats


def build_manifest(
    batch: Batch,
    step: int,
    dropped: Sequence[DroppedGroup],
    tallies: Mapping[str, Tally],
    extra_stats: Mapping[str, float],
    settings: AssemblySettings,
) -> Manifest:
    """The step's manifest.

    Raises:
        ContractError: rows whose tokens are in more than one store, or inside the message.
    """
    rows = batch.rows
    streams = sorted({group.stream for group in batch.groups})
    stream_of = {name: index for index, name in enumerate(streams)}
    turns = [entry.turn_advantages for entry in rows]
    return Manifest(
        run=settings.run,
        step=step,
        algorithm=settings.estimator.name,
        aggregation=settings.aggregation,
        temperature=settings.temperature,
        groups=[group.group for group in batch.groups],
        streams=streams,
        row_ids=[entry.row.row for entry in rows],
        row_group=int32([entry.group for entry in rows]),
        row_slot=int32([entry.slot for entry in rows]),
        row_stream=int32([stream_of[batch.groups[entry.group].stream] for entry in rows]),
        reward=float64([entry.row.reward for entry in rows]),
        advantage=float64([entry.advantage for entry in rows]),
        loss_weight=float64(batch.loss_weight),
        mini_batch=int32([entry.mini_batch for entry in rows]),
        num_tokens=int32(batch.column("num_tokens")),
        num_loss_tokens=int32([entry.num_loss_tokens for entry in rows]),
        min_version=int32(batch.column("min_version")),
        max_version=int32(batch.column("max_version")),
        payload_ids=[entry.row.tokens.id for entry in rows],
        payload_sizes=int64([entry.row.tokens.size_bytes for entry in rows]),
        payload_store=_store([entry.row.tokens for entry in rows]),
        turn_advantages=turns if any(turns) else [],
        dropped=list(dropped),
        stats={**step_stats(batch, tallies, step, settings), **extra_stats},
        stream_stats=stream_stats(batch, tallies, step, settings),
    )


def announce(manifest: Manifest, batch: Batch) -> tuple[StepAssembled, bytes]:
    """The message that names the manifest, and the manifest's bytes."""
    data = msgspec.msgpack.encode(manifest)
    trained = [entry for entry in batch.rows if entry.num_loss_tokens]
    return (
        StepAssembled(
            step=manifest.step,
            manifest=run_ref(data),
            groups=manifest.groups,
            dropped=manifest.dropped,
            num_rows=len(batch.rows),
            num_tokens=sum(entry.row.num_tokens for entry in batch.rows),
            num_mini_batches=batch.num_mini_batches,
            min_version=min(entry.row.min_version for entry in trained),
            mean_reward=manifest.stats["reward_mean"],
        ),
        data,
    )


def _store(refs: Sequence[PayloadRef]) -> str:
    stores = sorted({ref.store for ref in refs})
    if stores == ["inline"] or len(stores) != 1:
        raise ContractError(
            f"a step's rows must lie in one payload store: found {', '.join(stores)}; reward mapping stores each row's tokens "
            "before it names them"
        )
    return stores[0]
