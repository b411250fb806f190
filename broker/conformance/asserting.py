"""What the checks share: how a broker is made, how messages are awaited, how a claim is made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, TypeVar

import anyio

from broker.api import Broker, Delivery

T = TypeVar("T")
DEADLINE_S: Final = 15.0
"""Far above what anything here takes; only a hang reaches it."""
SOON_S: Final = 0.3
"""An ack_wait that a check can wait for."""


class BrokerFactory(Protocol):
    """Opens one more connection to the run under test."""

    def __call__(self) -> AbstractAsyncContextManager[Broker]: ...


Check = Callable[[BrokerFactory], Awaitable[None]]


def claim(holds: bool, what: str) -> None:
    """Raise AssertionError unless it holds."""
    if not holds:
        raise AssertionError(what)


def equal(found: object, expected: object, what: str) -> None:
    """Raise AssertionError unless both are equal."""
    claim(found == expected, f"{what}: expected {expected!r}, found {found!r}")


async def take(items: AsyncIterator[T], count: int) -> list[T]:
    """The next `count` items."""
    found: list[T] = []
    with anyio.fail_after(DEADLINE_S):
        while len(found) < count:
            found.append(await anext(items))
    return found


async def take_all(items: AsyncIterator[T]) -> list[T]:
    """All items of an iterator that ends."""
    with anyio.fail_after(DEADLINE_S):
        return [item async for item in items]


async def take_and_ack(items: AsyncIterator[Delivery], count: int) -> list[Delivery]:
    """The next `count` deliveries, each acknowledged."""
    found: list[Delivery] = []
    with anyio.fail_after(DEADLINE_S):
        while len(found) < count:
            found.append(await anext(items))
            await found[-1].ack()
    return found


async def nothing_comes(items: AsyncIterator[object], within_s: float = 0.1) -> bool:
    """Whether an iterator stays silent for a while."""
    with anyio.move_on_after(within_s):
        await anext(items)
        return False
    return True


async def wait_until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Look again and again until it holds."""
    with anyio.move_on_after(DEADLINE_S):
        while not await holds():
            await anyio.sleep(0.01)
        return
    raise AssertionError(f"{what}: not within {DEADLINE_S} s")


async def raises(kind: type[Exception], call: Awaitable[object], what: str) -> None:
    """Raise AssertionError unless `call` raises `kind`."""
    try:
        with anyio.fail_after(DEADLINE_S):
            await call
    except kind:
        return
    raise AssertionError(f"{what}: expected {kind.__name__}, found no error")


async def fill(broker: Broker, topic: str, count: int, *, first: int = 0) -> None:
    """Publish `count` numbered messages of a topic, many at a time."""
    numbers = iter(range(first, first + count))

    async def work() -> None:
        for number in numbers:
            await broker.publish(f"hr.{broker.run}.{topic}.{number}", str(number).encode())

    async with anyio.create_task_group() as tasks:
        for _ in range(min(count, 64)):
            tasks.start_soon(work)
