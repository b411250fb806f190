"""The events of one slot, from its request to its trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from ops.logtools.facts import At, GroupFacts, StepFacts
from ops.logtools.lives import Event, Fate
from schemas.config_arena import StreamRunner
from schemas.messages.rollout import EpisodeEnded, InteractionRecorded, SessionRewarded, Trajectory

M = TypeVar("M", bound=msgspec.Struct)
_MANY_CALLS: Final = 12


def slot_events(facts: GroupFacts, slot: int) -> list[Event]:
    """Everything that happened to a slot, in the order of the log."""
    events: list[Event] = []
    attempts = sorted({attempt for found, attempt in (*facts.requested, *facts.ended) if found == slot})
    before = facts.issued.time_s if facts.issued is not None else None
    for attempt in attempts:
        attempt_events = _attempt_events(facts, slot, attempt, before)
        events += attempt_events
        before = attempt_events[-1].time_s if attempt_events else before
    ready = facts.ready.get(slot)
    if ready is not None:
        ended = [facts.ended[slot, attempt] for attempt in attempts if (slot, attempt) in facts.ended]
        events.append(__ready(ready, facts, slot, ended[-1].time_s if ended else None))
    events += dead_events(facts, slot)
    return sorted(events, key=lambda event: event.sequence)


def _attempt_events(facts: GroupFacts, slot: int, attempt: int, before: float | None) -> list[Event]:
    who = f"slot {slot} attempt {attempt}"
    events: list[Event] = []
    requested = facts.requested.get((slot, attempt))
    if requested is not None:
        what = "fan-out" if attempt == 0 else "the launch worker to ask for another attempt"
        events.append(event(requested, "requested", _requested(facts, slot, attempt), who, before, what))
        before = requested.time_s
    for launch in (launch for key, launch in facts.launched.items() if key[:2] == (slot, attempt)):
        tried = launch.message.launch_try
        detail = f"session {launch.message.session}" + (f", try {tried}" if tried else "")
        if launch.message.route == StreamRunner.ONLINE:
            detail += f", task {launch.message.model_name}" if launch.message.model_name else ""
            events.append(event(launch, "claimed", detail, who, before, "a session to claim it"))
        else:
            events.append(event(launch, "launched", detail, who, before, "a launch worker with a free place"))
        before = launch.time_s
        accepted = facts.accepted.get((slot, attempt, tried))
        if accepted is not None:
            detail = f"task {accepted.message.task_id}"
            events.append(event(accepted, "accepted", detail, who, before, "the Arena to take the launch"))
            before = accepted.time_s
        session = session_events(facts, launch.message.session, before)
        events += session
        before = session[-1].time_s if session else before
    ended = facts.ended.get((slot, attempt))
    if ended is not None:
        events.append(event(ended, "ended", _ended(ended.message), who, before, "the agent and the grader"))
    return events


def session_events(facts: GroupFacts, session: str, before: float | None) -> list[Event]:
    """What a session did: opened, its calls, closed."""
    events: list[Event] = []
    for opened in facts.opened.get(session, []):
        detail = f"by gateway {opened.message.gateway}"
        if opened.message.min_version:
            detail += f", version {opened.message.min_version} or later"
        events.append(event(opened, "session opened", detail, session, before, "the harness to start"))
        before = opened.time_s
    calls = [call for _, call in sorted(facts.calls.get(session, {}).items())]
    for number, call in enumerate(calls):
        if len(calls) > _MANY_CALLS and _MANY_CALLS // 2 <= number < len(calls) - _MANY_CALLS // 2:
            if number == _MANY_CALLS // 2:
                events.append(_skipped(calls[number : len(calls) - _MANY_CALLS // 2], session, before))
            before = call.time_s
            continue
        waited_for = "the agent and the engine"
        events.append(event(call, f"call {call.message.ordinal}", call_text(call.message), session, before, waited_for))
        before = call.time_s
    closed = facts.session_closed.get(session)
    if closed is not None:
        message = closed.message
        recorded = len(calls)
        detail = "1 call" if message.num_interactions == 1 else f"{message.num_interactions} calls"
        if recorded != message.num_interactions:
            detail += f", {recorded} of them on the log"
        detail += ", context overflow" if message.context_overflow else ""
        detail += f", gateway error: {message.system_error}" if message.system_error else ""
        detail += f", {message.late_drops} calls came too late" if message.late_drops else ""
        detail += ", lossy recording" if message.lossy else ""
        events.append(event(closed, "session closed", detail, session, before, "the agent to end"))
    for _, rewarded in sorted(facts.rewarded.get(session, {}).items()):
        events.append(event(rewarded, "reward set", _reward_text(rewarded.message), session, before, "the service"))
    return sorted(events, key=lambda event: event.sequence)


def _reward_text(rewarded: SessionRewarded) -> str:
    """A reward in a line."""
    if rewarded.discard:
        return "discarded: the slot waits for another session"
    parts = [f"score {rewarded.score:g}"] if rewarded.score is not None else []
    parts += [_turn_rewards(len(rewarded.turn_rewards))] if rewarded.turn_rewards else []
    return ", ".join(parts) + ("" if rewarded.final else ", more may follow")


def call_text(call: InteractionRecorded) -> str:
    """One call in a line."""
    version = (
        f"version {call.min_version}"
        if call.min_version == call.max_version
        else f"versions {call.min_version}…{call.max_version}"
    )
    parent = "starts a chain" if call.parent is None else f"extends call {call.parent}"
    text = (
        f"{call.num_context + call.num_prompt} tokens in ({call.num_prompt} new), {call.num_completion} out, "
        f"{version}, {call.finish_reason.value}, {parent}"
    )
    return text if call.trainable else f"{text}, not trained ({call.untrainable_reason})"


def _skipped(calls: list[At[InteractionRecorded]], session: str, before: float | None) -> Event:
    out = sum(call.message.num_completion for call in calls)
    first, last = calls[0], calls[-1]
    return Event(
        sequence=first.sequence,
        time_s=first.time_s,
        what=f"calls {first.message.ordinal}…{last.message.ordinal}",
        detail=f"{len(calls)} calls, {out} tokens out",
        who=session,
        waited_s=None if before is None else max(0.0, last.time_s - before),
        waited_for="the agent and the engine",
    )


def _requested(facts: GroupFacts, slot: int, attempt: int) -> str:
    found = facts.requested[slot, attempt].message
    text = f"stream {found.stream}, row {found.data_id}"
    return text + (f", version {found.min_version} or later" if found.min_version else "")


def _ended(ended: EpisodeEnded) -> str:
    text = f"{ended.outcome.value}: {ended.status}"
    if ended.score is not None:
        text += f", score {ended.score:g}"
    if ended.turn_rewards:
        text += f", {_turn_rewards(len(ended.turn_rewards))}"
    if ended.reward_key:
        text += f" by {ended.reward_key}"
    if error := shown_error(ended):
        text += f", {error}"
    return text if ended.final else f"{text}; another attempt follows"


def __ready(ready: At[Trajectory], facts: GroupFacts, slot: int, before: float | None) -> Event:
    message = ready.message
    if message.rejected:
        what, detail = "rejected", message.reason or message.outcome.value
    else:
        what = "rewarded"
        tokens = sum(row.num_loss_tokens for row in message.rows)
        detail = f"reward {message.reward:g}" if message.reward is not None else "no reward"
        if message.score is not None and message.score != message.reward:
            detail += f" from score {message.score:g}"
        detail += f", {len(message.rows)} row{'s' * (len(message.rows) != 1)}, {tokens} trained tokens"
    if facts.is_late(slot):
        detail += "; too late, its group was closed before"
    return event(ready, what, detail, f"slot {slot}", before, "reward mapping")


def dead_events(facts: GroupFacts, slot: int | None) -> list[Event]:
    """Dead letters of a slot (None: of the group alone), their retries and drops."""
    events: list[Event] = []
    for letter in facts.letters_of(slot):
        message = letter.message
        topic = ".".join(message.subject.split(".")[2:4])
        reason = "given up" if message.reason == "attempts" else message.reason
        attempts = f"{message.attempts} attempt{'s' * (message.attempts != 1)}"
        detail = f"{topic} of sequence {message.sequence}: {reason} after {attempts}: {message.error}"
        events.append(event(letter, "dead letter", detail, message.stage, None, ""))
        own = (message.stage, message.sequence)
        for retry in facts.retries:
            if (retry.message.stage, retry.message.sequence) == own:
                detail = f"attempt {retry.message.attempt} asked for by a person"
                waited_for = "somebody to look at it"
                events.append(event(retry, "retried", detail, message.stage, letter.time_s, waited_for))
        for drop in facts.drops:
            if (drop.message.stage, drop.message.sequence) == own:
                detail = drop.message.reason or "no reason given"
                waited_for = "somebody to look at it"
                events.append(event(drop, "letter dropped", detail, message.stage, letter.time_s, waited_for))
    return events


def slot_fate(facts: GroupFacts, steps: StepFacts, slot: int) -> tuple[Fate, str, str]:
    """What became of a slot: fate, one sentence, what it waits for."""
    ready = facts.ready.get(slot)
    if ready is None:
        letters = facts.letters_of(slot)
        if letters:
            last = letters[-1].message
            return Fate.DEAD, f"given up by {last.stage} ({last.reason}): {last.error}", ""
        if facts.closed is not None:
            return Fate.DROPPED, "had not ended when its group was closed", ""
        waits_for = slot_waits_for(facts, slot)
        return (Fate.OPEN, "has not ended", waits_for) if waits_for else (Fate.UNKNOWN, "is not on the log", "")
    message = ready.message
    if message.rejected:
        return Fate.REJECTED, f"rejected ({message.outcome.value}): {message.reason or 'no reason given'}", ""
    if facts.is_late(slot):
        return Fate.LATE, "came after its group was closed and is not trained", ""
    if message.evaluation:
        return Fate.EVALUATED, f"evaluation, reward {_reward(message)}; never trained on", ""
    fate, verdict, waits_for = group_fate(facts, steps)
    return fate, f"reward {_reward(message)}; its group: {verdict}", waits_for


def slots_text(slots: Sequence[int]) -> str:
    """Which slots a group has, for people."""
    if len(slots) == 1:
        return f"slot {slots[0]} only"
    whole = list(slots) == list(range(slots[0], slots[-1] + 1))
    return f"slots {slots[0]} to {slots[-1]}" if whole else f"slots {', '.join(map(str, slots))}"


def shown_error(ended: EpisodeEnded) -> str:
    """What went wrong in an attempt; empty where nothing but its status says so."""
    return "" if ended.error == ended.status else ended.error


def _reward(message: Trajectory) -> str:
    return "none" if message.reward is None else f"{message.reward:g}"


def group_fate(facts: GroupFacts, steps: StepFacts) -> tuple[Fate, str, str]:
    """What became of a group: fate, one sentence, what it waits for."""
    step = steps.step_of(facts.group)
    if step is not None:
        number = step.message.step
        trained = steps.trained.get(number)
        if trained is not None and trained.message.skipped:
            return Fate.DROPPED, f"in step {number}, whose update was skipped: {trained.message.skipped}", ""
        if trained is not None:
            return Fate.TRAINED, f"trained in step {number}", ""
        return Fate.OPEN, f"assembled into step {number}", "the trainer"
    dropped = steps.drop_of(facts.group)
    if dropped is not None:
        return Fate.DROPPED, f"dropped before step {dropped[0].message.step}: {dropped[1]}", ""
    closed = facts.closed
    if closed is not None:
        message = closed.message
        if message.evaluation:
            return Fate.EVALUATED, "evaluation; never trained on", ""
        if not message.usable:
            return Fate.DROPPED, f"dropped when it closed: {message.reason}", ""
        return Fate.OPEN, "closed and usable", f"enough usable groups for step {max(steps.assembled, default=0) + 1}"
    if facts.issued is None:
        return Fate.UNKNOWN, "is not on the log", ""
    missing = [slot for slot in facts.slots() if slot not in facts.ready]
    names = ", ".join(str(slot) for slot in missing)
    return (
        Fate.OPEN,
        f"{len(missing)} of {len(facts.slots())} slots have not ended",
        f"slot{'s' * (len(missing) != 1)} {names}",
    )


def slot_waits_for(facts: GroupFacts, slot: int) -> str:
    """What an unfinished slot waits for now; empty if the log does not speak of it."""
    attempts = [attempt for found, attempt in facts.requested if found == slot]
    if not attempts:
        return "fan-out" if facts.issued is not None and slot < facts.issued.message.num_slots else ""
    attempt = max(attempts)
    ended = facts.ended.get((slot, attempt))
    if ended is not None:
        return "reward mapping" if ended.message.final else f"attempt {attempt + 1} to be asked for"
    launches = [launch for key, launch in facts.launched.items() if key[:2] == (slot, attempt)]
    if not launches:
        return "a launch worker with a free place (in an online stream: a session)"
    launch = launches[-1].message
    if launch.route == StreamRunner.ONLINE:
        calls = len(facts.calls.get(launch.session, {}))
        if launch.session not in facts.session_closed:
            return f"its service to go on with session {launch.session}, after {calls} calls"
        return f"its service to set the reward of session {launch.session}"
    if (slot, attempt, launch.launch_try) not in facts.accepted and launch.session not in facts.opened:
        return "the Arena to take the launch"
    if launch.session not in facts.opened:
        return "the harness to start its session"
    if launch.session not in facts.session_closed:
        return f"the agent and the engine, after {len(facts.calls.get(launch.session, {}))} calls"
    return "the Arena's result"


def event(
    at: At[M],
    what: str,
    detail: str,
    who: str,
    before: float | None,
    waited_for: str,
) -> Event:
    """Something on the log, with the wait since `before`."""
    waited = None if before is None else max(0.0, at.time_s - before)
    return Event(
        sequence=at.sequence,
        time_s=at.time_s,
        what=what,
        detail=detail,
        who=who,
        waited_s=waited,
        waited_for=waited_for if waited is not None else "",
    )


def _turn_rewards(number: int) -> str:
    return f"{number} turn reward{'s' * (number != 1)}"
