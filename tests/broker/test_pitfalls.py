# ruff: noqa: SIM117 - a broker and what is done with it read better apart
"""What nats-py and the server do to the unwary, one test for each known pitfall; the numbers are those of the list in
docs/broker.md.
"""

from __future__ import annotations

import asyncio
import functools

import anyio
import anyio.lowlevel
import msgspec
import pytest

from broker.api import ConsumerSettings
from broker.conformance.asserting import fill, take, take_and_ack, wait_until
from broker.connect import connect, open_admin
from broker.errors import NoSuchStreamError, RetryableBrokerError, StoreFullError, TooLargeError, TopologyError
from broker.jetstream import JetStreamBroker
from broker.topology import RunLimits
from schemas.ids import encode_token

SMALL = RunLimits(log_max_bytes=256 * 2**20, payload_max_bytes=512 * 2**20, state_max_bytes=16 * 2**20)
SETTINGS = ConsumerSettings()


@pytest.fixture
def opened(server, run):
    """Opens the test's run on the shared server."""
    return functools.partial(connect, server.url, run, server.connect_settings(), create=True, limits=SMALL)


async def test_pitfall_1_payload_and_headers_over_max_payload_never_reach_the_server(opened):
    async with opened() as broker:
        assert isinstance(broker, JetStreamBroker)
        for data, headers in ((bytes(8 * 2**20), {"k": "v" * 200}), (bytes(9 * 2**20), None)):
            with pytest.raises(TooLargeError, match="expected at most 8388608 bytes with headers"):
                await broker.publish(f"hr.{broker.run}.a.b.1", data, headers=headers)
        with pytest.raises(TooLargeError):
            await broker.save_state("k", bytes(9 * 2**20))
        with pytest.raises(TooLargeError):
            await broker.announce(f"hrt.{broker.run}.x", bytes(9 * 2**20))
        assert [state.reconnects for state in broker.connections()] == [0, 0]
        assert (await broker.publish(f"hr.{broker.run}.a.b.1", bytes(8 * 2**20 - 200))).created


async def test_pitfall_2_publishes_that_are_never_answered_end_and_leave_nothing_behind(own_server, run):
    settings = msgspec.structs.replace(own_server.connect_settings(), publish_deadline_s=0.5, request_timeout_s=0.2)
    async with connect(own_server.url, run, settings, create=True) as broker:
        assert isinstance(broker, JetStreamBroker)
        await own_server.kill()
        failed = 0

        async def publish(number: int) -> None:
            nonlocal failed
            with pytest.raises(RetryableBrokerError, match="within"):
                await broker.publish(f"hr.{run}.a.b.{number}", b"x")
            failed += 1

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(publish, number)
        with anyio.move_on_after(0.05):
            await broker.publish(f"hr.{run}.a.b.cancelled", b"x")
        assert failed == 50
        assert broker.connections()[0].waiting_answers == 0
        assert (broker._publisher.gate.messages, broker._publisher.gate.bytes) == (0, 0)
        await own_server.start()
        settings_again = own_server.connect_settings()
        async with connect(own_server.url, run, settings_again) as other:
            assert (await other.publish(f"hr.{run}.a.b.1", b"x")).created


async def test_pitfall_3_a_publish_whose_answer_was_lost_is_stored_once(server, proxy, run):
    async with connect(f"nats://127.0.0.1:{proxy.port}", run, server.connect_settings(), create=True) as broker:
        for number in range(5):
            proxy.lose_the_next_answer()
            with anyio.fail_after(10):
                published = await broker.publish(f"hr.{run}.a.b.{number}", b"x")
            assert proxy.swallowed.is_set()
            assert published.created, "the first try of this very call is what stands there"
        assert (await broker.log_status()).num_messages == 5


