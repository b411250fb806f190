"""Publishing, getting, reading, purging."""

# ruff: noqa: D103 - the name of a check is its sentence
from __future__ import annotations

import time
from typing import Final

import anyio

from broker.api import ConsumerSettings, Published, Record
from broker.conformance.asserting import (
    DEADLINE_S,
    BrokerFactory,
    Check,
    claim,
    equal,
    fill,
    nothing_comes,
    raises,
    take,
    take_all,
    take_and_ack,
)
from broker.errors import TooLargeError
from schemas.errors import InvalidIdError


async def check_sequences_count_from_1(make: BrokerFactory) -> None:
    async with make() as broker:
        for number in range(1, 4):
            published = await broker.publish(f"hr.{broker.run}.a.b.{number}", b"x")
            equal(published, Published(sequence=number, created=True), "published")


async def check_the_same_bytes_again_are_success_and_stored_once(make: BrokerFactory) -> None:
    async with make() as broker:
        subject = f"hr.{broker.run}.a.b.1"
        first = await broker.publish(subject, b"x")
        again = await broker.publish(subject, b"x")
        equal(again, Published(sequence=first.sequence, created=False), "second publish")
        equal((await broker.log_status()).num_messages, 1, "messages")


async def check_other_bytes_lose_against_what_stands(make: BrokerFactory) -> None:
    async with make() as broker:
        subject = f"hr.{broker.run}.a.b.1"
        first = await broker.publish(subject, b"winner")
        second = await broker.publish(subject, b"loser")
        equal(second, Published(sequence=first.sequence, created=False, standing=b"winner"), "second publish")
        record = await broker.get(subject)
        claim(record is not None and record.data == b"winner", "the first bytes stand")


async def check_of_many_publishers_one_wins_and_all_agree(make: BrokerFactory) -> None:
    async with make() as one, make() as two:
        subject = f"hr.{one.run}.a.b.race"
        answers: dict[bytes, Published] = {}

        async def publish(number: int) -> None:
            data = str(number).encode()
            answers[data] = await (one, two)[number % 2].publish(subject, data)

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(publish, number)
        winners = [data for data, answer in answers.items() if answer.created]
        equal(len(winners), 1, "winners")
        agreed = {winners[0] if answer.created else answer.standing for answer in answers.values()}
        equal(agreed, {winners[0]}, "what all believe to stand there")


async def check_get_finds_a_record_with_its_headers(make: BrokerFactory) -> None:
    async with make() as broker:
        subject = f"hr.{broker.run}.a.b.1"
        equal(await broker.get(subject), None, "before")
        published = await broker.publish(subject, b"\x00\xff", headers={"traceparent": "00-1"})
        record = await broker.get(subject)
        claim(record is not None, "expected a record")
        if record is not None:
            equal((record.subject, record.sequence, record.data), (subject, published.sequence, b"\x00\xff"), "record")
            equal(dict(record.headers), {"traceparent": "00-1"}, "headers")
            claim(abs(record.unix_time_s - time.time()) < 60, "the time it was stored")


async def check_subjects_that_are_not_of_the_log_are_refused(make: BrokerFactory) -> None:
    async with make() as broker:
        for subject in (
            f"hr.{broker.run}x.a.b.1",
            f"hr.{broker.run}.a.*.1",
            f"hr.{broker.run}.a..1",
            "other",
            f"hr.{broker.run}.a.b.{'x' * 5000}",
        ):
            await raises(InvalidIdError, broker.publish(subject, b""), f"publish on {subject}")


async def check_too_large_a_message_is_refused_and_harms_nothing(make: BrokerFactory) -> None:
    async with make() as broker:
        data = b"x" * (8 * 1024 * 1024)
        await raises(
            TooLargeError, broker.publish(f"hr.{broker.run}.a.b.1", data + b"x"), "a message above max_payload"
        )
        await raises(
            TooLargeError,
            broker.publish(f"hr.{broker.run}.a.b.1", data, headers={"k": "v"}),
            "a message above max_payload with its headers",
        )
        claim((await broker.publish(f"hr.{broker.run}.a.b.1", b"small")).created, "the connection lives on")


async def check_read_gives_all_in_order_and_then_ends(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 3000)
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            found = await take_all(records)
        equal([record.sequence for record in found], list(range(1, 3001)), "sequences")


async def check_read_of_an_empty_log_ends(make: BrokerFactory) -> None:
    async with make() as broker:
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            equal(await take_all(records), [], "records")
        await fill(broker, "a.b", 1)
        async with broker.read([f"hr.{broker.run}.c.>"], follow=False) as records:
            equal(await take_all(records), [], "records of a filter that matches nothing")


async def check_read_starts_after_a_sequence_and_follows(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 10)
        async with broker.read([f"hr.{broker.run}.a.b.>"], after_sequence=7) as records:
            equal([r.sequence for r in await take(records, 3)], [8, 9, 10], "what stood there")
            claim(await nothing_comes(records), "nothing yet")
            await broker.publish(f"hr.{broker.run}.a.b.new", b"new")
            equal([(r.sequence, r.data) for r in await take(records, 1)], [(11, b"new")], "what came then")


async def check_read_ends_where_the_log_ended_when_it_began(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 5)
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            await fill(broker, "a.b", 5, first=5)
            equal([r.sequence for r in await take_all(records)], [1, 2, 3, 4, 5], "sequences")


async def check_read_takes_several_filters(make: BrokerFactory) -> None:
    async with make() as broker:
        for number, topic in enumerate(["a.b", "a.c", "a.d", "a.b"]):
            await broker.publish(f"hr.{broker.run}.{topic}.{number}", b"")
        filters = [f"hr.{broker.run}.a.b.>", f"hr.{broker.run}.a.d.*"]
        async with broker.read(filters, follow=False) as records:
            equal([r.sequence for r in await take_all(records)], [1, 3, 4], "sequences")


