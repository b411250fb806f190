"""The gateway: calls of sessions in, recorded answers out. Read this first.

```
answer(session, call) ─▶ preprocess ─▶ find the place in the forest ─▶ render what is new ─▶ decide settings and budget
                                                                                              │
             events to the client ◀─ read ids ◀─────────────── sample from the engine ◀───────┘
                                         └─▶ write to the log ─▶ the answer ends
```

Knows nothing of HTTP or of wire protocols.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import anyio
import msgspec

from pipeline.tracing import begin_work
from schemas.messages.rollout import FinishReason, SessionClosed
from stages.gateway.answering import AnswerReader, Emit, Follower, token_texts
from stages.gateway.budget import Decision, decide_sampling
from stages.gateway.conversation import Answer, Call, new_answer_id, new_call_id
from stages.gateway.errors import (
    BusyError,
    ClientGoneError,
    ContextLengthExceededError,
    GatewayError,
    InternalError,
    InvalidRequestError,
    SessionEndedError,
    UnavailableError,
)
from stages.gateway.forest import Match, new_messages
from stages.gateway.generation import Sampled, sample
from stages.gateway.parsing import output_parser
from stages.gateway.ports import Clock, OnlineSessions, Peers, Preprocessor, Recorder
from stages.gateway.recording import interaction, tokens_payload
from stages.gateway.rendering import PromptRenderer
from stages.gateway.session import Session, SessionTicket
from stages.gateway.sessions import SessionBook
from stages.gateway.settings import GatewaySettings
from stages.gateway.writing import Writer
from stages.ports import GenerateRequest, Payloads, TokenIds, Tokenizer, TokenSource

_THREAD_CHARACTERS: Final = 64 * 1024
"""Prompts above this are rendered in a thread: other sessions' streams go on meanwhile."""
_PROBE_TOKENS: Final = 16


@dataclass(kw_only=True)
class Counts:
    """What happened in this gateway since it started."""

    calls: int = 0
    prefix_breaks: int = 0
    engine_faults: int = 0
    context_overflows: int = 0
    failed_calls: int = 0
    probes: int = 0


class _Prepared(msgspec.Struct, frozen=True, kw_only=True):
    match: Match
    new_ids: TokenIds
    prompt_ids: TokenIds
    decision: Decision


