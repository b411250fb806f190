"""Which sessions are here: opened, taken over from a dead gateway, ended, expired; and which live elsewhere.

A token names its session. An unknown one is looked up on the log: ended, owned by a gateway that is alive, or free to be taken over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager

import anyio

from schemas.messages.rollout import SessionClosed, SessionOpened
from stages.gateway.deadline import log_deadline
from stages.gateway.errors import BusyError, SessionEndedError, UnauthorizedError, UnavailableError
from stages.gateway.forest import Forest
from stages.gateway.ports import Clock, Peers, RecordConflictError, Recorder, RecorderError
from stages.gateway.recording import rebuild_forest
from stages.gateway.session import Session, SessionTicket, check_session_id, new_token, session_of, token_digest
from stages.gateway.settings import GatewaySettings, Recording
from stages.gateway.writing import Writer
from stages.ports import Payloads


class SessionBook:
    """All sessions that this gateway knows."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        recorder: Recorder,
        payloads: Payloads,
        writer: Writer,
        peers: Peers | None,
        stop_token_ids: tuple[int, ...],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        self._payloads = payloads
        self._writer = writer
        self._peers = peers
        self._stop_token_ids = stop_token_ids
        self._clock = clock
        self._by_id: dict[str, Session] = {}
        self._by_token: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Digests of the tokens of ended sessions → session."""
        self._closing = anyio.Lock()
        self.base_url = settings.public_url
        self.late_calls = 0

    def __len__(self) -> int:
        return len(self._by_id)

    async def open(self, session_id: str, *, min_version: int = 0, again: bool = False) -> SessionTicket:
        """Open a session; opening one that is open here gives the same ticket.

        Args:
            session_id: its id.
            min_version: lowest weight version that it may be sampled with.
            again: it may have been open at a gateway that died: what stands of it goes on, with a new token.

        Raises:
            InvalidRequestError: not a legal id.
            SessionEndedError: `again`, and it is over.
            BusyError: too many sessions are open.
            UnavailableError: the log did not answer in time.
        """
        check_session_id(session_id)
        session = self._by_id.get(session_id)
        if session is None:
            if len(self._by_id) >= self._settings.limits.max_sessions:
                raise BusyError(f"{len(self._by_id)} sessions are open, the most this gateway takes", retry_after_s=5)
            forest = await self._standing(session_id) if again else None
            session = Session(
                session_id, new_token(session_id), min_version=min_version, now_s=self._clock(), forest=forest
            )
            await self._announce(session)
        else:
            with self._log_deadline():
                await session.announced.wait()
            if session_id not in self._by_id:
                raise UnavailableError(f"session {session_id} could not be opened; try again")
        return SessionTicket(session=session_id, token=session.token, base_url=self.base_url)

    async def close(self, session_id: str) -> SessionClosed:
        """End a session: its running calls are cancelled, nothing more is recorded. Closing again gives the same answer.

        Raises:
            UnavailableError: the log did not answer in time.
        """
        with self._log_deadline():
            session = self._by_id.get(session_id)
            if session is None:
                return await self._close_foreign(session_id)
            session.ended = True
            for scope in tuple(session.running):
                session.late_drops += 1
                scope.cancel()
            async with session.recording:
                if session.closed is None:
                    await self._writer.flush(session)
                    session.closed = await self._record_end(
                        SessionClosed(
                            session=session_id,
                            num_interactions=session.num_recorded,
                            context_overflow=session.context_overflow,
                            system_error=session.system_error,
                            late_drops=session.late_drops,
                            lossy=self._settings.recording is Recording.FAST,
                        )
                    )
            self._forget(session)
            return session.closed

    async def resolve(self, token: str) -> Session | str:
        """The session of a token, or the base URL of the gateway that has it.

        Raises:
            UnauthorizedError: the token is no session's.
            SessionEndedError: its session is over.
            UnavailableError: the log did not answer in time.
        """
        session = self._by_token.get(token)
        if session is not None and session.moved:
            del self._by_token[token], self._by_id[session.id]
            session = None
        if session is not None and not session.ended:
            session.last_used_s = self._clock()
            return session
        ended = self._ended.get(token_digest(token))
        if ended is not None or session is not None:
            self.late_calls += 1
            raise SessionEndedError(f"session {ended or session_of(token)} has ended")
        session_id = session_of(token)
        if session_id is None:
            raise UnauthorizedError("expected a session token; open a session first and send its token as the API key")
        with self._log_deadline():
            async with self._closing:
                known = self._by_token.get(token)
                return known if known is not None else await self._find(session_id, token)

    def named(self, session_id: str) -> Session | None:
        """An open session by its id."""
        return self._by_id.get(session_id)

    def idle(self) -> list[Session]:
        """The sessions that nobody used for `idle_expiry_s`."""
        oldest_s = self._clock() - self._settings.limits.idle_expiry_s
        return [one for one in self._by_id.values() if not one.running and one.last_used_s < oldest_s]

    async def locate(self, session_id: str) -> Session | str | None:
        """An open session here, the base URL of the living gateway that has it, or None: nobody has it.

        Raises:
            UnavailableError: the log did not answer in time.
        """
        session = self._by_id.get(session_id)
        if session is not None and not session.moved:
            return session
        with self._log_deadline():
            openings = await self._recorder.read_openings(session_id)
            return await self._address(openings) if openings else None

    async def recorded_ids(self, session_id: str) -> set[str]:
        """The interaction ids of a session that is not open here, as the log has them.

        Raises:
            UnavailableError: the log did not answer in time.
        """
        with self._log_deadline():
            return {one.interaction_id for one in await self._recorder.read_session(session_id)}

    async def _address(self, openings: Sequence[SessionOpened]) -> str | None:
        """Where the gateway is that took a session up last, if it is another one and alive."""
        owner = openings[-1].gateway
        return None if owner == self._settings.name or self._peers is None else await self._peers.address(owner)

    async def _standing(self, session_id: str) -> Forest | None:
        """What the log has of a session whose gateway is gone; None for a new one.

        Raises:
            SessionEndedError: it is over.
        """
        with self._log_deadline():
            if await self._recorder.read_closing(session_id) is not None:
                raise SessionEndedError(f"session {session_id} has ended")
            records = await self._recorder.read_session(session_id)
            return await rebuild_forest(records, self._payloads, self._stop_token_ids) if records else None

    async def _find(self, session_id: str, token: str) -> Session | str:
        """Look a foreign session up on the log, and take it over when its gateway is gone."""
        openings = await self._recorder.read_openings(session_id)
        mine = [one for one in openings if one.token_digest == token_digest(token)]
        if not mine:
            raise UnauthorizedError("the session token is not known; it may be of another run")
        if await self._recorder.read_closing(session_id) is not None:
            self._remember_end(token_digest(token), session_id)
            self.late_calls += 1
            raise SessionEndedError(f"session {session_id} has ended")
        address = await self._address(openings)
        if address is not None:
            return address
        records = await self._recorder.read_session(session_id)
        forest = await rebuild_forest(records, self._payloads, self._stop_token_ids)
        session = Session(session_id, token, min_version=mine[-1].min_version, now_s=self._clock(), forest=forest)
        await self._announce(session)
        return session

    async def _close_foreign(self, session_id: str) -> SessionClosed:
        """End a session whose gateway is gone (or that nobody opened)."""
        stands = await self._recorder.read_closing(session_id)
        if stands is not None:
            return stands
        records = await self._recorder.read_session(session_id)
        lossy = self._settings.recording is Recording.FAST
        closed = await self._record_end(SessionClosed(session=session_id, num_interactions=len(records), lossy=lossy))
        for opening in await self._recorder.read_openings(session_id):
            self._remember_end(opening.token_digest, session_id)
        return closed

    async def _record_end(self, closed: SessionClosed) -> SessionClosed:
        """Store a session's end; if another gateway ended it first, its message holds."""
        try:
            await self._recorder.record(closed)
        except RecordConflictError:
            stands = await self._recorder.read_closing(closed.session)
            if stands is None:
                raise
            return stands
        return closed

    async def _announce(self, session: Session) -> None:
        """Put a session's opening on the log; only then its token is good."""
        opened = SessionOpened(
            session=session.id,
            gateway=self._settings.name,
            token_digest=token_digest(session.token),
            min_version=session.min_version,
        )
        self._by_id[session.id] = session
        try:
            with self._log_deadline():
                await self._recorder.record(opened)
            self._by_token[session.token] = session
        finally:
            if session.token not in self._by_token:
                del self._by_id[session.id]
            session.announced.set()

    def _forget(self, session: Session) -> None:
        if self._by_id.pop(session.id, None) is not None:
            self._by_token.pop(session.token, None)
            self._remember_end(token_digest(session.token), session.id)

    def _remember_end(self, digest: str, session_id: str) -> None:
        self._ended[digest] = session_id
        if len(self._ended) > self._settings.limits.max_ended_sessions:
            self._ended.popitem(last=False)

    def _log_deadline(self) -> AbstractContextManager[None]:
        limits = self._settings.limits
        return log_deadline(limits.peer_deadline_s + limits.record_deadline_s, RecorderError)