async def check_batches_hold_what_single_reads_give(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 2500)
        await broker.publish(f"hr.{broker.run}.a.c.1", b"with headers", headers={"k": "v"})
        await fill(broker, "a.b", 2500, first=2500)
        everything = [f"hr.{broker.run}.>"]
        async with broker.read(everything, after_sequence=10, follow=False) as records:
            expected = await take_all(records)
        found: list[Record] = []
        async with broker.read_batches(everything, after_sequence=10, follow=False) as batches:
            async for batch in batches:
                found += [
                    Record(
                        subject=batch.subjects[number],
                        sequence=int(batch.sequences[number]),
                        data=batch.datas[number],
                        unix_time_s=float(batch.unix_times_s[number]),
                        headers=batch.headers.get(number, {}),
                    )
                    for number in range(len(batch))
                ]
        equal(found, expected, "records")
        async with broker.read_batches([f"hr.{broker.run}.a.b.>"], after_sequence=5001) as batches:
            await broker.publish(f"hr.{broker.run}.a.b.new", b"new")
            with anyio.fail_after(DEADLINE_S):
                batch = await anext(batches)
        equal((batch.sequences.tolist(), batch.datas), ([5002], [b"new"]), "what came then")


async def check_filters_that_overlap_are_refused(make: BrokerFactory) -> None:
    async with make() as broker:

        async def read() -> None:
            async with broker.read([f"hr.{broker.run}.a.>", f"hr.{broker.run}.a.b.*"]):
                pass

        await raises(InvalidIdError, read(), "filters that match the same subject")


async def check_read_may_leave_the_data_away(make: BrokerFactory) -> None:
    async with make() as broker:
        await broker.publish(f"hr.{broker.run}.a.b.1", b"12345")
        async with broker.read([f"hr.{broker.run}.>"], follow=False, headers_only=True) as records:
            record = (await take_all(records))[0]
        equal((record.data, record.headers.get("Nats-Msg-Size")), (b"", "5"), "data and its size")


async def check_readers_share_nothing(make: BrokerFactory) -> None:
    async with make() as one, make() as two:
        await fill(one, "a.b", 10)
        async with one.read([f"hr.{one.run}.>"]) as first, two.read([f"hr.{one.run}.>"]) as second:
            equal(len(await take(first, 10)), 10, "the first reader's records")
            equal(len(await take(second, 10)), 10, "the second reader's records")


async def check_a_cancelled_reader_goes_on_without_loss(make: BrokerFactory) -> None:
    async with make() as broker, broker.read([f"hr.{broker.run}.>"]) as records:
        claim(await nothing_comes(records, 0.01), "nothing yet")
        await fill(broker, "a.b", 3)
        equal([r.sequence for r in await take(records, 3)], [1, 2, 3], "sequences")


async def check_purge_drops_what_is_below(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 10)
        equal(await broker.purge_below(8), 7, "purged")
        status = await broker.log_status()
        equal((status.first_sequence, status.last_sequence, status.num_messages), (8, 10, 3), "first, last, count")
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            equal([r.sequence for r in await take_all(records)], [8, 9, 10], "what is left")


async def check_purge_may_spare_other_subjects(make: BrokerFactory) -> None:
    async with make() as broker:
        for number in range(1, 4):
            await broker.publish(f"hr.{broker.run}.a.b.{number}", b"x")
            await broker.publish(f"hr.{broker.run}.c.d.{number}", b"x")
        equal(await broker.purge_below(4, pattern=f"hr.{broker.run}.a.b.>"), 2, "purged")
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            equal([r.sequence for r in await take_all(records)], [2, 4, 5, 6], "what is left")
        settings = ConsumerSettings()
        async with broker.consume("d", [f"hr.{broker.run}.>"], settings) as deliveries:
            equal([d.sequence for d in await take_and_ack(deliveries, 4)], [2, 4, 5, 6], "what is delivered")
        status = await broker.log_status()
        equal((status.first_sequence, status.last_sequence, status.num_messages), (2, 6, 4), "first, last, count")


async def check_a_replay_after_a_purge_is_stored_again(make: BrokerFactory) -> None:
    """A duplicate window must not swallow rightful messages: an id is never taken from the subject."""
    async with make() as broker:
        await fill(broker, "a.b", 20)
        await broker.purge_below(21)
        await fill(broker, "a.b", 20)
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            equal([r.sequence for r in await take_all(records)], list(range(21, 41)), "sequences")


CHECKS: Final[tuple[Check, ...]] = (
    check_sequences_count_from_1,
    check_the_same_bytes_again_are_success_and_stored_once,
    check_other_bytes_lose_against_what_stands,
    check_of_many_publishers_one_wins_and_all_agree,
    check_get_finds_a_record_with_its_headers,
    check_subjects_that_are_not_of_the_log_are_refused,
    check_too_large_a_message_is_refused_and_harms_nothing,
    check_read_gives_all_in_order_and_then_ends,
    check_read_of_an_empty_log_ends,
    check_read_starts_after_a_sequence_and_follows,
    check_read_ends_where_the_log_ended_when_it_began,
    check_read_takes_several_filters,
    check_batches_hold_what_single_reads_give,
    check_filters_that_overlap_are_refused,
    check_read_may_leave_the_data_away,
    check_readers_share_nothing,
    check_a_cancelled_reader_goes_on_without_loss,
    check_purge_drops_what_is_below,
    check_purge_may_spare_other_subjects,
    check_a_replay_after_a_purge_is_stored_again,
)
