"""Reads what a chaos run left and holds it against the ledger, the stand-in's arithmetic and a fresh fold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import anyio
import msgspec

from broker.api import Broker, Record
from broker.errors import BrokerError
from ops.chaos.ledger import Ledger, Plain
from ops.chaos.refold import refold
from ops.chaos.weights import ExpectedWeights
from ops.config import RunConfig
from schemas.errors import DigestError
from schemas.payload import PayloadRef

_AT_ONCE = 32


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """A log and what does not hold of it."""

    ledger: Ledger
    num_messages: int
    refold_differs: list[str]


async def audit_chaos(config: RunConfig, broker: Broker, *, answered: Collection[str]) -> Audited:
    """Take the whole log in.

    Args:
        config: the run's.
        broker: a connection to its log.
        answered: ids of the calls whose answers reached an agent.
    """
    async with broker.read([f"hr.{broker.run}.>"], follow=False) as found:
        records: list[Record] = [record async for record in found]
    ledger = Ledger(
        groups_per_step=config.sampling.groups_per_step,
        max_staleness=config.sampling.max_staleness,
    )
    for record in records:
        ledger.take(record.subject, record.data)
    await _check_steps(ledger, broker, recompute=config.training.backend == "standin")
    ledger.close(answered=answered)
    return Audited(ledger=ledger, num_messages=len(records), refold_differs=await refold(config, broker, records))


async def _check_steps(ledger: Ledger, broker: Broker, *, recompute: bool) -> None:
    """Every manifest and every row's tokens are there, each row is in one step, every trainer's weights are those of the manifests."""
    seen: dict[str, int] = {}
    weights = ExpectedWeights()
    for step in sorted(ledger.manifests):
        data = await _payload(ledger, broker, ledger.manifests[step], f"step {step}")
        if data is None:
            return
        manifest: Plain = msgspec.msgpack.decode(data)
        ledger.check_rows(step, manifest, seen)
        rows = await _rows(ledger, broker, manifest)
        recompute &= len(rows) == len(manifest["row_ids"])  # else the loss is told, and no digest can be
        digests = ledger.trained.get(step, {})
        expected = {weights.apply(manifest, rows)} if recompute else set(digests.values())
        for generation, digest in digests.items():
            if digest not in expected or len(expected) != 1:
                ledger.findings.unexplained.append(
                    f"step {step} of trainer {generation} gave the weights {digest}, its manifests give {sorted(expected)}"
                )


async def _rows(ledger: Ledger, broker: Broker, manifest: Plain) -> Sequence[dict[str, Any]]:  # Any: decoded msgpack
    """The rows whose tokens are there, in the manifest's order."""
    rows: dict[int, dict[str, Any]] = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def fetch(number: int, row: str) -> None:
        ref = ledger.row_tokens.get(row)
        if ref is None:
            return  # told by `check_rows`
        async with limiter:
            data = await _payload(ledger, broker, ref, f"row {row}")
        if data is not None:
            rows[number] = msgspec.msgpack.decode(data)

    async with anyio.create_task_group() as tasks:
        for number, row in enumerate(manifest["row_ids"]):
            tasks.start_soon(fetch, number, row)
    return [rows[number] for number in sorted(rows)]


async def _payload(ledger: Ledger, broker: Broker, ref: Plain, what: str) -> bytes | memoryview | None:
    if ref.get("inline") is not None:
        inline: bytes = ref["inline"]
        return inline
    try:
        return await broker.payloads.get(PayloadRef(store=ref["store"], id=ref["id"], size_bytes=ref["size_bytes"]))
    except (BrokerError, DigestError) as error:
        ledger.findings.lost.append(f"the payload of {what} is gone: {error}")
        return None
