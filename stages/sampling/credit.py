"""How many groups may be issued now: pure.

capacity = min(max_concurrent - running, (max_staleness + 1)·groups_per_step - (running + waiting))

running = issued and not closed; waiting = closed, usable and in no trained step. There is no lifetime counter, so there
is nothing to reset on resume: both counts are folded from the log.
"""

from __future__ import annotations

import msgspec


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    """A number of groups and what holds it down."""

    groups: int
    bound_by: str
    """`max_concurrent_groups`, `max_staleness`, `end of run`, `paused`, `draining`, `store full` or `streams`."""


def available(
    *,
    running: int,
    waiting: int,
    groups_per_step: int,
    max_staleness: int | None,
    max_concurrent: int,
    full: bool = False,
    room: int | None = None,
    still_needed: int | None = None,
) -> Credit:
    """Groups that may be issued now (≥ 0), in groups.

    Args:
        running: issued and not closed.
        waiting: closed, usable, in no trained step.
        max_staleness: None where nothing is trained: no group goes stale.
        max_concurrent: groups that may run at once.
        full: the run's store is nearly full: only a step that is begun gets the groups that it still misses, since what it
            holds can be purged only when it is trained.
        room: more groups that the store has room for, beside running and waiting ones. Where they are trained in whole steps a part
            of one would keep its room for ever, so a step that is begun gets its groups. None = nobody said.
        still_needed: groups that the rest of the run can train, beyond running and waiting; None = no end in sight.
    """
    limits = [
        (max_concurrent - running, "max_concurrent_groups"),
    ]
    if max_staleness is not None:
        limits.append(((max_staleness + 1) * groups_per_step - (running + waiting), "max_staleness"))
    if full:
        begun = running + waiting
        limits.append((groups_per_step - begun if begun else 0, "store full"))
    if room is not None:
        limits.append(
            (_room_left(room, running + waiting, groups_per_step, trains=max_staleness is not None), "store full")
        )
    if still_needed is not None:
        limits.append((still_needed, "end of run"))
    groups, bound_by = min(limits, key=lambda limit: limit[0])
    return Credit(groups=max(0, groups), bound_by=bound_by)


def _room_left(room: int, begun: int, groups_per_step: int, *, trains: bool) -> int:
    if not trains:
        return room
    missing = groups_per_step - begun if 0 < begun < groups_per_step else 0
    return max((begun + room) // groups_per_step * groups_per_step - begun, missing)


def what_frees(credit: Credit, *, running: int, untrained_step: int | None) -> str:
    """Which message gives credit back next, for status; empty where only a person or the end of the run does.

    Args:
        running: groups that are issued and not closed.
        untrained_step: the first step that is assembled and not trained.
    """
    closing = f"group.closed of one of {running} running groups"
    match credit.bound_by:
        case "max_concurrent_groups":
            return closing
        case "max_staleness":
            return closing if untrained_step is None else f"step.trained.{untrained_step}"
        case "store full":
            return "a later run.retain"
        case "paused" | "draining":
            return "`headrace resume`"
        case _:
            return ""
