"""`headrace why`: the life of one thing, from a live log or a recording."""

from __future__ import annotations

import msgspec

from broker.errors import BrokerError
from ops.logtools.facts import GroupFacts, StepFacts, group_facts, step_facts
from ops.logtools.lives import Event, Fate, Life
from ops.logtools.names import Kind, Subject
from ops.logtools.plain import Plain, duration
from ops.logtools.row_places import RowPlace, rows_of
from ops.logtools.slot_life import (
    dead_events,
    event,
    group_fate,
    session_events,
    slot_events,
    slot_fate,
    slot_waits_for,
    slots_text,
)
from ops.logtools.sources import LogSource
from ops.logtools.step_life import step_life
from schemas.errors import SchemaError
from schemas.messages.training import Manifest


async def why(source: LogSource, subject: Subject) -> Life:
    """Tell a thing's whole life."""
    steps = await step_facts(source)
    if subject.kind is Kind.STEP:
        return await step_life(source, subject, steps)
    facts = await group_facts(source, subject.group)
    rows, problems = await _rows(source, facts, steps)
    problems += [f"sequence {told.record.sequence} can't be read: {told.error}" for told in facts.unreadable]
    match subject.kind:
        case Kind.GROUP:
            return _group_life(source, subject, facts, steps, rows, problems)
        case Kind.SESSION:
            return _session_life(source, subject, facts, steps, problems)
        case _:
            return _slot_life(source, subject, facts, steps, rows, problems)


async def _rows(source: LogSource, facts: GroupFacts, steps: StepFacts) -> tuple[list[RowPlace], list[str]]:
    """The group's rows in the manifest of its step; what went wrong reading it."""
    step = steps.step_of(facts.group)
    if step is None:
        return [], []
    try:
        manifest = msgspec.msgpack.decode(await source.payload(step.message.manifest), type=Manifest)
    except (BrokerError, SchemaError, msgspec.MsgspecError) as error:
        return [], [f"the manifest of step {step.message.step} can't be read: {error}"]
    return rows_of(manifest, facts.group), []


def _slot_life(
    source: LogSource, subject: Subject, facts: GroupFacts, steps: StepFacts, rows: list[RowPlace], problems: list[str]
) -> Life:
    slot = subject.slot or 0
    slots = facts.slots()
    if slots and slot not in slots:
        verdict = f"group {facts.group} has no slot {slot}, it has {slots_text(slots)}"
        return _life(source, subject, Fate.UNKNOWN, verdict, "", facts, [], problems)
    fate, verdict, waits_for = slot_fate(facts, steps, slot)
    own = [row for row in rows if row.slot == slot]
    if subject.kind is Kind.ROW:
        own = [row for row in own if row.row == subject.name]
    ready = facts.ready.get(slot)
    if subject.kind is Kind.ROW and ready is not None and fate in (Fate.TRAINED, Fate.OPEN):
        has = any(row.row == subject.name for row in ready.message.rows)
        if not has:
            fate, verdict, waits_for = (
                Fate.UNKNOWN,
                f"slot {slot} gave {len(ready.message.rows)} rows, none of this name",
                "",
            )
    events = _issue_events(facts) + slot_events(facts, slot)
    if subject.attempt is not None:
        other = {f"slot {slot} attempt {a}" for s, a in facts.requested if s == slot and a != subject.attempt}
        sessions = {
            launch.message.session for key, launch in facts.launched.items() if key[:2] != (slot, subject.attempt)
        }
        events = [found for found in events if found.who not in other | sessions]
        if (slot, subject.attempt) not in facts.requested and (slot, subject.attempt) not in facts.ended:
            fate, verdict, waits_for = Fate.UNKNOWN, f"attempt {subject.attempt} is not on the log", ""
    if own:
        verdict = f"{verdict}; {_rows_text(own)}"
    after = ready.time_s if ready is not None else None
    if ready is None or not (facts.is_late(slot) or ready.message.rejected):
        events += _group_end_events(facts, steps, after, slot)
    elif facts.closed is not None:
        events += _closed_events(facts, after, slot)
    return _life(source, subject, fate, verdict, waits_for, facts, events, problems, rows=own)


def _group_life(
    source: LogSource, subject: Subject, facts: GroupFacts, steps: StepFacts, rows: list[RowPlace], problems: list[str]
) -> Life:
    fate, verdict, waits_for = group_fate(facts, steps)
    events = _issue_events(facts)
    for slot in facts.slots():
        events += slot_events(facts, slot)
    events += dead_events(facts, None)
    last = max((at.time_s for at in facts.ready.values()), default=None)
    events += _group_end_events(facts, steps, last, None)
    if rows:
        verdict = f"{verdict}; {_rows_text(rows)}"
    slots: list[Plain] = []
    for slot in facts.slots():
        slot_end, text, slot_waits = slot_fate(facts, steps, slot)
        slots.append({"slot": slot, "fate": slot_end.value, "verdict": text, "waits_for": slot_waits})
    if fate is Fate.OPEN and facts.closed is None:
        open_slots = [slot for slot in facts.slots() if slot not in facts.ready]
        waits_for = "; ".join(f"slot {slot}: {slot_waits_for(facts, slot) or 'unknown'}" for slot in open_slots[:8])
        waits_for += f"; {len(open_slots) - 8} more" if len(open_slots) > 8 else ""
    return _life(source, subject, fate, verdict, waits_for, facts, events, problems, rows=rows, slots=slots)


