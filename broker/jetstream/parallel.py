"""Several questions at a time, a bounded number, with the first failure as itself and not as a group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import anyio


async def for_each(items: Iterable[int], work: Callable[[int], Awaitable[object]], *, at_once: int) -> None:
    """Call `work` for each item, `at_once` of them at a time; stop at the first failure and raise it."""
    remaining = iter(items)

    async def worker() -> None:
        for item in remaining:
            await work(item)

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(worker)
    except BaseExceptionGroup as group:
        raise first_of(group) from None


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single exception inside nested groups."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
