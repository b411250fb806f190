"""`headrace inspect FILE`: what a recording holds, and one episode as a conversation that a person can read."""

from __future__ import annotations

from typing import Final

import msgspec

from broker.errors import BrokerError
from broker.recording import Recording
from ops.logtools.facts import GroupFacts
from ops.logtools.names import Subject
from ops.logtools.plain import Plain, moment, opened_json, plain
from ops.logtools.slot_life import shown_error
from ops.logtools.soundness import soundness
from ops.logtools.sources import tell
from schemas.errors import SchemaError
from schemas.messages.rollout import InteractionRecorded, InteractionTokens

_VERIFIED_BYTES: Final = 256 * 1024 * 1024
"""A recording up to this size is read whole in about a second."""


class TopicFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One topic's share."""

    messages: int
    size_bytes: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording holds."""

    path: str
    run: str
    headrace_version: str
    schema_version: int
    recorded_from: str
    recorded_to: str
    first_sequence: int
    last_sequence: int
    messages: int
    payloads: int
    missing_payloads: int
    """Payloads that were gone before they could be recorded."""
    size_bytes: int
    """Of the files."""
    raw_bytes: int
    """Of messages before compression."""
    files: int
    steps: list[int]
    """Steps whose manifest is in it."""
    topics: dict[str, TopicFigures]
    gaps: list[tuple[int, int]]
    """(first missing, last missing) sequences."""
    damages: list[str]
    verified: bool
    """Every block was read: False: damage inside a block is not known yet."""
    closed: bool
    """False: its last writer did not end properly; what can be read is read."""
    redactions: list[str]


def summary(recording: Recording, *, verify: bool = False) -> Summary:
    """What a recording holds, from its index.

    Args:
        verify: read every block, too. A small recording always is.
    """
    verify = verify or recording.size_bytes() <= _VERIFIED_BYTES
    if verify:
        recording.verify()
    found = soundness(recording)
    messages = recording.lookup.messages
    first, last = (messages[0][1].head, messages[-1][1].head) if messages else (None, None)
    return Summary(
        path=str(recording.path),
        run=recording.run,
        headrace_version=recording.header.headrace_version,
        schema_version=recording.header.schema_version,
        recorded_from="" if first is None else moment(first.first_time_s),
        recorded_to="" if last is None else moment(last.last_time_s),
        first_sequence=0 if first is None else first.first_sequence,
        last_sequence=recording.last_sequence,
        messages=recording.num_messages,
        payloads=recording.num_payloads,
        missing_payloads=len(recording.missing_payloads()),
        size_bytes=recording.size_bytes(),
        raw_bytes=sum(entry.head.raw_bytes for _, entry in messages),
        files=recording.num_files,
        steps=sorted({mark.step for mark in recording.lookup.step_marks() if mark.topic == "step.assembled"}),
        topics={
            name: TopicFigures(messages=topic.messages, size_bytes=topic.size_bytes)
            for name, topic in recording.topics().items()
        },
        gaps=found.gaps,
        damages=found.damages,
        verified=verify,
        closed=found.closed,
        redactions=recording.header.redactions,
    )


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, with everything that was sampled."""

    session: str
    ordinal: int
    parent: int | None
    versions: list[int]
    """Distinct weight versions that sampled it, in order."""
    num_context: int
    num_prompt: int
    num_completion: int
    finish_reason: str
    trainable: bool
    untrainable_reason: str
    temperature: float
    protocol: str
    messages: Plain
    """The call's new messages and its answer."""
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    problem: str = ""
    """Why its tokens can't be read."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a slot."""

    attempt: int
    session: str
    outcome: str
    status: str
    score: float | None
    error: str
    calls: list[Call]


