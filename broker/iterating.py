"""An async iterator made of one coroutine function.

Not an async generator: a generator whose `anext` is cancelled is finished for good, and a caller that waits with a
deadline would lose all that comes later. It must not know what it iterates over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Iterating(Generic[T]):
    """Calls `take` for each item; `take` ends it by raising StopAsyncIteration, and may be cancelled and called again."""

    __slots__ = ("_take",)

    def __init__(self, take: Callable[[], Awaitable[T]]) -> None:
        self._take = take

    def __aiter__(self) -> Iterating[T]:
        return self

    def __anext__(self) -> Awaitable[T]:
        return self._take()
