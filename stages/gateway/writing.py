"""Puts answered calls on the log: before the answer ends (`strict`) or soon after (`fast`, bounded).

Ordinals have no gaps: one call of a session at a time gets its number. Storing is shielded, since a half-stored call is worse than a late one.

```
strict:  answer ─▶ [session lock: number ─▶ store ─▶ forest] ─▶ answer ends
fast:    answer ─▶ [session lock: number ─▶ forest ─▶ backlog] ─▶ answer ends      backlog ─▶ store (its session's lane, in order)
```
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

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


class Writer:
    """Stores interactions."""

    def __init__(self, recorder: Recorder, payloads: Payloads, recording: Recording, limits: GatewayLimits) -> None:
        self._recorder = recorder
        self._payloads = payloads
        self._recording = recording
        self._limits = limits
        self._lanes: list[MemoryObjectSendStream[_Entry]] = []
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
                send, receive = anyio.create_memory_object_stream[_Entry](max(1, self._limits.fast_backlog // _LANES))
                self._lanes.append(send)
                lanes.start_soon(self._drain_lane, receive)
            task_status.started()

    async def write(self, session: Session, data: bytes, build: Build, add: AddNode) -> Node:
        """Record a call of an open session; returns when the answer may end.

        Raises:
            SessionEndedError: the session ended, or another gateway has it.
            UnavailableError: the log did not confirm in time.
        """
        async with session.recording:
            if session.ended:
                raise SessionEndedError(f"session {session.id} has ended: its calls are no longer recorded")
            ordinal = len(session.forest.nodes)
            if self._recording is Recording.FAST and self._lanes:
                node = add()
                self._pending[session.id] = self._pending.get(session.id, 0) + 1
                lane, entry = self._lanes[hash(session.id) % _LANES], (session, data, build, ordinal)
                try:
                    lane.send_nowait(entry)
                except anyio.WouldBlock:
                    await lane.send(entry)
                return node
            await self._store(session, data, build, ordinal)
            return add()

    async def flush(self, session: Session) -> None:
        """Wait until nothing of the session is in the backlog."""
        while self._pending.get(session.id):
            await self._stored.wait()

    async def _drain_lane(self, entries: MemoryObjectReceiveStream[_Entry]) -> None:
        try:
            async for entry in entries:
                await self._store_late(entry)
        finally:
            # A gateway that is stopped, not killed, loses nothing.
            with anyio.move_on_after(self._limits.record_deadline_s, shield=True), suppress(anyio.WouldBlock):
                while True:
                    await self._store_late(entries.receive_nowait())

    async def _store_late(self, entry: _Entry) -> None:
        session, data, build, ordinal = entry
        try:
            # After a call that could not be stored, later ones of the session would leave a gap.
            if ordinal == session.num_recorded:
                await self._store(session, data, build, ordinal)
        except (UnavailableError, SessionEndedError) as error:
            session.fail(str(error))
        finally:
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


def _unavailable(session: Session, reason: str, error: Exception) -> NoReturn:
    session.fail(reason)
    raise UnavailableError(reason) from error
