"""Questions for a server's version, shared by all streams that wait for an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from stages.clients.engines.dialect import Served


class VersionWatch:
    """One question at a time; whoever comes while one is on its way waits for the next."""

    def __init__(self, ask: Callable[[], Awaitable[Served]], interval_s: float) -> None:
        """Args:
        ask: what the server serves now.
        interval_s: the least time between two questions.
        """
        self._ask: Final = ask
        self._interval_s: Final = interval_s
        self._turn: Final = anyio.Lock()
        self._num_asked = 0
        self._answered = 0
        self._last_s = float("-inf")
        self._served = Served(0)

    async def after_now(self) -> Served:
        """What is served at some moment after this call.

        Raises:
            EngineError: The server did not say.
        """
        needed = self._num_asked + 1
        async with self._turn:
            if self._answered >= needed:
                return self._served
            await anyio.sleep(max(0.0, self._last_s + self._interval_s - anyio.current_time()))
            self._num_asked += 1
            self._last_s = anyio.current_time()
            self._served = await self._ask()
            self._answered = self._num_asked
            return self._served
