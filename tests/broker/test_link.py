# ruff: noqa: SIM117 - a broker and what is done with it read better apart
from __future__ import annotations

import functools
import os
import signal

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.api import ConsumerSettings
from broker.conformance.asserting import fill, take, take_and_ack, wait_until
from broker.connect import connect
from broker.jetstream.consume import ack_numbers
from broker.jetstream.headers import header, read_headers, status_of, status_text, write_headers
from broker.jetstream.publish import unix_time_s
from broker.topology import RunLimits
from schemas.errors import InvalidIdError

SMALL = RunLimits(log_max_bytes=64 * 2**20, payload_max_bytes=64 * 2**20, state_max_bytes=16 * 2**20)


@pytest.fixture
def opened(server, run):
    return functools.partial(connect, server.url, run, server.connect_settings(), create=True, limits=SMALL)


async def test_messages_that_wait_for_a_free_handler_are_not_delivered_to_others(opened):
    settings = ConsumerSettings(ack_wait_s=0.4)
    async with opened() as broker:
        await fill(broker, "a.b", 20)
        filters = [f"hr.{broker.run}.>"]
        async with broker.consume("d", filters, settings) as slow:
            first = (await take(slow, 1))[0]
            async with opened() as other, other.consume("d", filters, settings) as idle:
                with anyio.move_on_after(1):
                    while True:
                        await first.still_working()
                        with anyio.move_on_after(0.1):
                            raise AssertionError(f"{(await anext(idle)).sequence} was taken from a worker who lives")
            await first.ack()
            assert [d.num_delivered for d in await take_and_ack(slow, 19)] == [1] * 19


async def test_what_a_worker_leaves_untouched_goes_to_others_at_once(opened):
    async with opened() as broker:
        await fill(broker, "a.b", 20)
        filters = [f"hr.{broker.run}.>"]
        async with broker.consume("d", filters, ConsumerSettings(ack_wait_s=60)) as deliveries:
            await take_and_ack(deliveries, 1)
        async with broker.consume("d", filters, ConsumerSettings(ack_wait_s=60)) as deliveries:
            assert len(await take_and_ack(deliveries, 19)) == 19


async def test_a_worker_waits_for_a_broker_that_is_away_longer_than_any_deadline(own_server, run):
    settings = msgspec.structs.replace(own_server.connect_settings(), publish_deadline_s=0.2, request_timeout_s=0.2)
    async with connect(own_server.url, run, settings, create=True) as broker:
        async with (
            broker.consume("d", [f"hr.{run}.>"], ConsumerSettings()) as deliveries,
            broker.read([f"hr.{run}.>"]) as records,
        ):
            await own_server.kill()
            with anyio.move_on_after(1):
                await anext(deliveries)
            with anyio.move_on_after(0.5):
                await anext(records)
            await own_server.start()
            await broker._link.wait_connected(10)
            await fill(broker, "a.b", 1)
            await take_and_ack(deliveries, 1)
            await take(records, 1)


async def test_a_round_trip_that_nobody_waits_for_any_more_does_not_end_the_connection(opened):
    async with opened() as broker:
        for _ in range(20):
            with anyio.move_on_after(0):
                await broker._link.round_trip()
        await broker._link.round_trip()
        assert (await broker.publish(f"hr.{broker.run}.a.b.1", b"x")).created
        assert broker.connections()[0].reconnects == 0


async def test_a_reconnection_that_died_is_taken_up_again(own_server, run):
    async with connect(own_server.url, run, own_server.connect_settings(), create=True) as broker:
        client = broker._link.client
        await own_server.kill()

        async def away() -> bool:
            return client.is_reconnecting

        await wait_until(away, "the loss is noticed")
        client._reconnection_task.cancel()
        await own_server.start()
        with anyio.fail_after(10):
            assert (await broker.publish(f"hr.{run}.a.b.1", b"x")).created


async def test_a_server_that_hangs_is_given_up_and_found_again(own_server, run):
    settings = msgspec.structs.replace(own_server.connect_settings(), ping_interval_s=0.1)
    async with connect(own_server.url, run, settings, create=True) as broker:
        os.kill(own_server.pid, signal.SIGSTOP)

        async def given_up() -> bool:
            return not broker.connections()[0].connected

        await wait_until(given_up, "the hang is noticed")
        os.kill(own_server.pid, signal.SIGCONT)
        with anyio.fail_after(10):
            assert (await broker.publish(f"hr.{run}.a.b.1", b"x")).created


async def test_cancelled_publishes_leave_nothing_behind(opened):
    async with opened() as broker:
        for number in range(200):
            with anyio.move_on_after(0.0002 * (number % 5)):
                await broker.publish(f"hr.{broker.run}.a.b.{number}", b"x")
        assert broker.connections()[0].waiting_answers == 0
        assert (broker._publisher.gate.messages, broker._publisher.gate.bytes) == (0, 0)
        for number in range(200):
            await broker.publish(f"hr.{broker.run}.a.b.{number}", b"x")
        assert (await broker.log_status()).num_messages == 200


