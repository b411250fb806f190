"""The life of a step: assembled, trained, published, loaded."""

from __future__ import annotations

from broker.errors import BrokerError
from ops.logtools.facts import At, StepFacts
from ops.logtools.lives import Event, Fate, Life
from ops.logtools.names import Subject
from ops.logtools.plain import Plain, duration
from ops.logtools.slot_life import event
from ops.logtools.sources import LogSource
from schemas.errors import SchemaError
from schemas.messages.training import StepAssembled, StepTrained


async def step_life(source: LogSource, subject: Subject, steps: StepFacts) -> Life:
    """What became of a step."""
    number = subject.step or 0
    assembled, trained = steps.assembled.get(number), steps.trained.get(number)
    published = steps.published.get(number)
    events: list[Event] = []
    facts: dict[str, Plain] = {}
    problems: list[str] = []
    fate, verdict, waits_for = Fate.UNKNOWN, "is not on the log", ""
    if assembled is not None:
        events.append(_assembled_event(assembled, steps.assembled.get(number - 1)))
        facts = _assembled_facts(assembled.message)
        fate, verdict, waits_for = Fate.OPEN, "assembled", "the trainer"
        try:
            await source.payload(assembled.message.manifest)
        except (BrokerError, SchemaError) as error:
            problems.append(f"its manifest can't be read: {error}")
    if trained is not None:
        done = trained.message
        events.append(_trained_event(trained, assembled))
        facts["stats"] = dict[str, Plain](sorted(done.stats.items()))
        fate = Fate.DROPPED if done.skipped else Fate.TRAINED
        verdict = f"no update was made: {done.skipped}" if done.skipped else f"trained; it made version {number}"
        waits_for = "" if published is not None else "weight broadcast"
    if published is not None:
        before_s = trained.time_s if trained else None
        events.append(event(published, "weights published", f"version {number}", "", before_s, "weight broadcast"))
        for loaded in steps.loaded:
            if loaded.message.version == number:
                detail = f"by {loaded.message.engine} in {duration(loaded.message.seconds)}"
                events.append(event(loaded, "weights loaded", detail, "", published.time_s, "the engine"))
    events.extend(_ignored_event(late) for late in steps.superseded if late.message.step == number)
    return Life(
        name=subject.name,
        kind=subject.kind.value,
        run=source.run,
        fate=fate,
        verdict=verdict,
        waits_for=waits_for,
        facts=facts,
        events=sorted(events, key=lambda found: found.sequence),
        problems=problems,
    )


def _assembled_event(assembled: At[StepAssembled], before: At[StepAssembled] | None) -> Event:
    message = assembled.message
    detail = (
        f"{len(message.groups)} groups, {message.num_rows} rows, {message.num_tokens} tokens, "
        f"{message.num_mini_batches} mini-batch{'' if message.num_mini_batches == 1 else 'es'}, mean reward {message.mean_reward:g}, "
        f"{len(message.dropped)} group{'s' * (len(message.dropped) != 1)} dropped on the way"
    )
    return event(assembled, "assembled", detail, "", before.time_s if before else None, "enough usable groups")


def _assembled_facts(message: StepAssembled) -> dict[str, Plain]:
    return {
        "groups": list(message.groups),
        "dropped": [{"group": d.group, "stream": d.stream, "reason": d.reason} for d in message.dropped],
        "num_rows": message.num_rows,
        "staleness": message.step - 1 - message.min_version,
        "mean_reward": message.mean_reward,
    }


def _ignored_event(late: At[StepTrained]) -> Event:
    done = late.message
    detail = f"generation {done.generation}, superseded before it said so: ignored by all, weights {done.digest}"
    return event(late, "trained too late", detail, "", None, "")


def _trained_event(trained: At[StepTrained], assembled: At[StepAssembled] | None) -> Event:
    done = trained.message
    detail = f"generation {done.generation}, {duration(done.seconds)} on {done.world_size} rank{'' if done.world_size == 1 else 's'}, weights {done.digest}"
    detail += f", no update: {done.skipped}" if done.skipped else ""
    return event(trained, "trained", detail, "", assembled.time_s if assembled else None, "the trainer")