async def test_pitfall_3_a_state_whose_answer_was_lost_is_no_conflict(server, proxy, run):
    async with connect(f"nats://127.0.0.1:{proxy.port}", run, server.connect_settings(), create=True) as broker:
        revision = 0
        for number in range(5):
            proxy.lose_the_next_answer()
            with anyio.fail_after(10):
                revision = await broker.save_state("lease", b"%d" % number, expected_revision=revision)
            assert proxy.swallowed.is_set()
        assert await broker.load_state("lease") == (b"4", revision)


async def test_pitfall_4_a_parked_pull_and_a_parked_reader_survive_a_server_restart(own_server, run):
    async with connect(own_server.url, run, own_server.connect_settings(), create=True) as broker:
        async with (
            broker.consume("d", [f"hr.{run}.>"], SETTINGS) as deliveries,
            broker.read([f"hr.{run}.>"]) as records,
        ):
            for round_ in range(3):
                await own_server.kill()
                await own_server.start()
                await broker.publish(f"hr.{run}.a.b.{round_}", b"x")
                assert [d.sequence for d in await take_and_ack(deliveries, 1)] == [round_ + 1]
                assert [r.sequence for r in await take(records, 1)] == [round_ + 1]


async def test_pitfall_4_a_pull_that_the_server_forgot_is_asked_again_without_heartbeats(server, run):
    settings = msgspec.structs.replace(server.connect_settings(), idle_heartbeat_s=0.2)
    async with connect(server.url, run, settings, create=True, limits=SMALL) as broker:
        async with broker.consume("d", [f"hr.{run}.>"], SETTINGS) as deliveries:
            await fill(broker, "a.b", 1)
            await take_and_ack(deliveries, 1)
            async with open_admin(server.url, server.connect_settings()) as admin:
                await admin.delete_durable(run, "d")
            await fill(broker, "a.b", 1, first=1)
            again = await take_and_ack(deliveries, 2)
            assert [d.sequence for d in again] == [1, 2], "a durable that was deleted begins anew"


async def test_pitfall_5_an_ack_lost_in_a_crash_leads_to_a_redelivery_without_a_second_effect(own_server, run):
    settings = ConsumerSettings(ack_wait_s=0.5)
    async with connect(own_server.url, run, own_server.connect_settings(), create=True) as broker:
        await fill(broker, "in.b", 50)
        async with broker.consume("d", [f"hr.{run}.in.>"], settings) as deliveries:
            for delivery in await take(deliveries, 50):
                await broker.publish(delivery.subject.replace(".in.", ".out."), delivery.data)
                await delivery.ack()
            await own_server.kill()
            await own_server.start()

            async def settled() -> bool:
                with anyio.move_on_after(0.2):
                    while True:
                        delivery = await anext(deliveries)
                        subject = delivery.subject.replace(".in.", ".out.")
                        assert not (await broker.publish(subject, delivery.data)).created
                        await delivery.ack()
                return (await broker.consumers())[0].num_ack_pending == 0

            await wait_until(settled, "all acknowledged at last")
        assert (await broker.log_status()).num_messages == 100


async def test_pitfall_6_after_an_empty_wait_the_next_message_comes_at_once_in_20_rounds(server, run):
    """nats-io/nats.py#933: a pull left over from an earlier wait swallowed the next message."""
    settings = msgspec.structs.replace(server.connect_settings(), pull_expires_s=0.1, idle_heartbeat_s=0.05)
    async with connect(server.url, run, settings, create=True, limits=SMALL) as broker:
        async with broker.consume("d", [f"hr.{run}.>"], ConsumerSettings(prefetch=5)) as deliveries:
            for round_ in range(20):
                with anyio.move_on_after(0.05 + 0.005 * round_):  # ends before, at and after the pull's own end
                    await anext(deliveries)
                await broker.publish(f"hr.{run}.a.b.{round_}", b"x")
                with anyio.fail_after(1):
                    delivery = await anext(deliveries)
                assert (delivery.sequence, delivery.num_delivered) == (round_ + 1, 1)
                await delivery.ack()


