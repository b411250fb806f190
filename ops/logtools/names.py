"""What a person means by `g12`, `g0000012/3`, `g0000012-3-0-0`, `step 412`: a group, an episode, a session, a row, a step."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

import msgspec

from schemas.errors import InvalidIdError

_GROUP: Final = re.compile(r"g(\d+)")
_SESSION_PARTS: Final = 4


class Kind(StrEnum):
    """What can be asked about."""

    GROUP = "group"
    EPISODE = "episode"
    SESSION = "session"
    ROW = "row"
    STEP = "step"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """One thing of a run."""

    kind: Kind
    group: str = ""
    slot: int | None = None
    attempt: int | None = None
    launch_try: int | None = None
    row: int | None = None
    step: int | None = None

    @property
    def name(self) -> str:
        """How it is written."""
        match self.kind:
            case Kind.STEP:
                return f"step {self.step}"
            case Kind.GROUP:
                return self.group
            case Kind.EPISODE:
                return f"{self.group}/{self.slot}" + (f"/{self.attempt}" if self.attempt is not None else "")
            case Kind.SESSION:
                return f"{self.group}-{self.slot}-{self.attempt}-{self.launch_try}"
            case Kind.ROW:
                return f"{self.group}-{self.slot}-{self.row}"


def parse_name(text: str) -> Subject:
    """What `text` names. `session:`, `row:` … before it says which, where an id alone could be two things.

    Raises:
        InvalidIdError: nothing that a run has.
    """
    said, _, rest = text.strip().replace(" ", ":", 1).partition(":")
    kind = Kind(said) if rest and said in set(Kind) else None
    body = rest if kind is not None else text.strip()
    if body.isdigit() and kind in (None, Kind.STEP):
        return Subject(kind=Kind.STEP, step=int(body))
    parts = re.split(r"[/.-]", body)
    group = _group(parts[0])
    numbers = [int(part) for part in parts[1:] if part.isdigit()]
    if group is None or len(numbers) != len(parts) - 1 or kind is Kind.STEP or len(parts) > _SESSION_PARTS:
        raise InvalidIdError(
            f"{text!r}: expected a group (g0000012), an episode (g0000012/3 or g0000012/3/0), a session "
            "(g0000012-3-0-0), a row (g0000012-3-0) or a step (412, step:412)"
        )
    return _subject(group, numbers, kind, dashed="-" in body, text=text)


def _subject(group: str, numbers: list[int], kind: Kind | None, *, dashed: bool, text: str) -> Subject:
    match numbers:
        case [] if kind in (None, Kind.GROUP):
            return Subject(kind=Kind.GROUP, group=group)
        case [slot] if kind in (None, Kind.EPISODE):
            return Subject(kind=Kind.EPISODE, group=group, slot=slot)
        case [slot, row] if kind is Kind.ROW or (kind is None and dashed):
            return Subject(kind=Kind.ROW, group=group, slot=slot, row=row)
        case [slot, attempt] if kind in (None, Kind.EPISODE):
            return Subject(kind=Kind.EPISODE, group=group, slot=slot, attempt=attempt)
        case [slot, attempt, launch_try] if kind in (None, Kind.SESSION):
            return Subject(kind=Kind.SESSION, group=group, slot=slot, attempt=attempt, launch_try=launch_try)
        case _:
            raise InvalidIdError(f"{text!r}: has {len(numbers)} numbers after the group, which no {kind} has")


def _group(token: str) -> str | None:
    found = _GROUP.fullmatch(token)
    return f"g{int(found[1]):07d}" if found else None
