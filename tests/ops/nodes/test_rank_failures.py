"""When a trainer's ranks are given up."""

from ops.nodes.rank_failures import RankFailures


class Sessions:
    """Sessions that fail one after the other, an hour apart, with or without progress before."""

    def __init__(self, most: int) -> None:
        self.now_s = 0.0
        self.num_steps = 0
        self.failures = RankFailures(most, lambda: self.num_steps)

    def fail(self, *, steps: int = 0, after_s: float = 3600.0, for_good: bool = False) -> str:
        self.failures.begun()
        self.now_s += after_s
        self.num_steps += steps
        self.failures.failed(self.now_s)
        return self.failures.verdict(self.now_s, for_good=for_good)


def test_failures_without_progress_are_counted_however_far_apart() -> None:
    sessions = Sessions(most=2)
    assert [sessions.fail(), sessions.fail(), sessions.fail(steps=1)] == ["", "", ""]
    assert [sessions.fail(), sessions.fail()] == [
        "",
        "the trainer's ranks failed 3 times in a row without any progress",
    ]


def test_failures_within_two_minutes_are_counted_whatever_was_done() -> None:
    sessions = Sessions(most=2)
    found = [sessions.fail(steps=1, after_s=30.0) for _ in range(3)]
    assert found == ["", "", "the trainer's ranks failed 3 times within 120 s"]
    slow = Sessions(most=2)
    assert {slow.fail(steps=1, after_s=61.0) for _ in range(9)} == {""}


def test_ranks_that_say_so_are_given_up_at_once() -> None:
    assert Sessions(most=9).fail(for_good=True) == "the trainer's ranks can't run as they are set"