class Gateway:
    """One gateway of a run."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        engine: TokenSource,
        tokenizer: Tokenizer,
        recorder: Recorder,
        payloads: Payloads,
        peers: Peers | None = None,
        online: OnlineSessions | None = None,
        preprocessors: Sequence[Preprocessor] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        self.settings: Final = settings
        self.peers: Final = peers
        self.online: Final = online
        self.counts: Final = Counts()
        self.tokenizer: Final = tokenizer
        self._engine = engine
        self._clock = clock
        self._renderer = PromptRenderer(tokenizer, settings.tool_schemas)
        self._preprocessors = tuple(preprocessors)
        self.reads_whole: Final = bool(self._preprocessors)
        """Preprocessors must see whole conversations."""
        self._writer = Writer(recorder, payloads, settings.recording, settings.limits)
        self.sessions: Final = SessionBook(
            settings,
            recorder=recorder,
            payloads=payloads,
            writer=self._writer,
            peers=peers,
            stop_token_ids=tokenizer.stop_token_ids,
            clock=clock,
        )
        self._turns = anyio.Semaphore(settings.limits.max_running_calls, fast_acquire=True)

    @property
    def num_recorded(self) -> int:
        """Interactions stored since this gateway started."""
        return self._writer.num_recorded

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """What goes on beside the calls: writing behind (`fast`), closing idle sessions. Ends by cancellation."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._writer.run)
            task_status.started()
            while True:
                await anyio.sleep(min(30.0, self.settings.limits.idle_expiry_s / 4))
                await self.expire()

    async def open_session(self, session_id: str, min_version: int = 0, *, again: bool = False) -> SessionTicket:
        """Open a session: see `SessionBook.open`."""
        return await self.sessions.open(session_id, min_version=min_version, again=again)

    async def close_session(self, session_id: str) -> SessionClosed:
        """End a session: see `SessionBook.close`."""
        closed = await self.sessions.close(session_id)
        if self.online is not None:
            await self.online.ended(closed)
        return closed

    async def expire(self) -> list[SessionClosed]:
        """Close the sessions that nobody used for `idle_expiry_s`: an Arena's episode failed by that, an online session ended."""
        found: list[SessionClosed] = []
        for session in self.sessions.idle():
            if self.online is None or not self.online.plays(session.id):
                session.fail(f"the session was idle for {self.settings.limits.idle_expiry_s:g} s and expired")
            found.append(await self.close_session(session.id))
        return found

    async def answer(
        self,
        session: Session | None,
        call: Call,
        emit: Emit | None = None,
        *,
        scope: anyio.CancelScope | None = None,
    ) -> tuple[Answer, ...]:
        """Answer a call, all its choices; each is recorded before this returns. Without a session it is a probe: short, unrecorded.

        Args:
            session: whose call it is.
            call: what is asked.
            emit: gets the answer's events as they come.
            scope: entered here; cancelling it says that the client has gone.

        Raises:
            GatewayError: whatever the client is told instead.
            ClientGoneError: `scope` was cancelled.
        """
        self.counts.calls += 1
        begin_work()
        try:
            return await self._answer_in_time(
                session, self._preprocessed(call), emit, anyio.CancelScope() if scope is None else scope
            )
        except GatewayError as error:
            self._note_failure(session, error)
            raise
        except ClientGoneError:
            raise
        except Exception as error:
            # A fault of ours: the episode must not be judged by what the agent makes of it.
            self._note_failure(session, InternalError(f"a fault of the gateway: {type(error).__name__}"))
            raise

    async def count_tokens(self, call: Call) -> int:
        """How many tokens a conversation's prompt has, rendered from scratch."""
        call = self._preprocessed(call)
        return int((await self._render(call, Match(parent=None, num_known=0, before=b"", broken=False))).size)

    def _preprocessed(self, call: Call) -> Call:
        for preprocess in self._preprocessors:
            call = preprocess(call)
        return call

    def _turn(self) -> anyio.Semaphore:
        limits = self.settings.limits
        if self._turns.statistics().tasks_waiting >= limits.max_waiting_calls:
            raise BusyError(f"{limits.max_waiting_calls} calls are waiting already", retry_after_s=1)
        return self._turns

    async def _answer_in_time(
        self, session: Session | None, call: Call, emit: Emit | None, scope: anyio.CancelScope
    ) -> tuple[Answer, ...]:
        """The call can be cancelled by the end of its session, by its client, and by its deadline."""
        limit_s = self.settings.limits.call_deadline_s
        if session is not None:
            if session.ended:
                raise SessionEndedError(f"session {session.id} has ended")
            session.running.add(scope)
        scope.deadline = deadline_s = anyio.current_time() + limit_s
        try:
            with scope:
                async with self._turn():
                    return await self._answer_all(session, call, emit)
        finally:
            if session is not None:
                session.running.discard(scope)
                session.last_used_s = self._clock()
        if session is not None and session.ended:
            raise SessionEndedError(f"session {session.id} ended while this call was running")
        if anyio.current_time() >= deadline_s:
            raise UnavailableError(f"the call took longer than {limit_s:g} s")
        raise ClientGoneError

    async def _answer_all(self, session: Session | None, call: Call, emit: Emit | None) -> tuple[Answer, ...]:
        prepared = await self._prepare(session, call)
        number = call.requested.n
        if number > self.settings.limits.max_choices:
            raise InvalidRequestError(f"n: expected at most {self.settings.limits.max_choices}, found {number}")
        first_id = call.answer_id or new_answer_id(call.protocol)
        if number == 1:
            return (await self._choice(session, call, prepared, emit, 0, first_id),)
        return await self._choices(session, call, prepared, emit, first_id)

    async def _choices(
        self, session: Session | None, call: Call, prepared: _Prepared, emit: Emit | None, first_id: str
    ) -> tuple[Answer, ...]:
        answers: dict[int, Answer] = {}
        errors: list[GatewayError] = []

        async def one(choice: int) -> None:
            try:
                name = first_id if choice == 0 else f"{first_id}-{choice}"
                answers[choice] = await self._choice(session, call, prepared, emit, choice, name)
            except GatewayError as error:
                errors.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for choice in range(call.requested.n):
                tasks.start_soon(one, choice)
        if errors:
            raise errors[0]
        return tuple(answers[choice] for choice in sorted(answers))

    async def _prepare(self, session: Session | None, call: Call) -> _Prepared:
        if session is None:
            match = Match(parent=None, num_known=0, before=b"", broken=False)
        else:
            match = session.forest.match(call)
            if match.broken:
                session.forest.prefix_breaks += 1
                self.counts.prefix_breaks += 1
        new_ids = await self._render(call, match)
        prompt_ids = new_ids if session is None else session.forest.prompt(match, new_ids)
        decision = decide_sampling(
            call.requested,
            self.settings.sampling,
            num_prompt=int(prompt_ids.size),
            context_length=self.settings.context_length,
            stop_token_ids=self.tokenizer.stop_token_ids,
        )
        if session is None:
            self.counts.probes += 1
            short = min(decision.settings.max_new_tokens, _PROBE_TOKENS)
            decision = Decision(settings=msgspec.structs.replace(decision.settings, max_new_tokens=short))
        return _Prepared(match=match, new_ids=new_ids, prompt_ids=prompt_ids, decision=decision)

    async def _render(self, call: Call, match: Match) -> TokenIds:
        size = (
            len(call.prompt)
            if call.prompt is not None
            else sum(len(text) for message in new_messages(call, match) for text in message.texts)
        )
        if size > _THREAD_CHARACTERS:
            return await anyio.to_thread.run_sync(self._renderer.new_ids, call, match)
        return self._renderer.new_ids(call, match)

    async def _choice(
        self, session: Session | None, call: Call, prepared: _Prepared, emit: Emit | None, choice: int, name: str
    ) -> Answer:
        reader = self._reader(call, prepared.prompt_ids)
        request = GenerateRequest(
            request_id=name,
            prompt_ids=prepared.prompt_ids,
            settings=prepared.decision.settings,
            min_version=session.min_version if session is not None else 0,
            session=session.id if session is not None else "",
        )
        follow = Follower(reader, emit, choice)
        sampled = await sample(
            self._engine,
            request,
            limits=self.settings.limits,
            context_length=self.settings.context_length,
            on_ids=follow.take,
        )
        await follow.finish(sampled)
        answer = self._finished(call, prepared, reader, sampled, name)
        if sampled.fault:
            self.counts.engine_faults += 1
        if session is not None:
            await self._record(session, call, prepared, sampled, answer, choice)
        return answer

    def _reader(self, call: Call, prompt_ids: TokenIds) -> AnswerReader:
        raw = call.prompt is not None
        reasoning = self.settings.reasoning and not raw
        opened = reasoning and self.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("<think>")
        tools = {} if raw or call.requested.tool_choice == "none" else {tool.name: tool for tool in call.tools}
        parser = output_parser(
            self.settings.tool_format,
            tools=tools,
            allowed=call.requested.allowed_tools,
            reasoning=reasoning,
            opened=opened,
            new_call_id=lambda: new_call_id(call.protocol),
        )
        return AnswerReader(self.tokenizer, parser, call.requested.stop)

    def _finished(self, call: Call, prepared: _Prepared, reader: AnswerReader, sampled: Sampled, name: str) -> Answer:
        message, segments = reader.message()
        finish = "length" if sampled.finish is FinishReason.LENGTH else "stop"
        if sampled.stopped_by_string:
            finish = "stop_string"
        elif message.calls and finish == "stop":
            finish = "tool_calls"
        parent = prepared.match.parent
        return Answer(
            message=message,
            segments=segments,
            finish=finish,
            stop_string=reader.stop_string,
            num_prompt=int(prepared.prompt_ids.size),
            num_cached=0 if parent is None else parent.end,
            num_completion=sampled.num,
            interaction_id=name,
            token_logprobs=token_texts(self.tokenizer, sampled.ids(), sampled.logprobs().tolist())
            if call.requested.logprobs
            else (),
        )

    async def _record(
        self, session: Session, call: Call, prepared: _Prepared, sampled: Sampled, answer: Answer, choice: int
    ) -> None:
        match, new_ids, decision = prepared.match, prepared.new_ids, prepared.decision
        completion = sampled.ids()
        ended = bool(completion.size) and int(completion[-1]) in self.tokenizer.stop_token_ids
        await self._writer.write(
            session,
            tokens_payload(call, match, new_ids=new_ids, sampled=sampled, answer=answer),
            lambda ordinal, tokens: interaction(
                session=session.id,
                ordinal=ordinal,
                call=call,
                match=match,
                new_ids=new_ids,
                sampled=sampled,
                answer=answer,
                tokens=tokens,
                temperature=decision.settings.temperature,
                untrainable_reason=decision.untrainable_reason,
                choice=choice,
            ),
            lambda: session.forest.add(
                match,
                call,
                new_ids=new_ids,
                completion=completion,
                answer=answer.message,
                ended=ended,
                interaction_id=answer.interaction_id,
            ),
        )

    def _note_failure(self, session: Session | None, error: GatewayError) -> None:
        self.counts.failed_calls += 1
        if isinstance(error, ContextLengthExceededError):
            self.counts.context_overflows += 1
            if session is not None:
                session.context_overflow = True
        elif error.http_status >= 500 and session is not None and not session.ended:
            session.fail(str(error))
