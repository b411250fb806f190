"""The failure table: every status × interactions × overflow × receipt × the gateway's own error."""

import itertools

import pytest

from schemas.messages.rollout import EpisodeClass
from stages.clients.arena.classify import EpisodeFacts, classify
from stages.clients.arena.receipts import Receipt, ReceiptVerdict, read_receipt
from stages.clients.arena.wire import FAILED_STATUSES, SUCCESS_STATUSES

SYSTEM_STATUSES = {"CANCELLED", "COLLECT_FAILED", "EVAL_FAILED", "FAILED", "SETUP_FAILED"}
RECEIPTS = [None, *(Receipt(verdict=verdict, kind="max_turns") for verdict in ReceiptVerdict)]
TABLE = list(itertools.product(
    [None, "PENDING", *sorted(SUCCESS_STATUSES | FAILED_STATUSES)], [0, 1, 7], [False, True], RECEIPTS, ["", "engine died"],
))  # fmt: skip


def _expected(status, interactions, overflow, receipt, system_error) -> EpisodeClass:
    verdict = receipt.verdict if receipt else ReceiptVerdict.ABSENT
    if system_error or status in (None, "PENDING"):
        return EpisodeClass.SYSTEM
    if status in SUCCESS_STATUSES:
        return EpisodeClass.SCORED
    if status in SYSTEM_STATUSES:
        return EpisodeClass.SYSTEM
    if status in ("TIMEOUT", "NO_OUTPUT"):
        return EpisodeClass.MODEL if interactions else EpisodeClass.UNKNOWN
    assert status == "HARNESS_FAILED"
    if not interactions:
        return EpisodeClass.UNKNOWN
    if verdict is ReceiptVerdict.MODEL or (verdict is ReceiptVerdict.ABSENT and overflow):
        return EpisodeClass.MODEL
    return EpisodeClass.UNKNOWN


@pytest.mark.parametrize(("status", "interactions", "overflow", "receipt", "system_error"), TABLE)
def test_the_class_table(status, interactions, overflow, receipt, system_error) -> None:
    facts = EpisodeFacts(
        status=status,
        score=0.25 if status in SUCCESS_STATUSES else None,
        num_interactions=interactions,
        context_overflow=overflow,
        receipt=receipt,
        system_error=system_error,
    )
    verdict = classify(facts)
    expected = _expected(status, interactions, overflow, receipt, system_error)
    assert verdict.outcome is expected
    assert verdict.score == {EpisodeClass.SCORED: 0.25, EpisodeClass.MODEL: 0.0}.get(expected)
    assert verdict.kept == (expected in (EpisodeClass.SCORED, EpisodeClass.MODEL))
    assert verdict.retry == (expected is EpisodeClass.SYSTEM)


def test_a_failed_status_with_a_score_does_not_earn_it() -> None:
    verdict = classify(EpisodeFacts(status="TIMEOUT", score=1.0, num_interactions=3))
    assert (verdict.outcome, verdict.score) == (EpisodeClass.MODEL, 0.0)
    assert classify(EpisodeFacts(status="FAILED", score=1.0, num_interactions=3)).score is None


def test_success_without_a_score_is_never_trained_on() -> None:
    assert not classify(EpisodeFacts(status="DONE", score=None, num_interactions=3)).kept


@pytest.mark.parametrize(("value", "verdict"), [
    (None, ReceiptVerdict.ABSENT),
    ({"error": {"phase": "agent", "type": "max_turns"}}, ReceiptVerdict.MODEL),
    ({"task_id": "t", "phase": "agent", "code": "PROMPT_TOO_LONG"}, ReceiptVerdict.MODEL),
    ({"data": {"error": {"phase": "agent", "type": "max_turns"}}}, ReceiptVerdict.MODEL),
    ({"error": {"phase": "agent", "type": "crash"}}, ReceiptVerdict.OTHER),
    ({"error": {"phase": "setup", "type": "image_pull"}}, ReceiptVerdict.OTHER),
    ({"error": {"phase": "setup", "type": "max_turns"}}, ReceiptVerdict.OTHER),
    ({"phase": "setup", "error": {"phase": "agent", "type": "max_turns"}}, ReceiptVerdict.CONFLICTING),
    ({"error": {"phase": "agent", "type": "max_turns", "code": "crash"}}, ReceiptVerdict.CONFLICTING),
    ({"error": {"phase": "agent", "type": "max_turns", "code": "prompt_too_long"}}, ReceiptVerdict.CONFLICTING),
    ({"task_id": "other", "error": {"phase": "agent", "type": "max_turns"}}, ReceiptVerdict.CONFLICTING),
    ([], ReceiptVerdict.MALFORMED),
    ("max_turns", ReceiptVerdict.MALFORMED),
    ({}, ReceiptVerdict.MALFORMED),
    ({"error": {"phase": "agent"}}, ReceiptVerdict.MALFORMED),
    ({"error": {"phase": 3, "type": "max_turns"}}, ReceiptVerdict.MALFORMED),
    ({"error": {"type": "max_turns"}}, ReceiptVerdict.MALFORMED),
])  # fmt: skip
def test_a_receipt_says_model_only_where_it_says_nothing_else(value, verdict) -> None:
    assert read_receipt(value, "t").verdict is verdict


def test_a_group_with_a_crashed_verifier_trains_on_the_other_three_only() -> None:
    outcomes = [("DONE", 1.0), ("DONE", 0.0), ("DONE", 0.0), ("EVAL_FAILED", None)]
    verdicts = [classify(EpisodeFacts(status=s, score=x, num_interactions=2)) for s, x in outcomes]
    kept = [verdict.score for verdict in verdicts if verdict.kept]
    mean = sum(kept) / len(kept)
    assert [score - mean for score in kept] == pytest.approx([0.666667, -0.333333, -0.333333], abs=1e-6)
    assert verdicts[3].score is None
