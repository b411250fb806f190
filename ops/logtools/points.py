"""Places of a recording as a person writes them: `step:12`, `seq:4711`, a time of day, `+90s` after its start."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

import msgspec

from broker.recording import Recording
from schemas.errors import ConfigError

_SPAN: Final = re.compile(r"\+(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a recording; every bound that is given holds."""

    after_sequence: int = 0
    to_sequence: int | None = None
    from_time_s: float | None = None
    to_time_s: float | None = None


def parse_stretch(recording: Recording, start: str | None, end: str | None) -> Stretch:
    """The part between two places. A step's part begins after the manifest of the step before it and ends with its own
    weights.

    Raises:
        ConfigError: no place, or one that the recording has not.
    """
    after, from_time = 0, None
    if start is not None:
        kind, value = _point(start, recording, "--from")
        match kind:
            case "step":
                after = recording.first_sequence_of_step(_existing(recording, int(value), "--from")) - 1
            case "seq":
                after = int(value) - 1
            case _:
                from_time = value
    last, to_time = None, None
    if end is not None:
        kind, value = _point(end, recording, "--to")
        match kind:
            case "step":
                last = recording.last_sequence_of_step(_existing(recording, int(value), "--to"))
            case "seq":
                last = int(value)
            case _:
                to_time = value
    return Stretch(after_sequence=after, to_sequence=last, from_time_s=from_time, to_time_s=to_time)


def _existing(recording: Recording, step: int, option: str) -> int:
    steps = sorted({mark.step for mark in recording.lookup.step_marks()})
    if step not in steps:
        found = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        raise ConfigError(f"{option}: step {step} is not in {recording.path}, which holds {found}")
    return step


def _point(text: str, recording: Recording, option: str) -> tuple[str, float]:
    kind, _, rest = text.partition(":")
    if kind in ("step", "seq") and rest.isdigit():
        return kind, int(rest)
    first = recording.lookup.messages[0][1].head.first_time_s if recording.lookup.messages else 0.0
    span = _SPAN.fullmatch(text)
    if span is not None:
        return "time", first + float(span[1]) * _UNIT_S[span[2] or "s"]
    try:
        day = datetime.fromtimestamp(first, tz=UTC).date().isoformat()
        moment = datetime.fromisoformat(text if "-" in text else f"{day}T{text}")
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r}: expected step:12, seq:4711, +90s, 14:03:20 or 2026-01-31T14:03:20 (UTC)"
        ) from error
    return "time", (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
