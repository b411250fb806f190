"""Announcements and requests."""

# ruff: noqa: D103 - the name of a check is its sentence
from __future__ import annotations

from typing import Final

import anyio

from broker.conformance.asserting import DEADLINE_S, BrokerFactory, Check, claim, equal, raises, take
from broker.errors import NotConnectedError, RequestFailedError
from schemas.errors import InvalidIdError


async def check_listeners_hear_what_is_announced_from_then_on(make: BrokerFactory) -> None:
    async with make() as one, make() as two:
        await two.announce(f"hrt.{one.run}.beat.w1", b"before")
        async with two.listen(f"hrt.{one.run}.beat.*") as heard, one.listen(f"hrt.{one.run}.>") as also:
            await one.announce(f"hrt.{one.run}.beat.w1", b"1")
            await one.announce(f"hrt.{one.run}.other", b"2")
            await one.announce(f"hrt.{one.run}.beat.w2", b"3")
            expected = [(f"hrt.{one.run}.beat.w1", b"1"), (f"hrt.{one.run}.beat.w2", b"3")]
            equal(await take(heard, 2), expected, "what matches")
            equal(len(await take(also, 3)), 3, "all of them")


async def check_talk_never_reaches_the_log(make: BrokerFactory) -> None:
    async with make() as broker:
        await raises(InvalidIdError, broker.announce(f"hr.{broker.run}.a.b.1", b""), "announcing on the log")
        await raises(
            InvalidIdError, broker.request(f"hr.{broker.run}.a.b.1", b"", deadline_s=1), "a request on the log"
        )
        await broker.announce(f"hrt.{broker.run}.x", b"")
        equal((await broker.log_status()).num_messages, 0, "messages")


async def check_requests_are_shared_and_answered(make: BrokerFactory) -> None:
    async with make() as one, make() as two:
        subject = f"hrt.{one.run}.double"
        asked: list[bytes] = []

        async def double(data: bytes) -> bytes:
            asked.append(data)
            return data * 2

        async with one.serve(subject, double), two.serve(subject, double):
            for number in range(10):
                data = str(number).encode()
                equal(await one.request(subject, data, deadline_s=DEADLINE_S), data * 2, "answer")
        equal(len(asked), 10, "each request reached one server")


async def check_requests_are_answered_side_by_side(make: BrokerFactory) -> None:
    async with make() as broker:
        subject = f"hrt.{broker.run}.meet"
        waiting: list[anyio.Event] = []

        async def meet(_data: bytes) -> bytes:
            waiting.append(anyio.Event())
            if len(waiting) == 2:
                for event in waiting:
                    event.set()
            await waiting[-1].wait()
            return b"met"

        async with broker.serve(subject, meet), anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(lambda: broker.request(subject, b"", deadline_s=DEADLINE_S))


async def check_a_server_s_error_reaches_the_one_who_asked(make: BrokerFactory) -> None:
    async with make() as broker:

        async def fail(_data: bytes) -> bytes:
            raise ValueError("no such engine")

        async with broker.serve(f"hrt.{broker.run}.fail", fail):
            try:
                await broker.request(f"hrt.{broker.run}.fail", b"", deadline_s=DEADLINE_S)
            except RequestFailedError as error:
                claim("no such engine" in str(error), f"the reason is in {error}")
            else:
                raise AssertionError("expected RequestFailedError")


async def check_a_request_that_nobody_serves_ends_at_its_deadline(make: BrokerFactory) -> None:
    async with make() as broker:
        await raises(
            NotConnectedError, broker.request(f"hrt.{broker.run}.none", b"", deadline_s=0.2), "a request to nobody"
        )


async def check_a_request_waits_for_its_server(make: BrokerFactory) -> None:
    async with make() as broker, anyio.create_task_group() as tasks:
        subject = f"hrt.{broker.run}.late"
        answers: list[bytes] = []
        answered = anyio.Event()

        async def ask() -> None:
            answers.append(await broker.request(subject, b"q", deadline_s=DEADLINE_S))
            answered.set()

        async def echo(data: bytes) -> bytes:
            return data

        tasks.start_soon(ask)
        await anyio.sleep(0.02)
        async with broker.serve(subject, echo):
            await answered.wait()
        equal(answers, [b"q"], "answers")


CHECKS: Final[tuple[Check, ...]] = (
    check_listeners_hear_what_is_announced_from_then_on,
    check_talk_never_reaches_the_log,
    check_requests_are_shared_and_answered,
    check_requests_are_answered_side_by_side,
    check_a_server_s_error_reaches_the_one_who_asked,
    check_a_request_that_nobody_serves_ends_at_its_deadline,
    check_a_request_waits_for_its_server,
)