class Episodes(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace inspect FILE GROUP --json` prints."""

    episodes: list[Conversation]
    damages: list[str]
    gaps: list[tuple[int, int]]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """An episode to be read."""

    group: str
    slot: int
    stream: str
    data_id: str
    prompt: Plain
    attempts: list[Attempt]
    reward: float | None
    rejected: str
    rows: list[Plain]


def facts_of(recording: Recording, group: str) -> GroupFacts:
    """What a recording says about a group, found by its index."""
    facts = GroupFacts(group)
    for record in recording.records_of_group(group):
        facts.take(tell(record))
    return facts


def conversations(recording: Recording, subject: Subject) -> list[Conversation]:
    """The episodes of what was asked for: all slots of a group, or one; none where there is no such slot or attempt."""
    facts = facts_of(recording, subject.group)
    slots = [slot for slot in facts.slots() if subject.slot in (None, slot)]
    found = [_conversation(recording, facts, slot, subject.attempt) for slot in slots]
    if subject.attempt is not None:
        found = [one for one in found if one.attempts]
    return found


def _conversation(recording: Recording, facts: GroupFacts, slot: int, only_attempt: int | None) -> Conversation:
    issued = facts.issued.message if facts.issued is not None else None
    ready = facts.ready.get(slot)
    attempts = sorted({attempt for found, attempt in (*facts.requested, *facts.ended) if found == slot})
    return Conversation(
        group=facts.group,
        slot=slot,
        stream=issued.stream if issued else "",
        data_id=issued.data_id if issued else "",
        prompt=_prompt(recording, facts),
        attempts=[_attempt(recording, facts, slot, a) for a in attempts if only_attempt in (None, a)],
        reward=ready.message.reward if ready else None,
        rejected=(ready.message.reason or ready.message.outcome.value) if ready and ready.message.rejected else "",
        rows=[plain(row) for row in ready.message.rows] if ready else [],
    )


def _prompt(recording: Recording, facts: GroupFacts) -> Plain:
    if facts.issued is None or facts.issued.message.prompt is None:
        return None
    try:
        return opened_json(recording.payload(facts.issued.message.prompt))
    except (BrokerError, SchemaError) as error:
        return f"(can't be read: {error})"


def _attempt(recording: Recording, facts: GroupFacts, slot: int, attempt: int) -> Attempt:
    ended = facts.ended.get((slot, attempt))
    launched = [launch.message.session for key, launch in facts.launched.items() if key[:2] == (slot, attempt)]
    session = ended.message.session if ended and ended.message.session else (launched[-1] if launched else "")
    sessions = dict.fromkeys([*launched, session] if session else launched)
    calls = [
        _call(recording, call.message) for name in sessions for _, call in sorted(facts.calls.get(name, {}).items())
    ]
    return Attempt(
        attempt=attempt,
        session=session,
        outcome=ended.message.outcome.value if ended else "not ended",
        status=ended.message.status if ended else "",
        score=ended.message.score if ended else None,
        error=shown_error(ended.message) if ended else "",
        calls=calls,
    )


def _call(recording: Recording, call: InteractionRecorded) -> Call:
    problem = ""
    tokens: InteractionTokens | None = None
    try:
        tokens = msgspec.msgpack.decode(recording.payload(call.tokens), type=InteractionTokens)
    except (BrokerError, SchemaError, msgspec.MsgspecError) as error:
        problem = str(error)
    return Call(
        session=call.session,
        ordinal=call.ordinal,
        parent=call.parent,
        versions=list(dict.fromkeys(tokens.versions.values.as_numpy().tolist())) if tokens else [],
        num_context=call.num_context,
        num_prompt=call.num_prompt,
        num_completion=call.num_completion,
        finish_reason=call.finish_reason.value,
        trainable=call.trainable,
        untrainable_reason=call.untrainable_reason,
        temperature=call.temperature,
        protocol=call.protocol,
        messages=opened_json(tokens.messages_json) if tokens else None,
        prompt_ids=tokens.prompt_ids.as_numpy().tolist() if tokens else [],
        completion_ids=tokens.completion_ids.as_numpy().tolist() if tokens else [],
        logprobs=tokens.logprobs.as_numpy().tolist() if tokens else [],
        problem=problem,
    )
