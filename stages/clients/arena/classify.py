"""Whose doing an episode's end was: the failure table as one pure function.

A reward may only be learned from where the policy can have caused it; anything doubtful is rejected, never guessed.
"""

from __future__ import annotations

import msgspec

from schemas.messages.rollout import EpisodeClass
from stages.clients.arena.receipts import Receipt, ReceiptVerdict
from stages.clients.arena.wire import FAILED_STATUSES, SUCCESS_STATUSES

LOCAL_WAIT_CANCELLED = "LOCAL_WAIT_CANCELLED"
LOCAL_WAIT_TIMEOUT = "LOCAL_WAIT_TIMEOUT"
LOCAL_ERROR = "LOCAL_ERROR"
LAUNCH_REFUSED = "LOCAL_LAUNCH_REFUSED"
POLL_REFUSED = "LOCAL_POLL_REFUSED"
"""Statuses of our own, in the audit only."""

_SYSTEM_STATUSES = frozenset(("CANCELLED", "COLLECT_FAILED", "EVAL_FAILED", "FAILED", "SETUP_FAILED"))
_POLICY_STATUSES = frozenset(("TIMEOUT", "NO_OUTPUT"))


class EpisodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an episode at its end."""

    status: str | None
    """The Arena's terminal status; None where there is none (our own error, connection, wait)."""
    score: float | None = None
    num_interactions: int = 0
    """Model calls that the gateway recorded in the session."""
    context_overflow: bool = False
    """The gateway's typed context overflow happened in the session."""
    system_error: str = ""
    """The gateway itself saw a system error in the session."""
    receipt: Receipt | None = None
    """The task's own receipt; None where the deployment gives none or none was asked for."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The class of an episode, and what follows from it."""

    outcome: EpisodeClass
    reason: str
    score: float | None
    """The score to train on before the reward's mapping: 0 for the model's own failures, None when rejected."""
    retry: bool
    """Worth another attempt, within the slot's budget."""

    @property
    def kept(self) -> bool:
        """Whether the episode may be trained on."""
        return self.outcome in (EpisodeClass.SCORED, EpisodeClass.MODEL)


def classify(facts: EpisodeFacts) -> Verdict:
    """Put an episode into its class; the rules in their order of precedence."""
    if facts.system_error:
        return _rejected(EpisodeClass.SYSTEM, f"gateway: {facts.system_error}", retry=True)
    status = facts.status
    if status is None or status not in SUCCESS_STATUSES | FAILED_STATUSES:
        return _rejected(EpisodeClass.SYSTEM, "no terminal result", retry=True)
    if status in SUCCESS_STATUSES:
        if facts.score is None:
            return _rejected(EpisodeClass.UNKNOWN, f"{status} without a score", retry=False)
        return Verdict(outcome=EpisodeClass.SCORED, reason=status, score=facts.score, retry=False)
    if status in _SYSTEM_STATUSES:
        return _rejected(EpisodeClass.SYSTEM, status, retry=True)
    if facts.num_interactions < 1:
        return _rejected(EpisodeClass.UNKNOWN, f"{status} without a model call", retry=False)
    if status in _POLICY_STATUSES:
        return _models_own(status)
    return _harness_failed(facts)


def _harness_failed(facts: EpisodeFacts) -> Verdict:
    """A receipt that conflicts or can't be read is never rescued by a looser rule, the overflow included."""
    verdict = facts.receipt.verdict if facts.receipt is not None else ReceiptVerdict.ABSENT
    match verdict:
        case ReceiptVerdict.MALFORMED | ReceiptVerdict.CONFLICTING | ReceiptVerdict.OTHER:
            return _rejected(EpisodeClass.UNKNOWN, f"HARNESS_FAILED, receipt {verdict.value}", retry=False)
        case ReceiptVerdict.MODEL:
            kind = facts.receipt.kind if facts.receipt is not None else ""
            return _models_own(f"HARNESS_FAILED: {kind}")
        case ReceiptVerdict.ABSENT:
            if facts.context_overflow:
                return _models_own("HARNESS_FAILED: context overflow")
            return _rejected(EpisodeClass.UNKNOWN, "HARNESS_FAILED without a named cause", retry=False)


def _models_own(reason: str) -> Verdict:
    return Verdict(outcome=EpisodeClass.MODEL, reason=reason, score=0.0, retry=False)


def _rejected(outcome: EpisodeClass, reason: str, *, retry: bool) -> Verdict:
    return Verdict(outcome=outcome, reason=reason, score=None, retry=retry)
