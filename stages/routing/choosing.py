"""Which engine gets a request. Pure.

may take it:  in service and confirmed the version that the request needs
has room:     fewer of our requests in it than its limit
home:         the engine of the session's former calls: it holds their prefix in its cache
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as the choice sees it."""

    name: str
    version: int
    """Weight version that it confirmed."""
    in_flight: int
    """Requests of this router in it."""
    others: int = 0
    """Requests of other gateways in it, as it told last."""
    limit: int
    """Requests of this router that it may have."""
    last_chosen: int = 0
    """Number of the choice that fell on it last: equally loaded engines take turns."""
    kept_away: str = ""
    """Why it takes nothing now; empty: it takes requests."""

    @property
    def load(self) -> float:
        """Requests per allowed request: 1 = full."""
        return (self.in_flight + self.others) / max(self.limit, 1)

    @property
    def has_room(self) -> bool:
        """Whether one more of our requests fits."""
        return self.in_flight < self.limit


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, or why there is none."""

    name: str = ""
    """Empty: wait."""
    reason: str = ""
    full: bool = False
    """There are engines that may take it and none has room."""


def choose(candidates: Sequence[Candidate], *, min_version: int, home: str = "", slack: float = 0.25) -> Choice:
    """The session's home unless it is away, too old, full or overloaded; else the least loaded engine.

    Among equally loaded ones the newest weights win, then the one that was chosen longest ago, then the name.
    """
    able = [one for one in candidates if not one.kept_away and one.version >= min_version]
    free = [one for one in able if one.has_room]
    if not free:
        return Choice(reason=_why_none(candidates, able, min_version), full=bool(able))
    least = min(free, key=lambda one: (one.load, -one.version, one.last_chosen, one.name))
    at_home = next((one for one in free if one.name == home), None)
    if at_home is not None and at_home.load <= least.load + slack:
        return Choice(name=at_home.name)
    return Choice(name=least.name)


def _why_none(candidates: Sequence[Candidate], able: Sequence[Candidate], min_version: int) -> str:
    if able:
        return "every engine is full: " + ", ".join(f"{one.name} {one.in_flight}/{one.limit}" for one in able)
    wanted = f"an engine with version {min_version} or newer" if min_version else "an engine"
    if not candidates:
        return f"{wanted}: none has joined"
    found = "; ".join(
        f"{one.name} {one.kept_away}" if one.kept_away else f"{one.name} serves version {one.version}"
        for one in candidates
    )
    return f"{wanted}: {found}"
