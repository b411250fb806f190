"""Puts answered calls on the log: before the answer ends (`strict`) or soon after (`fast`, bounded).

Ordinals have no gaps: one call of a session at a time gets its number. Storing is shielded, since a half-stored call is worse than a late one.

```
strict:  answer ─▶ [session lock: number ─▶ store ─▶ forest] ─▶ answer ends
fast:    answer ─▶ [session lock: a place ─▶ number, forest, backlog] ─▶ answer ends      backlog ─▶ store (its session's lane, in order)
```

`fast` waits only for a place in the backlog, before anything is begun: a call that is given up there leaves no trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn

import anyio

from schemas.messages.rollout import InteractionRecorded
from schemas.payload import PayloadRef
from stages.gateway.errors import SessionEndedError, UnavailableError
from stages.gateway.forest import Node
from stages.gateway.ports import RecordConflictError, Recorder, RecorderError
from stages.gateway.recording import store_payload
from stages.gateway.session import Session
from stages.gateway.settings import GatewayLimits, Recording
from stages.ports import Payloads

_LANES: Final = 8
"""Sessions are spread over so many writers in `fast` mode."""

Build = Callable[[int, PayloadRef], InteractionRecorded]
"""The message for an ordinal and the reference to its payload."""
AddNode = Callable[[], Node]
_Entry = tuple[Session, bytes, Build, int]


class _Lane:
    """The backlog of one writer."""

    def __init__(self, size: int) -> None:
        self.places: Final = anyio.Semaphore(size, fast_acquire=True)
        """One is held by each entry, until it is stored."""
        self.entries: Final[deque[_Entry]] = deque()
        self.filled = anyio.Event()
        self.closed = False

    def put(self, entry: _Entry) -> None:
        """Add an entry whose place is held."""
        self.entries.append(entry)
        self.filled.set()

    async def take(self) -> _Entry:
        """The oldest entry, once there is one."""
        while not self.entries:
            self.filled = anyio.Event()
            await self.filled.wait()
        return self.entries.popleft()


class Writer:
    """Stores interactions."""

    def __init__(self, recorder: Recorder, payloads: Payloads, recording: Recording, limits: GatewayLimits) -> None:
        self._recorder = recorder
        self._payloads = payloads
        self._recording = recording
        self._limits = limits
        self._lanes: list[_Lane] = []
        self._pending: dict[str, int] = {}
        self._stored = anyio.Event()
        self.num_recorded = 0

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """`fast`: the writers behind the backlog. Returns at once for `strict`."""
        if self._recording is Recording.STRICT:
            task_status.started()
            return
        async with anyio.create_task_group() as lanes:
            for _ in range(_LANES):
                lane = _Lane(max(1, self._limits.fast_backlog // _LANES))
                self._lanes.append(lane)
                lanes.start_soon(self._drain_lane, lane)
            task_status.started()

    async def write(self, session: Session, data: bytes, build: Build, add: AddNode) -> Node:
        """Record a call of an open session; returns when the answer may end.

        Raises:
            SessionEndedError: the session ended, or another gateway has it.
            UnavailableError: the log did not confirm in time.
        """
        async with session.recording:
            _check_open(session)
            if self._recording is Recording.FAST and self._lanes:
                return await self._write_behind(session, data, build, add)
            ordinal = len(session.forest.nodes)
            await self._store(session, data, build, ordinal)
            return add()

    async def _write_behind(self, session: Session, data: bytes, build: Build, add: AddNode) -> Node:
        lane = self._lanes[hash(session.id) % _LANES]
        await lane.places.acquire()
        try:
            _check_open(session, lane)
            ordinal = len(session.forest.nodes)
            node = add()
        except BaseException:
            lane.places.release()
            raise
        self._pending[session.id] = self._pending.get(session.id, 0) + 1
        lane.put((session, data, build, ordinal))
        return node

    async def flush(self, session: Session) -> None:
        """Wait until nothing of the session is in the backlog."""
        while self._pending.get(session.id):
            await self._stored.wait()

    async def _drain_lane(self, lane: _Lane) -> None:
        try:
            while True:
                await self._store_late(lane, await lane.take())
        finally:
            # A gateway that is stopped, not killed, loses nothing while the log answers.
            with anyio.move_on_after(self._limits.record_deadline_s, shield=True):
                while lane.entries:
                    await self._store_late(lane, lane.entries.popleft())
            lane.closed = True
            for session, *_ in lane.entries:
                session.fail("the gateway stopped before the log confirmed an interaction")

    async def _store_late(self, lane: _Lane, entry: _Entry) -> None:
        session, data, build, ordinal = entry
        try:
            if ordinal == session.num_recorded:
                await self._store(session, data, build, ordinal)
            else:  # an earlier one could not be stored: this one would leave a gap
                session.fail(f"interaction {ordinal} was not stored: {session.num_recorded} of those before it stand")
        except (UnavailableError, SessionEndedError) as error:
            session.fail(str(error))
        finally:
            lane.places.release()
            self._settle(session)

    def _settle(self, session: Session) -> None:
        left = self._pending[session.id] - 1
        if left:
            self._pending[session.id] = left
        else:
            del self._pending[session.id]
        self._stored.set()
        self._stored = anyio.Event()

    async def _store(self, session: Session, data: bytes, build: Build, ordinal: int) -> None:
        deadline_s = self._limits.record_deadline_s
        try:
            with anyio.fail_after(deadline_s, shield=True):
                await self._recorder.record(build(ordinal, await store_payload(self._payloads, data)))
        except RecordConflictError as error:
            session.moved = session.ended = True
            raise SessionEndedError(f"session {session.id} goes on at another gateway", status=503) from error
        except TimeoutError as error:
            _unavailable(session, f"the log did not confirm an interaction within {deadline_s} s", error)
        except RecorderError as error:
            _unavailable(session, f"the log refused an interaction: {error}", error)
        session.num_recorded = ordinal + 1
        self.num_recorded += 1


def _check_open(session: Session, lane: _Lane | None = None) -> None:
    if session.ended:
        raise SessionEndedError(f"session {session.id} has ended: its calls are no longer recorded")
    if lane is not None and lane.closed:
        raise UnavailableError("the gateway is stopping")


def _unavailable(session: Session, reason: str, error: Exception) -> NoReturn:
    session.fail(reason)
    raise UnavailableError(reason) from error
