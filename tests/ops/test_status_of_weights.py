"""What status says of engines that did not get their weights, and of who still reads old ones."""

from __future__ import annotations

from ops.store_readers import StoreReaders
from ops.troubles import troubles
from pipeline.metrics import WorkerReport
from stages.weights.receive import READING_LABEL


def report(worker: str = "h:1", stage: str = "gateway", **labels: str) -> WorkerReport:
    return WorkerReport(run="r", stage=stage, worker=worker, unix_time_s=1.0, labels=labels)


def test_an_engine_in_quarantine_and_weights_that_were_refused_are_told_with_their_reason() -> None:
    found = troubles(
        [
            report("h:1", engine_state="quarantined: version 2: half loaded", weights_error="version 2: half loaded"),
            report("h:2", url="http://127.0.0.1:1"),
            report("h:3", weights_error="version 3: tensor b is missing"),
        ],
        now_s=1.0,
    )
    assert [str(one) for one in found] == [
        "engine quarantined: gateway h:1: quarantined: version 2: half loaded",
        "weights refused: gateway h:1: version 2: half loaded",
        "weights refused: gateway h:3: version 3: tensor b is missing",
    ]


def test_what_engines_fetch_from_the_store_is_known_from_their_reports_for_a_while() -> None:
    now_s = 0.0
    readers = StoreReaders(None, hold_s=60.0, now=lambda: now_s)  # pyright: ignore[reportArgumentType] - nothing is listened to
    readers.hear(report("a", **{READING_LABEL: "5-1"}))
    readers.hear(report("b", **{READING_LABEL: "6-2"}))
    assert readers.held() == {(5, 1), (6, 2)}
    readers.hear(report("b"))
    assert readers.held() == {(5, 1)}
    now_s = 59.0
    readers.hear(report("a", **{READING_LABEL: "5-1"}))
    now_s = 61.0
    assert readers.held() == set(), (
        "a reader that is stuck holds its version from its first report on, not from its last"
    )
