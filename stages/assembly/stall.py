"""The stall rule: a run that adds nothing to train ends with an error instead of burning compute in silence.

It ends when at least `rounds` rounds of closed groups AND `seconds` of logical time added no trainable group. Both,
so that neither a burst of fast rejects nor a slow start ends a run. A round is as many closed groups as a step needs.
While a run is paused its time stands still, and a new start of the run counts anew: whoever mended the cause gets the
full time again. Pure; time is what ticks say. The verdict is a note in the state and stops no fold: a log that holds a
stall can be folded past it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class StallSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Both bounds must be passed."""

    rounds: int = 8
    seconds: float = 1800.0
    warn_every_s: float = 60.0


class StallState(msgspec.Struct, kw_only=True):
    """What happened since a trainable group was last added."""

    num_closed: int = 0
    reasons: dict[str, int] = {}
    """reason → groups dropped for it."""
    since_s: float | None = None
    """Logical time of the first tick after the last trainable group; None before a tick."""
    now_s: float = 0.0
    warned_s: float | None = None
    warning: str = ""
    """The latest warning; empty when trainable groups come."""
    ended: str = ""
    """Why the run has to end; empty while it need not."""
    paused: bool = False


class Verdict(StrEnum):
    """What a tick says about the run."""

    FINE = "fine"
    WARN = "warn"
    END = "end"


def added(state: StallState) -> None:
    """A trainable group was added: count anew from now."""
    state.num_closed = 0
    state.reasons = {}
    state.since_s = state.now_s
    state.warned_s = None
    state.warning = ""
    state.ended = ""


def restarted(state: StallState) -> None:
    """The run was started again, perhaps mended: count anew from now."""
    added(state)


def dropped(state: StallState, reason: str) -> None:
    """A group was closed that adds nothing."""
    state.num_closed += 1
    state.reasons[reason] = state.reasons.get(reason, 0) + 1


def ticked(state: StallState, now_s: float, groups_per_round: int, settings: StallSettings) -> Verdict:
    """Time went on. A warning is given at most once every `warn_every_s`."""
    passed_s = max(0.0, now_s - state.now_s)
    state.now_s += passed_s
    if state.since_s is None:
        state.since_s = state.now_s
    if state.paused:
        state.since_s += passed_s
        return Verdict.FINE
    rounds = state.num_closed // groups_per_round
    if rounds < 1:
        return Verdict.FINE
    if rounds >= settings.rounds and state.now_s - state.since_s >= settings.seconds:
        state.ended = state.warning = explain(state, groups_per_round)
        return Verdict.END
    if state.warned_s is None or state.now_s - state.warned_s >= settings.warn_every_s:
        state.warned_s = state.now_s
        state.warning = explain(state, groups_per_round)
        return Verdict.WARN
    return Verdict.FINE


_CAUSES = {
    "zero_spread": "every answer to a prompt gets the same reward (too easy, too hard, or a broken grader)",
    "accuracy": "the accuracy bounds fit no prompt",
    "stale": "rows are older than max_staleness allows when they are used (too few groups_per_step, or slow rollouts)",
    "too_few_usable": "slots are rejected or missing: look at their reasons (broken task, engine or Arena away)",
    "incomplete": "drop_incomplete_groups drops whatever has one rejected slot",
    "masked": "no row has a trained token (all truncated, or calls with settings that are kept out of training)",
}


def explain(state: StallState, groups_per_round: int) -> str:
    """What happened, with counts, the most frequent reason first, and the likely causes."""
    ordered = sorted(state.reasons.items(), key=lambda item: (-item[1], item[0]))
    counts = ", ".join(f"{reason}: {count}" for reason, count in ordered)
    causes = "; ".join(_CAUSES[reason.split(":")[0]] for reason, _ in ordered if reason.split(":")[0] in _CAUSES)
    seconds = 0.0 if state.since_s is None else state.now_s - state.since_s
    return (
        f"no trainable group for {seconds:.0f} s and {state.num_closed // groups_per_round} rounds "
        f"({state.num_closed} groups closed: {counts})" + (f". Likely: {causes}" if causes else "")
    )
