"""Chapter 3: what a broker promises.

Three promises carry everything else: a message is created once under its subject; one order holds for all messages of a
run; work that nobody acknowledged comes again. The broker in memory keeps them, and so does NATS JetStream: both pass the
suite in `broker/conformance`.
"""

from __future__ import annotations

from broker.api import ConsumerSettings
from broker.memory import MemoryBroker, MemoryServer


async def test_a_message_is_created_once() -> None:
    """The first bytes of a subject stand for ever. Who comes second learns what stands there, and goes on with it."""
    broker = MemoryBroker(MemoryServer(), "demo")
    first = await broker.publish("hr.demo.group.issued.g0", b"four slots")
    again = await broker.publish("hr.demo.group.issued.g0", b"four slots")
    other = await broker.publish("hr.demo.group.issued.g0", b"eight slots")
    assert (first.created, again.created, other.created) == (True, False, False)
    assert again.standing is None  # the same bytes: a retry, all is well
    assert other.standing == b"four slots"  # another worker was first: its message is adopted


async def test_every_reader_sees_everything_in_one_order(broker: MemoryBroker) -> None:
    """A read shares nothing and deletes nothing; it can begin anywhere."""
    for name in ("a", "b", "c"):
        await broker.publish(f"hr.demo.group.issued.{name}", name.encode())
    for after, expected in ((0, b"abc"), (1, b"bc")):
        async with broker.read(["hr.demo.>"], after_sequence=after, follow=False) as records:
            assert b"".join([record.data async for record in records]) == expected


async def test_workers_share_a_durables_messages(server: MemoryServer) -> None:
    """Two workers of one durable get different messages. An acknowledgement says done; it removes nothing from the log."""
    one, two = MemoryBroker(server, "demo"), MemoryBroker(server, "demo")
    settings = ConsumerSettings(prefetch=1)
    async with (
        one.consume("fan_out", ["hr.demo.>"], settings) as ours,
        two.consume("fan_out", ["hr.demo.>"], settings) as theirs,
    ):
        await one.publish("hr.demo.group.issued.a", b"a")
        mine = await anext(ours)
        await one.publish("hr.demo.group.issued.b", b"b")
        his = await anext(theirs)
        assert {mine.data, his.data} == {b"a", b"b"}
        await mine.ack()
        await his.ack()
    assert (await one.log_status()).num_messages == 2


async def test_what_nobody_acknowledged_comes_again(broker: MemoryBroker) -> None:
    """A worker that gives back, dies or falls silent loses nothing."""
    async with broker.consume("fan_out", ["hr.demo.>"], ConsumerSettings()) as deliveries:
        await broker.publish("hr.demo.group.issued.a", b"a")
        delivery = await anext(deliveries)
        await delivery.retry(0.0)
        again = await anext(deliveries)
        assert (again.data, delivery.num_delivered, again.num_delivered) == (b"a", 1, 2)
        await again.ack()


async def test_large_things_are_payloads_and_messages_name_them(broker: MemoryBroker) -> None:
    """Bytes are stored first, under the checksum of their content, and named afterwards: a name is never a lie."""
    tokens = bytes(range(256)) * 1000
    ref = await broker.payloads.put(tokens)
    assert await broker.payloads.put(tokens) == ref
    assert bytes(await broker.payloads.get(ref)) == tokens
