"""The one who purges: looks at the store's fill, moves the low-water mark, purges below it, collects payloads.

    every period_s:  fill of log and payloads ─▶ ≥ sampling_stops_at: `run.retain` says full (sampling issues no more)
                     room for more groups     ─▶ `run.retain` says up to which one sampling may issue
                                              ─▶ ≥ purge_above: mark ─▶ saved ─▶ holds read again ─▶ purged ─▶ announced
                                              ─▶ full and the mark does not move: `blocked: store full`, with who holds it

The mark is saved before anything is purged, and holds are read again after that: a reader that takes its hold and then reads the
mark knows what it still finds. Two owners do no harm: both compute a mark below which nobody needs anything.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker, CollectablePayloads, LogStatus, StoredPayload
from broker.errors import BrokerError, StoreFullError
from ops.accounts import LEDGER_KEY
from ops.retention.follow import LogFollower
from ops.retention.ledger import Ledger
from pipeline.headroom import LOG_SHARE, PAYLOAD_SHARE, STORE_LABEL
from pipeline.holds import HOLDS, MARK_KEY, HoldWatch, read_mark
from pipeline.lease import HeldLease, LeaseLostError
from pipeline.log import RunLog
from pipeline.metrics import Metrics
from pipeline.retention import Mark, durable_needs, fold_needs, hold_needs, mark_of, purges
from pipeline.room import NO_LIMIT, Fill, Room, Taken, room
from schemas.config import RetentionSection
from schemas.messages.sampling import LogHold, Retain
from schemas.messages.training import FoldCheckpoint
from schemas.topics import TOPICS

log = structlog.get_logger("headrace.retention")

LEASE_KEY: Final = "retention.lease"
_LEASE_S: Final = 10.0
_COLLECTED_AT_ONCE: Final = 16
_SAY_AGAIN_S: Final = 30.0
_FEW_STEPS: Final = 64
"""With room for fewer steps than these, the bound is told exactly."""


class Readers(msgspec.Struct, frozen=True, kw_only=True):
    """Who reads the run's log, whether it stands there yet or not."""

    folds: tuple[str, ...]
    durables: tuple[str, ...]
    trains: bool
    groups_per_step: int = 1
    """1 where nothing is trained; 0: nobody issues groups."""