async def test_pitfall_6_1000_messages_and_200_cancelled_consumers_lose_nothing(opened):
    """nats-io/nats.py#392: a read cancelled at the moment a message arrived threw it away."""
    seen: set[int] = set()
    settings = ConsumerSettings(ack_wait_s=2, prefetch=16)
    async with opened() as broker, anyio.create_task_group() as tasks:

        async def consume_for(moment_s: float) -> None:
            with anyio.move_on_after(moment_s):
                async with broker.consume("d", [f"hr.{broker.run}.>"], settings) as deliveries:
                    async for delivery in deliveries:
                        seen.add(delivery.sequence)
                        await delivery.ack()
                        await anyio.lowlevel.checkpoint()

        tasks.start_soon(fill, broker, "a.b", 1000)
        for number in range(200):
            await consume_for(0.001 + 0.0001 * (number % 70))

        async def all_seen() -> bool:
            await consume_for(0.2)
            return len(seen) == 1000

        await wait_until(all_seen, "1000 unique messages")


async def test_pitfall_7_a_worker_that_takes_nothing_is_sent_no_more_than_its_bytes(opened):
    async with opened() as broker:
        for number in range(40):
            await broker.publish(f"hr.{broker.run}.a.b.{number}", bytes(2**20))
        settings = ConsumerSettings(max_bytes=2 * 2**20, prefetch=100)
        async with broker.consume("d", [f"hr.{broker.run}.>"], settings) as deliveries:
            first = (await take(deliveries, 1))[0]
            status = (await broker.consumers())[0]
            assert status.num_ack_pending <= 10, "8 MB must fit for the sake of one large message, not 40"
            await first.ack()
            assert len(await take_and_ack(deliveries, 39)) == 39


async def test_pitfall_8_a_lease_is_a_revision_that_only_its_holder_can_renew(opened):
    async with opened() as holder, opened() as other:
        revision = await holder.save_state("lease.trainer", b"holder", expected_revision=0)
        for _ in range(3):
            revision = await holder.save_state("lease.trainer", b"holder", expected_revision=revision)
        found = await other.load_state("lease.trainer")
        assert found == (b"holder", revision)
        taken = await other.save_state("lease.trainer", b"other", expected_revision=revision)
        with pytest.raises(Exception, match=f"expected revision {revision}, found {taken}"):
            await holder.save_state("lease.trainer", b"holder", expected_revision=revision)


async def test_pitfall_9_reconnecting_never_gives_up(own_server, run):
    settings = msgspec.structs.replace(own_server.connect_settings(), reconnect_wait_s=0.001)
    async with connect(own_server.url, run, settings, create=True) as broker:
        assert isinstance(broker, JetStreamBroker)
        client = broker._link.client
        await own_server.kill()

        async def tried_70_times() -> bool:
            return client.server_pool[0].reconnects > 70

        await wait_until(tried_70_times, "more tries than nats-py's default of 60")
        state = broker.connections()[0]
        assert not state.connected
        assert "Connect call failed" in state.last_error
        await own_server.start()
        assert (await broker.publish(f"hr.{run}.a.b.1", b"x")).created


async def test_pitfall_9_reconnecting_ends_with_its_client_even_if_it_misses_its_cancellation(own_server, run):
    async with connect(own_server.url, run, own_server.connect_settings(), create=True) as broker:
        assert isinstance(broker, JetStreamBroker)
        client = broker._link.client
        await own_server.kill()
    with pytest.raises(asyncio.CancelledError), anyio.fail_after(5):
        await client._select_next_server()  # where it goes on after a cancellation that a failing connection swallowed


async def test_pitfall_9_an_error_in_a_callback_is_seen_and_ends_nothing(opened):
    async with opened() as broker:
        assert isinstance(broker, JetStreamBroker)

        def fail(*_message: object) -> None:
            raise ValueError("a broken handler")

        await broker._link.client.subscribe_direct(f"hrt.{broker.run}.x", fail)
        await broker.announce(f"hrt.{broker.run}.x", b"")
        assert (await broker.publish(f"hr.{broker.run}.a.b.1", b"x")).created
        assert broker.connections()[0].last_error == "a broken handler"


