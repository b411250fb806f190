from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from broker.memory import MemoryBroker, MemoryServer
from pipeline.lease import HeldLease, LeaseLostError


class SlowBroker(MemoryBroker):
    """Lets other tasks run before a state is written, as a network does."""

    async def save_state(self, key: str, data: bytes, *, expected_revision: int | None = None) -> int:
        await anyio.lowlevel.checkpoint()
        return await super().save_state(key, data, expected_revision=expected_revision)


def lease(server: MemoryServer, holder: str) -> HeldLease:
    return HeldLease(SlowBroker(server, "demo"), "trainer.lease", holder, 30.0)


async def test_whoever_takes_it_later_is_the_next_generation_and_supersedes_the_former(server: MemoryServer) -> None:
    first, second = lease(server, "a"), lease(server, "b")
    await first.acquire()
    await first.check()
    await second.acquire()
    assert (first.generation, second.generation) == (1, 2)
    await second.check()
    for _ in range(2):
        with pytest.raises(LeaseLostError, match="generation 1 was superseded"):
            await first.check()
    await second.check()


async def test_checks_of_one_holder_at_the_same_time_do_not_lose_it(server: MemoryServer) -> None:
    held = lease(server, "a")
    await held.acquire()
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(held.check)


async def test_two_that_take_it_at_the_same_time_get_two_generations(server: MemoryServer) -> None:
    both = [lease(server, "a"), lease(server, "b")]
    async with anyio.create_task_group() as tasks:
        for one in both:
            tasks.start_soon(one.acquire)
    assert sorted(one.generation for one in both) == [1, 2]
