"""Questions that nobody answers at first: when they are asked again, and that any answer counts."""

from __future__ import annotations

import functools

import anyio
import pytest

from broker.connect import connect
from broker.jetstream.link import ELECTED, Link, NoAnswerError
from broker.jetstream.questions import HURRY_S, Again, Question, concerning


@pytest.fixture
async def link(server, run):
    async with connect(server.url, run, server.connect_settings(), create=True) as broker:
        yield broker._link


def question(subject: str = "a.b", again: Again | None = None) -> Question:
    return Question(subject, (b"",), now_s=0.0, timeout_s=100.0, again=again)


def askings(asked: Question, until_s: float) -> list[float]:
    """When it is asked, looked at every quarter of a second."""
    found = []
    for tick in range(int(until_s * 4) + 1):
        if asked.is_due(tick / 4):
            asked.asked(tick / 4)
            found.append(tick / 4)
    return found


async def test_patience_is_doubled_up_to_a_limit():
    assert askings(question(again=Again(1.0, 4.0)), 20.0) == [0.0, 1.0, 3.0, 7.0, 11.0, 15.0, 19.0]


async def test_a_question_without_patience_is_asked_once_and_is_never_hurried():
    once = question()
    once.asked(0.0)
    once.hurry(1.0)
    assert not once.is_due(1000.0)


async def test_a_new_leader_is_asked_at_once_and_soon_again():
    asked = question(again=Again(60.0, 60.0))
    asked.asked(0.0)
    asked.hurry(5.0)
    assert asked.is_due(5.0)
    asked.asked(5.0)
    assert not asked.is_due(5.0 + HURRY_S - 0.01)
    assert asked.is_due(5.0 + HURRY_S)


async def test_a_leader_answers_for_its_stream_and_a_consumers_for_the_consumer():
    subjects = ("hr.r.a.b.1", "$JS.API.STREAM.INFO.HR_r", "$JS.API.CONSUMER.INFO.HR_r.d", "hr.rr.a.b.1", "x.HR_rr")
    waiting = [question(subject) for subject in subjects]
    found = [one.subject for one in concerning(waiting, "HR_r", "hr.r.", "")]
    assert found == list(subjects[:3])
    assert [one.subject for one in concerning(waiting, "HR_r", "hr.r.", "d")] == [subjects[2]]


class Hesitant:
    """Hears a subject and answers only what is asked the second time."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.heard = 0

    def hear(self, _subject: bytes, reply: bytes, data: bytes, _headers: bytes | None) -> None:
        self.heard += 1
        if self.heard == 2:
            self.link.tell(reply.decode(), b"answer to " + data)


@pytest.mark.parametrize("size", [1, 100_000])
async def test_what_nobody_answered_is_asked_again_under_the_same_name(link, size):
    hesitant = Hesitant(link)
    await link.subscribe("hrt.q", hesitant.hear)
    answer = await link.ask("hrt.q", b"x" * size, timeout_s=30.0, again=Again(0.1, 0.1))
    assert (answer.data, answer.times_asked, hesitant.heard) == (b"answer to " + b"x" * size, 2, 2)


async def test_a_slow_answer_counts_however_often_it_was_asked_meanwhile(link):
    asked = anyio.Event()
    replies: list[str] = []

    def hear(_subject: bytes, reply: bytes, _data: bytes, _headers: bytes | None) -> None:
        replies.append(reply.decode())
        if len(replies) == 4:
            asked.set()

    await link.subscribe("hrt.q", hear)
    async with anyio.create_task_group() as tasks:

        async def answer() -> None:
            await asked.wait()
            link.tell(replies[0], b"to the first")

        tasks.start_soon(answer)
        assert (await link.ask("hrt.q", timeout_s=30.0, again=Again(0.05, 0.05))).data == b"to the first"
    assert len(set(replies)) == 1


async def test_an_election_makes_it_asked_again_though_it_had_patience(link, run):
    stream = f"HR_{run}"
    await link.follow_leaders({stream: f"hr.{run}."})
    hesitant = Hesitant(link)
    await link.subscribe(f"hrt.{stream}", hesitant.hear)
    async with anyio.create_task_group() as tasks:
        ask = functools.partial(link.ask, f"hrt.{stream}", timeout_s=60.0, again=Again(60.0, 60.0))
        tasks.start_soon(ask)
        while not hesitant.heard:
            await link.round_trip()
        link.tell(ELECTED.format("STREAM", stream), b"{}")
    assert hesitant.heard == 2


async def test_without_patience_it_ends_at_its_time(link):
    await link.subscribe("hrt.q", lambda *_: None)
    with pytest.raises(NoAnswerError):
        await link.ask("hrt.q", timeout_s=0.1)