class RetentionOwner:
    """Keeps one run's store within its limits, while it holds the lease."""

    def __init__(
        self, broker: Broker, store: CollectablePayloads, metrics: Metrics, readers: Readers, settings: RetentionSection
    ) -> None:
        self._broker: Final = broker
        self._store: Final = store
        self._metrics: Final = metrics
        self._readers: Final = readers
        self._settings: Final = settings
        self._log: Final = RunLog(broker)
        self._holds: Final = HoldWatch()
        self._retain = Retain(ordinal=0, sequence=0, held_by="")
        self._told_full = False
        self._told_below: int | None = None
        """Up to which group sampling may issue, as it was told last; None: nobody said."""
        self._room: Room | None = None
        self._said_s = -_SAY_AGAIN_S
        self._stopping: Final = anyio.Event()

    def drain(self) -> None:
        """End."""
        self._stopping.set()

    async def run(self) -> None:
        """Until drained."""
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await self._stopping.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop)
            while True:
                self._metrics.wait_for("the lease of the one who purges")
                lease = HeldLease(self._broker, LEASE_KEY, "retention", _LEASE_S)
                await lease.acquire_when_free()
                try:
                    await self._own(lease)
                except* LeaseLostError as group:
                    log.warning("another worker purges from now on", reason=str(group.exceptions[0]))
                finally:
                    with anyio.CancelScope(shield=True), anyio.move_on_after(2.0):
                        await _release(lease)

    async def _own(self, lease: HeldLease) -> None:
        self._retain = await read_mark(self._broker) or self._retain
        self._told_full, self._told_below = self._retain.full, self._retain.issue_below
        follower = LogFollower(self._broker, await Ledger.restore(self._broker), trains=self._readers.trains)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lease.keep)
            tasks.start_soon(follower.run)
            self._metrics.wait_for("the end of the log")
            await follower.caught_up.wait()
            while True:
                try:
                    await self.look(follower)
                except BrokerError as error:
                    log.warning("the store could not be looked after", error=str(error))
                await anyio.sleep(self._settings.period_s)

    async def look(self, follower: LogFollower) -> None:
        """One round."""
        settings = self._settings
        taken = follower.sizes.taken()  # before the stores are looked at
        status = await self._broker.log_status()
        shares = (share(status.size_bytes, status.max_bytes), share(status.payload_bytes, status.payload_max_bytes))
        most = max(shares)
        mark = await self._mark(follower)
        lacks_room = self._room is not None and self._room.groups < 2 * self._readers.groups_per_step
        purges_now = settings.purge_above < 1 and (most >= settings.purge_above or lacks_room)
        if purges_now and mark.sequence > self._retain.sequence:
            await self._purge(follower, mark)
        full = most >= (settings.sampling_resumes_at if self._told_full else settings.sampling_stops_at)
        if self._told_below is None:
            self._told_below = follower.sizes.told_at_start
        below = self._issue_below(status, taken)
        held_back = self._holds_back(taken)
        self._report(shares, mark, status, full=full or held_back)
        if (full, below) != (self._told_full, self._told_below):
            await self._tell_pressure(mark, status, full=full, below=below)

    async def _mark(self, follower: LogFollower) -> Mark:
        """The mark now. Where the log ends is looked at before who needs what."""
        end = follower.needs.sequence
        checkpoints = {name: await self._checkpoint(name) for name in self._readers.folds}
        return mark_of(
            [
                *follower.needs.needs(),
                *fold_needs(checkpoints),
                *durable_needs(self._readers.durables, await self._broker.consumers()),
                *hold_needs(await self._counting_holds()),
            ],
            end=end,
        )

    async def _checkpoint(self, fold: str) -> FoldCheckpoint | None:
        found = await self._broker.load_state(f"fold.{fold}")
        return None if found is None else msgspec.msgpack.decode(found[0], type=FoldCheckpoint)

    async def _counting_holds(self) -> Mapping[str, LogHold]:
        counting, over = self._holds.look(await self._broker.list_state(HOLDS), time.monotonic())
        for key in over:
            await self._broker.delete_state(key)
        return counting

    async def _purge(self, follower: LogFollower, mark: Mark) -> None:
        await follower.ledger.save(self._broker)
        self._retain = Retain(
            ordinal=self._retain.ordinal + 1,
            sequence=mark.sequence,
            held_by=mark.held_by,
            full=self._told_full,
            issue_below=self._told_below,
        )
        await self._broker.save_state(MARK_KEY, msgspec.msgpack.encode(self._retain))
        held = [hold.sequence for hold in (await self._counting_holds()).values()]
        floor = min([mark.sequence, *held])
        purged, weights = 0, follower.needs.kept_weights
        for pattern, below in purges(self._broker.run, (topic.name for topic in TOPICS), floor, weights):
            purged += await self._broker.purge_below(below, pattern=pattern)
        await self._announce()
        collected, size = await self._collect(follower, floor, weights)
        follower.uses.forget_below(floor, weights)
        log.info("purged", below=floor, messages=purged, payloads=collected, payload_bytes=size, held_by=mark.held_by)
        self._metrics.gauges["purged_messages"] = self._metrics.gauges.get("purged_messages", 0.0) + purged
        self._metrics.gauges["collected_payloads"] = self._metrics.gauges.get("collected_payloads", 0.0) + collected

    async def _announce(self) -> None:
        try:
            await self._log.publish(self._retain)
        except StoreFullError as error:
            log.warning("the mark could not be put on the log", error=str(error))

    async def _collect(self, follower: LogFollower, floor: int, weights: Collection[int]) -> tuple[int, int]:
        """Delete payloads that nobody names any more; how many, and their bytes.

        What was stored after the message at the mark may be about to be named by whoever works on what stands above it, so it
        stays, and so does whatever is younger than the least age.
        """
        keep = await self._named_by_states()
        before_s = follower.uses.time_of(floor) - self._settings.min_payload_age_s
        garbage: list[StoredPayload] = [
            payload
            async for payload in self._store.stored(before_unix_s=before_s)
            if payload.id not in keep and not follower.uses.is_named(payload.id, floor, weights)
        ]
        limiter = anyio.CapacityLimiter(_COLLECTED_AT_ONCE)

        async def collect(payload: StoredPayload) -> None:
            async with limiter:
                await self._store.collect(payload)

        for start in range(0, len(garbage), 1024):
            async with anyio.create_task_group() as tasks:
                for payload in garbage[start : start + 1024]:
                    tasks.start_soon(collect, payload)
        return len(garbage), sum(payload.size_bytes for payload in garbage)

    async def _named_by_states(self) -> set[str]:
        """Payloads that last values name: checkpoints."""
        found = {
            checkpoint.state.id
            for checkpoint in [await self._checkpoint(name) for name in (*self._readers.folds,)]
            if checkpoint is not None
        }
        ledger = await self._broker.load_state(LEDGER_KEY)
        if ledger is not None:
            found.add(msgspec.msgpack.decode(ledger[0], type=FoldCheckpoint).state.id)
        return found

    def _issue_below(self, status: LogStatus, taken: Taken) -> int | None:
        """The first group for which there is no room; None while that is not known."""
        if not self._readers.groups_per_step:
            return self._told_below
        self._room = room(
            taken,
            Fill(used_bytes=status.size_bytes, limit_bytes=status.max_bytes),
            Fill(used_bytes=status.payload_bytes, limit_bytes=status.payload_max_bytes),
        )
        if self._room is None:
            return self._told_below
        groups, told = self._room.groups, self._told_below
        if told is None:
            return taken.num_issued + groups
        left, few = told - taken.num_issued, groups < _FEW_STEPS * self._readers.groups_per_step
        # Told again long before it is used up, but neither for every group nor for every byte.
        if 2 * left < groups or (left > groups and (few or left > 2 * groups)):
            return taken.num_issued + groups
        return told

    def _holds_back(self, taken: Taken) -> bool:
        """Whether no step can be begun and nothing is under way that would free room."""
        return self._room is not None and self._room.groups < self._readers.groups_per_step and not taken.num_under_way

    async def _tell_pressure(self, mark: Mark, status: LogStatus, *, full: bool, below: int | None) -> None:
        """Put on the log that the store is nearly full, or that it is no longer, and up to which group there is room: sampling
        obeys.

        Raises:
            StoreFullError: the log takes no word more; the report tells it all the same.
        """
        reason = fill_text(status) if full else ""
        told = Retain(
            ordinal=self._retain.ordinal + 1,
            sequence=self._retain.sequence,
            held_by=mark.held_by,
            full=full,
            reason=reason,
            issue_below=below,
        )
        await self._broker.save_state(MARK_KEY, msgspec.msgpack.encode(told))
        standing = await self._log.publish(told)
        self._retain = msgspec.structs.replace(told, ordinal=max(told.ordinal, standing.ordinal))
        if full != self._told_full:
            log.warning(
                "the store is nearly full: nothing new is begun" if full else "there is room again", fill=reason
            )
        self._told_full, self._told_below = full, below

    def _room_text(self) -> str:
        """What groups need and have, in words, where that holds work back."""
        room = self._room
        if room is None or room.groups >= self._readers.groups_per_step:
            return ""
        return (
            f"; room for {room.groups} more groups: one takes {room.group_bytes / 1e6:,.2f} MB, "
            f"{room.free_bytes / 1e6:,.2f} MB are left"
        )

    def _report(self, shares: Sequence[float], mark: Mark, status: LogStatus, *, full: bool) -> None:
        metrics, text = self._metrics, fill_text(status) + self._room_text()
        metrics.gauges.update(
            {LOG_SHARE: shares[0], PAYLOAD_SHARE: shares[1], "mark": mark.sequence, "blocked": float(full)}
        )
        if self._room is not None and self._room is not NO_LIMIT:
            metrics.gauges["room_groups"] = self._room.groups
        holder = f"; the mark stands at {mark.sequence}, held by {mark.held_by or 'nobody'}"
        metrics.labels["mark"] = f"{mark.sequence} {mark.held_by}".strip()
        if not full:
            metrics.labels.pop(STORE_LABEL, None)
            metrics.wait_for(f"nothing: {text}")
            return
        blocked = f"blocked: store full: {text}{holder}"
        metrics.labels[STORE_LABEL] = blocked
        metrics.wait_for(f"blocked: store full; held by {mark.held_by or 'nobody'}")
        if time.monotonic() - self._said_s >= _SAY_AGAIN_S:
            self._said_s = time.monotonic()
            log.warning(
                "blocked: store full",
                fill=text,
                mark=mark.sequence,
                held_by=mark.held_by,
                help="raise broker.max_bytes or broker.max_payload_store_bytes (headrace broker apply --update), or end "
                "what holds the mark",
            )


async def _release(lease: HeldLease) -> None:
    try:
        await lease.release()
    except (BrokerError, LeaseLostError) as error:
        log.debug("the lease was not released", reason=str(error))


def share(used: int, limit: int) -> float:
    """How full; 0 without a limit."""
    return used / limit if limit > 0 else 0.0


def fill_text(status: LogStatus) -> str:
    """How full the store is, in words; the fuller part first."""

    def part(name: str, used: int, limit: int) -> str:
        return f"{name} {used / 1e6:,.1f} MB" + (f" of {limit / 1e6:,.1f} ({used / limit:.0%})" if limit > 0 else "")

    stores = (
        ("log", status.size_bytes, status.max_bytes),
        ("payloads", status.payload_bytes, status.payload_max_bytes),
    )
    return ", ".join(part(*store) for store in sorted(stores, key=lambda store: -share(store[1], store[2])))