async def test_pitfall_9_a_durable_with_other_settings_is_not_silently_used(opened):
    async with opened() as broker:
        filters = [f"hr.{broker.run}.>"]
        async with broker.consume("d", filters, SETTINGS):
            pass
        with pytest.raises(TopologyError, match=r"durable d: ack_wait_s: expected 3, found 10\.0"):
            async with broker.consume("d", filters, ConsumerSettings(ack_wait_s=3)):
                pass


async def test_pitfall_10_a_message_that_always_fails_delays_no_other_and_never_vanishes(opened):
    async with opened() as broker:
        await fill(broker, "a.b", 2)
        tries, others = 0, 0
        async with broker.consume("d", [f"hr.{broker.run}.>"], SETTINGS) as deliveries:
            while tries < 12:
                delivery = (await take(deliveries, 1))[0]
                if delivery.sequence == 2:
                    others += 1
                    await delivery.ack()
                else:
                    tries += 1
                    assert delivery.num_delivered == tries, "the server counts on, without a limit of its own"
                    await delivery.retry(0)
        assert others == 1
        assert (await broker.log_status()).num_messages == 2


async def test_pitfall_11_a_payload_of_64_chunks_is_read_by_chunk_with_its_digest_checked(opened):
    async with opened() as broker:
        data = bytes(range(256)) * (64 * 4096)
        ref = await broker.payloads.put(data)
        with anyio.fail_after(5):
            assert await broker.payloads.get(ref) == data


async def test_pitfall_12_a_missing_stream_is_an_error_of_its_own(server, run):
    settings = server.connect_settings()
    with pytest.raises(NoSuchStreamError, match=f"expected the stream HR_{run} on this broker"):
        async with connect(server.url, run, settings):
            pass
    async with connect(server.url, run, settings, create=True, limits=SMALL) as broker:
        async with (
            broker.consume("d", [f"hr.{run}.>"], SETTINGS) as deliveries,
            open_admin(server.url, settings) as admin,
        ):
            await fill(broker, "a.b", 1)
            await take_and_ack(deliveries, 1)
            await admin.delete_run(run)
            with pytest.raises(NoSuchStreamError, match="lost with all messages up to at least sequence 1"):
                await take(deliveries, 1)
        for call in (broker.publish(f"hr.{run}.a.b.2", b"x"), broker.get(f"hr.{run}.a.b.2"), broker.log_status()):
            with pytest.raises(NoSuchStreamError), anyio.fail_after(5):
                await call


async def test_pitfall_13_ids_with_dots_and_wildcards_are_one_token(opened):
    async with opened() as broker:
        ids = ["a.b", "a*", ">", "ein Satz", "é", "a"]
        for name in ids:
            await broker.publish(f"hr.{broker.run}.prompt.published.{encode_token(name)}", name.encode())
        async with broker.read([f"hr.{broker.run}.prompt.published.*"], follow=False) as records:
            assert [record.data.decode() async for record in records] == ids
        found = await broker.get(f"hr.{broker.run}.prompt.published.{encode_token('a*')}")
        assert found is not None
        assert found.data == b"a*"


async def test_a_full_log_refuses_and_loses_nothing(server, run):
    limits = RunLimits(log_max_bytes=100_000, payload_max_bytes=100_000, state_max_bytes=16 * 2**20)
    async with connect(server.url, run, server.connect_settings(), create=True, limits=limits) as broker:
        stored = 0

        async def publish_for_ever() -> None:
            nonlocal stored
            while True:
                await broker.publish(f"hr.{run}.a.b.{stored}", bytes(5000))
                stored += 1

        with pytest.raises(StoreFullError, match="purge below the low-water mark"):
            await publish_for_ever()
        with pytest.raises(StoreFullError):
            await broker.payloads.put(bytes(200_000))
        assert (await broker.log_status()).num_messages == stored
        assert await broker.save_state("checkpoint", b"there is room for this") == 1
        await broker.purge_below(5)
        assert (await broker.publish(f"hr.{run}.a.b.{stored}", bytes(5000))).created
