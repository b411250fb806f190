"""A lease on a last-value key: at most one incarnation acts, each with a generation of its own.

Renewed by compare-and-set; a holder that finds another revision, or that could not renew within its time to live, has
lost it and must stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError, ConflictError
from pipeline.errors import ContractError
from schemas.messages.training import TrainerLease

log = structlog.get_logger("headrace.lease")


class LeaseLostError(ContractError):
    """Another incarnation holds the lease, or it ran out."""


class HeldLease:
    """A lease of this process."""

    def __init__(
        self, broker: Broker, key: str, holder: str, ttl_s: float, *, now: Callable[[], float] = time.time
    ) -> None:
        self._broker: Final = broker
        self._key: Final = key
        self._holder: Final = holder
        self._ttl_s = ttl_s
        self._now: Final = now
        self._revision = 0
        self._renewed = 0.0
        self._lost = ""
        # One renewal at a time: two of our own with the same revision would look like somebody else's.
        self._renewing: Final = anyio.Lock()
        self.generation = 0

    async def acquire(self) -> None:
        """Become the next generation. A former holder that still lives is superseded: it stops at its next check.

        Raises:
            LeaseLostError: another incarnation was quicker, again and again.
        """
        for _ in range(20):
            found = await self._broker.load_state(self._key)
            former = None if found is None else msgspec.msgpack.decode(found[0], type=TrainerLease)
            self.generation = 1 if former is None else former.generation + 1
            try:
                await self._write(0 if found is None else found[1])
            except ConflictError:
                await anyio.sleep(0.05)
                continue
            log.info("lease taken", key=self._key, generation=self.generation)
            return
        raise LeaseLostError(f"lease {self._key}: others took it 20 times in a row; is more than one trainer started?")

    async def acquire_when_free(self) -> None:
        """Become the next generation as soon as the former holder has not renewed for its time to live, by this process's
        own clock from when it first saw that renewal: two that take turns never fight, and no clock's jump ends a lease.
        """
        seen, since_s = -1, anyio.current_time()
        while True:
            found = await self._broker.load_state(self._key)
            if found is None:
                break
            former = msgspec.msgpack.decode(found[0], type=TrainerLease)
            if found[1] != seen:
                seen, since_s = found[1], anyio.current_time()
            if former.ttl_s <= 0 or anyio.current_time() - since_s > former.ttl_s:
                break
            await anyio.sleep(min(1.0, former.ttl_s / 4))
        await self.acquire()

    async def release(self) -> None:
        """Let the next one have it at once."""
        async with self._renewing:
            if not self._lost:
                self._ttl_s = 0.0
                await self._write(self._revision)

    async def check(self) -> None:
        """Renew it.

        Raises:
            LeaseLostError: it is no longer ours.
        """
        async with self._renewing:
            await self._renew()

    async def _renew(self) -> None:
        if self._lost:
            raise LeaseLostError(self._lost)
        try:
            await self._write(self._revision)
        except ConflictError as error:
            self._lost = (
                f"lease {self._key}: generation {self.generation} was superseded; this incarnation stops and writes "
                "nothing more"
            )
            raise LeaseLostError(self._lost) from error

    async def keep(self) -> None:
        """Renew it now and then, until it is lost.

        Raises:
            LeaseLostError: it is no longer ours.
        """
        while True:
            await anyio.sleep(self._ttl_s / 3)
            try:
                await self.check()
            except LeaseLostError:
                raise
            except BrokerError as error:
                log.warning("the lease could not be renewed", key=self._key, error=str(error))

    async def _write(self, expected: int) -> None:
        now = self._now()
        lease = TrainerLease(generation=self.generation, holder=self._holder, renewed_unix_s=now, ttl_s=self._ttl_s)
        self._revision = await self._broker.save_state(
            self._key, msgspec.msgpack.encode(lease), expected_revision=expected
        )
        self._renewed = now
