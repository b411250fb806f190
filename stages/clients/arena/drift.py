"""What a live stream is at the moment, and whether its reward is still the expected one: asked before a launch, remembered for a while."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from schemas.config_arena import StreamConfig
from stages.clients.arena.client import ArenaClient
from stages.clients.arena.errors import ArenaFatalError, RewardDriftError
from stages.clients.arena.wire import ArenaStream, check_reward


class RewardGuard:
    """Stops launches into a stream whose reward drifted."""

    def __init__(
        self, client: ArenaClient, *, max_age_s: float = 60.0, clock: Callable[[], float] = anyio.current_time
    ) -> None:
        self._client = client
        self._max_age_s = max_age_s
        self._clock = clock
        self._seen: dict[str, tuple[float, ArenaStream | None]] = {}
        self._lock = anyio.Lock()

    async def check(self, stream: StreamConfig) -> ArenaStream | None:
        """Compare the expected reward with the live stream's.

        Returns:
            The live stream; None where it can't be read and no reward is pinned.

        Raises:
            RewardDriftError: It is another reward.
            ArenaError: The stream can't be read.
        """
        if stream.expected_reward_ref is None:
            return await self._known(stream.stream_id)
        live = await self._live(stream.stream_id)
        problem = check_reward(stream.name, stream.expected_reward_ref, live.reward)
        if problem is not None:
            raise RewardDriftError(f"{problem}; nothing is launched. Pin the new version or restore the old one")
        return live

    async def _known(self, stream_id: str) -> ArenaStream | None:
        """The stream where the Arena tells it: nothing depends on it, so a refusal is remembered like an answer."""
        seen = self._seen.get(stream_id)
        if seen is not None and seen[1] is None and self._clock() - seen[0] < self._max_age_s:
            return None
        try:
            return await self._live(stream_id)
        except ArenaFatalError:
            self._seen[stream_id] = (self._clock(), None)
            return None

    async def _live(self, stream_id: str) -> ArenaStream:
        async with self._lock:
            seen = self._seen.get(stream_id)
            if seen is not None and seen[1] is not None and self._clock() - seen[0] < self._max_age_s:
                return seen[1]
            live = await self._client.get_stream(stream_id)
            self._seen[stream_id] = (self._clock(), live)
            return live
