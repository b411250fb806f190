"""Folds a run's log again, from its beginning, into a fresh broker in memory, and compares what comes out with what stands.

the run's log ──in order──▶ fold runner ──▶ fresh broker ═══ compare bytes ═══ the run's log and payloads
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from broker.api import Broker, PayloadStore, Record
from broker.connect import connect
from broker.errors import BrokerError
from broker.naming import any_matches
from ops.config import RunConfig, assembly_settings, sampling_settings
from pipeline.errors import ContractError
from pipeline.fold import Fold, FoldRunner
from pipeline.metrics import Metrics
from pipeline.retries import retries_of
from schemas.errors import DecodeError
from schemas.ids import encode_token
from schemas.payload import PayloadRef, run_ref
from schemas.topics import DEAD_LETTER
from stages.assembly.fold import AssemblyFold
from stages.sampling.fold import SamplingFold

_MOST: Final = 50


class _CopyingPayloads:
    """Payloads of the fresh broker; what the fold wants of the run is copied, what it puts must stand in the run's store."""

    def __init__(self, source: Broker, differs: list[str]) -> None:
        self.name = source.payloads.name
        self._source: Final = source
        self._differs: Final = differs

    async def put(self, data: bytes | memoryview) -> PayloadRef:
        ref = run_ref(data)
        try:
            await self._source.payloads.get(ref)
        except BrokerError as error:
            self._differs.append(f"payload {ref.id}, which folding gives, does not stand: {error}")
        return ref

    async def get(self, ref: PayloadRef) -> memoryview:
        return await self._source.payloads.get(ref)

    async def delete(self, payload_id: str) -> None:
        """Nothing was stored."""


class _FreshBroker:
    """A broker in memory whose payloads are those of another."""

    def __init__(self, inner: Broker, payloads: PayloadStore) -> None:
        self._inner: Final = inner
        self.run: Final = inner.run
        self.payloads: Final = payloads

    def __getattr__(self, name: str) -> Any:  # Any: whatever the port has beside payloads
        return getattr(self._inner, name)


async def refold(config: RunConfig, broker: Broker, records: Sequence[Record]) -> list[str]:
    """Every difference between a fresh fold of the log and the log, in words; empty = byte for byte the same.

    Args:
        config: the run's.
        broker: the run's, for its payloads.
        records: the whole log.
    """
    differs: list[str] = []
    for fold in (SamplingFold(sampling_settings(config)), AssemblyFold(assembly_settings(config))):
        differs += await _refold(fold, broker, records)
    return differs[:_MOST]


async def _refold(
    fold: Fold[Any], broker: Broker, records: Sequence[Record]
) -> list[str]:  # Any: each fold's own state
    differs: list[str] = []
    run = broker.run
    filters = (*(topic.filter(run) for topic in fold.consumes), retries_of(run, fold.name))
    async with connect("memory://", run) as fresh:
        both = cast("Broker", _FreshBroker(fresh, _CopyingPayloads(broker, differs)))  # cast: the rest is delegated
        runner = FoldRunner(fold, both, Metrics(run, fold.name))
        for record in records:
            if not any_matches(filters, record.subject):
                continue
            try:
                await runner.fold_record(record)
            except (ContractError, DecodeError) as error:
                return [*differs, f"{fold.name}: stops at sequence {record.sequence}: {error}"]
        standing = {record.subject: record.data for record in records if _is_output(fold, run, record.subject)}
        async with fresh.read([f"hr.{run}.>"], follow=False) as made:
            async for record in made:
                found = standing.pop(record.subject, None)
                if found is None:
                    differs.append(f"{fold.name}: {record.subject}, which folding gives, does not stand on the log")
                elif found != record.data:
                    differs.append(f"{fold.name}: {record.subject} stands with other bytes than folding gives")
        differs += [f"{fold.name}: {subject} stands and folding does not give it" for subject in standing]
    return differs


def _is_output(fold: Fold[Any], run: str, subject: str) -> bool:  # Any: each fold's own state
    """Whether a subject is one that this fold alone says; a dead letter of its own is, too."""
    letters = f"{DEAD_LETTER.filter(run).removesuffix('>')}{encode_token(fold.name)}.>"
    return any_matches((*(topic.filter(run) for topic in fold.produces), letters), subject)