async def test_publishes_in_flight_are_bounded_in_messages_and_bytes(server, run):
    settings = msgspec.structs.replace(server.connect_settings(), max_in_flight=8, max_in_flight_bytes=3000)
    async with connect(server.url, run, settings, create=True, limits=SMALL) as broker:
        most_messages, most_bytes = 0, 0

        async def publish(number: int) -> None:
            nonlocal most_messages, most_bytes
            await broker.publish(f"hr.{run}.a.b.{number}", bytes(1000))
            gate = broker._publisher.gate
            most_messages, most_bytes = max(most_messages, gate.messages), max(most_bytes, gate.bytes)

        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(publish, number)
        assert most_messages <= 8
        assert most_bytes <= 3000
        large = await broker.publish(f"hr.{run}.a.b.large", bytes(10_000))
        assert large.created, "a message above the bound goes alone"


async def test_a_slow_listener_loses_the_oldest_and_delays_nobody(server, run):
    settings = msgspec.structs.replace(server.connect_settings(), listen_buffer=10)
    async with connect(server.url, run, settings, create=True, limits=SMALL) as broker:
        async with broker.listen(f"hrt.{run}.>") as heard:
            for number in range(100):
                await broker.announce(f"hrt.{run}.x", str(number).encode())
            await broker._link.round_trip()
            assert [int(data) for _, data in await take(heard, 10)] == list(range(90, 100))


async def test_a_gap_in_what_a_reader_gets_is_noticed_and_read_again(opened):
    async with opened() as broker:
        async with broker.read([f"hr.{broker.run}.>"]) as records:
            await fill(broker, "a.b", 1)
            await take(records, 1)
            reader = records._take.__self__
            real = reader._pull._on_message
            dropped: list[bytes] = []

            def lossy(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
                if data and len(dropped) < 3 and int(data) % 10 == 5:
                    dropped.append(data)
                else:
                    real(subject, reply, data, headers)

            broker._link.client.replace_handler(reader._pull._subscription, lossy)
            await fill(broker, "a.b", 99, first=1)
            assert [r.sequence for r in await take(records, 99)] == list(range(2, 101))
            assert dropped
            assert reader.num_gaps >= 1


async def test_a_foreign_client_s_subject_of_any_bytes_stops_nobody(opened):
    async with opened() as broker:
        async with broker.consume("d", [f"hr.{broker.run}.>"], ConsumerSettings()) as deliveries:
            async with broker.read([f"hr.{broker.run}.>"]) as records:
                subject = f"hr.{broker.run}.a.b.".encode() + b"\xff\xfe"
                block = b"NATS/1.0\r\n\xff: \xfe\r\nx:\xff\r\n\r\n"
                command = b"HPUB %b %d %d\r\n%b\0\r\n" % (subject, len(block), len(block) + 1, block)
                broker._link.client.send_nowait(command)
                await broker.publish(f"hr.{broker.run}.a.b.1", b"x")
                assert [d.data for d in await take_and_ack(deliveries, 2)][-1] == b"x"
                assert [r.data for r in await take(records, 2)][-1] == b"x"


async def test_headers_that_would_break_the_protocol_are_refused(opened):
    async with opened() as broker:
        for headers in ({"a b": "x"}, {"k": "a\r\nNats-Rollup: all"}, {"Nats-TTL": "1s"}, {"": "x"}, {"k": " x"}):
            with pytest.raises(InvalidIdError):
                await broker.publish(f"hr.{broker.run}.a.b.1", b"x", headers=headers)
        assert (await broker.log_status()).num_messages == 0


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,10}", fullmatch=True).filter(
            lambda k: not k.lower().startswith("nats-")
        ),
        st.text(st.characters(exclude_categories=("Cc", "Cs", "Z")), max_size=20),
        max_size=4,
    )
)
def test_headers_come_back_as_they_were_written(headers):
    block = b"NATS/1.0\r\nNats-Msg-Id: 1\r\n" + write_headers(headers) + b"\r\n"
    assert read_headers(block) == headers
    assert header(block, b"Nats-Msg-Id") == "1"
    assert status_of(block) == 0


def test_a_status_is_a_number_and_its_words():
    block = b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: 7\r\n\r\n"
    assert (status_of(block), status_text(block)) == (409, "Message Size Exceeds MaxBytes")
    assert header(block, b"Nats-Pending-Messages") == "7"
    assert (status_of(None), status_of(b"NATS/1.0\r\n\r\n"), header(None, b"a")) == (0, 0, None)


def test_ack_subjects_of_both_kinds_are_read():
    assert ack_numbers(b"$JS.ACK.HR_r.d.2.7.9.1700000000000000000.5") == (2, 7, 9, 1700000000000000000, 5)
    long = b"$JS.ACK._.ACCHASH.HR_r.d.2.7.9.1700000000000000000.5.token"
    assert ack_numbers(long) == (2, 7, 9, 1700000000000000000, 5)


def test_the_server_s_times_are_read_to_the_microsecond():
    assert unix_time_s("2026-11-29T17:26:49.637677200Z") == pytest.approx(1795973209.6376772, abs=1e-6)
    assert unix_time_s("2026-11-29T17:26:49Z") == 1795973209.0
    assert unix_time_s("") == 0.0