def _session_life(
    source: LogSource, subject: Subject, facts: GroupFacts, steps: StepFacts, problems: list[str]
) -> Life:
    session, slot = subject.name, subject.slot or 0
    key = (slot, subject.attempt or 0, subject.launch_try or 0)
    launch = facts.launched.get(key)
    events: list[Event] = []
    if launch is not None:
        events.append(event(launch, "launched", f"route {launch.message.route or 'unknown'}", session, None, ""))
        accepted = facts.accepted.get(key)
        if accepted is not None:
            detail = f"task {accepted.message.task_id}"
            events.append(event(accepted, "accepted", detail, session, launch.time_s, "the Arena to take the launch"))
    events += session_events(facts, session, launch.time_s if launch is not None else None)
    ended = facts.ended.get(key[:2])
    counts = ended is not None and ended.message.session == session
    fate, verdict, waits_for = slot_fate(facts, steps, slot)
    if launch is None and not facts.calls.get(session) and session not in facts.opened:
        fate, verdict, waits_for = Fate.UNKNOWN, "is not on the log", ""
    elif ended is not None and not counts:
        fate = Fate.DROPPED
        verdict = f"its attempt ended with {ended.message.session or 'no session'}, so these calls are not trained"
        waits_for = ""
    elif ended is not None and not ended.message.final:
        fate, verdict, waits_for = (
            Fate.DROPPED,
            f"its attempt failed ({ended.message.status}); another attempt followed",
            "",
        )
    return _life(source, subject, fate, verdict, waits_for, facts, events, problems)


def _issue_events(facts: GroupFacts) -> list[Event]:
    if facts.issued is None:
        return []
    issued = facts.issued.message
    detail = f"stream {issued.stream}, row {issued.data_id}, {issued.num_slots} slots, pass {issued.epoch + 1}"
    detail += f", version {issued.min_version} or later" if issued.min_version else ""
    detail += ", evaluation" if issued.evaluation else ""
    detail += f", closed by tick {issued.deadline_tick} at the latest" if issued.deadline_tick is not None else ""
    return [event(facts.issued, "issued", detail, facts.group, None, "")]


def _closed_events(facts: GroupFacts, after: float | None, slot: int | None) -> list[Event]:
    closed = facts.closed
    if closed is None:
        return []
    message = closed.message
    detail = f"{message.num_usable} of {message.num_slots} slots usable"
    detail += f", {message.num_rejected} rejected" if message.num_rejected else ""
    detail += f", {message.num_missing} missing" if message.num_missing else ""
    detail += "" if message.usable else f"; dropped: {message.reason}"
    waited_for = "assembly" if slot is None else "the other slots of its group"
    return [event(closed, "group closed", detail, facts.group, after, waited_for)]


def _group_end_events(facts: GroupFacts, steps: StepFacts, after: float | None, slot: int | None) -> list[Event]:
    events = _closed_events(facts, after, slot)
    before = facts.closed.time_s if facts.closed is not None else after
    dropped = steps.drop_of(facts.group)
    if dropped is not None:
        at, reason = dropped
        detail = f"{reason}, before step {at.message.step}"
        events.append(event(at, "group dropped", detail, facts.group, before, "a step"))
    step = steps.step_of(facts.group)
    if step is None:
        return events
    number = step.message.step
    detail = f"{len(step.message.groups)} groups, {step.message.num_rows} rows"
    events.append(event(step, f"in step {number}", detail, facts.group, before, "enough usable groups for a step"))
    trained = steps.trained.get(number)
    if trained is not None:
        detail = (
            f"no update: {trained.message.skipped}"
            if trained.message.skipped
            else f"{duration(trained.message.seconds)} of work"
        )
        events.append(event(trained, f"step {number} trained", detail, "", step.time_s, "the trainer"))
        published = steps.published.get(number)
        if published is not None:
            what = f"version {number} published"
            events.append(event(published, what, "", "", trained.time_s, "weight broadcast"))
    return events


def _rows_text(rows: list[RowPlace]) -> str:
    first = rows[0]
    if len(rows) == 1:
        return (
            f"advantage {first.advantage:+.4g}, loss weight {first.loss_weight:.4g}, {first.num_loss_tokens} trained "
            f"tokens, staleness {first.staleness}"
        )
    low, high = min(row.advantage for row in rows), max(row.advantage for row in rows)
    return f"{len(rows)} rows, advantages {low:+.4g} to {high:+.4g}"


def _life(
    source: LogSource,
    subject: Subject,
    fate: Fate,
    verdict: str,
    waits_for: str,
    facts: GroupFacts,
    events: list[Event],
    problems: list[str],
    *,
    rows: list[RowPlace] | None = None,
    slots: list[Plain] | None = None,
) -> Life:
    found: dict[str, Plain] = {}
    if facts.issued is not None:
        found = {"stream": facts.issued.message.stream, "data_id": facts.issued.message.data_id}
    if slots:
        found["slots"] = slots
    if rows:
        found["rows"] = [msgspec.to_builtins(row) | {"staleness": row.staleness} for row in rows]
    return Life(
        name=subject.name,
        kind=subject.kind.value,
        run=source.run,
        fate=fate,
        verdict=verdict,
        waits_for=waits_for,
        facts=found,
        events=sorted(events, key=lambda one: one.sequence),
        problems=problems,
    )
