"""The least that nats-py alone can do: loops against which headrace's runner is measured. Not used by any run.

They pull continuously (batches asked for ahead), decode nothing, keep no limits and survive no fault.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

_BATCH: Final = 256
_IN_FLIGHT: Final = 256


async def bare_sink(url: str, token: str, stream: str, pattern: str, durable: str, count: int) -> float:
    """Seconds to pull and acknowledge `count` messages."""
    async with _client(url, token) as client:
        messages = await _pull(client, stream, pattern, durable, count)
        started = time.perf_counter()
        async for message in messages:
            await client.publish(message.reply, b"+ACK")
        await client.flush()
        return time.perf_counter() - started


async def bare_pass_through(
    url: str, token: str, stream: str, pattern: str, durable: str, count: int, subject_of: Callable[[str], str]
) -> float:
    """Seconds to pull `count` messages, publish each once to another subject (confirmed), then acknowledge it."""
    async with _client(url, token) as client:
        jetstream = client.jetstream(publish_async_max_pending=4 * _IN_FLIGHT)
        slots = asyncio.Semaphore(_IN_FLIGHT)
        replies: asyncio.Queue[str] = asyncio.Queue()

        def confirmed(reply: str) -> None:
            slots.release()
            replies.put_nowait(reply)

        async def acknowledge() -> None:
            for _ in range(count):
                await client.publish(await replies.get(), b"+ACK")

        messages = await _pull(client, stream, pattern, durable, count)
        started = time.perf_counter()
        acknowledging = asyncio.create_task(acknowledge())
        async for message in messages:
            await slots.acquire()
            target = subject_of(message.subject)
            headers = {"Nats-Msg-Id": target, "Nats-Expected-Last-Subject-Sequence": "0"}
            future = await jetstream.publish_async(target, message.data, headers=headers)
            future.add_done_callback(lambda _future, reply=message.reply: confirmed(reply))
        await acknowledging
        await client.flush()
        return time.perf_counter() - started


async def bare_produce(url: str, token: str, subject: str, count: int, body: bytes) -> None:
    """Publish `count` messages once each, confirmed, so many at once as pass-through does."""
    async with _client(url, token) as client:
        jetstream = client.jetstream(publish_async_max_pending=4 * _IN_FLIGHT)
        slots = asyncio.Semaphore(_IN_FLIGHT)
        for number in range(count):
            await slots.acquire()
            target = f"{subject}.{number}"
            headers = {"Nats-Msg-Id": target, "Nats-Expected-Last-Subject-Sequence": "0"}
            future = await jetstream.publish_async(target, body, headers=headers)
            future.add_done_callback(lambda _future: slots.release())
        for _ in range(_IN_FLIGHT):
            await slots.acquire()


async def bare_consume(
    url: str, token: str, stream: str, pattern: str, durable: str, count: int, decode: Callable[[bytes], object]
) -> tuple[float, float]:
    """Pull `count` messages, decode and acknowledge each; when the first came and when the last was done."""
    async with _client(url, token) as client:
        first = 0.0
        async for message in await _pull(client, stream, pattern, durable, count):
            first = first or time.perf_counter()
            decode(message.data)
            await client.publish(message.reply, b"+ACK")
        await client.flush()
        return first, time.perf_counter()


async def bare_latencies(
    url: str, token: str, stream: str, subject: str, count: int, pause_s: float, body: bytes
) -> list[float]:
    """Seconds from publish to handler of one message at a time, over two connections."""
    found: list[float] = []
    async with _client(url, token) as sender, _client(url, token) as taker:
        jetstream = sender.jetstream()
        messages = await _pull(taker, stream, f"{subject}.>", "bare-latency", count)

        async def take() -> None:
            async for message in messages:
                found.append(time.perf_counter() - sent[0])
                await taker.publish(message.reply, b"+ACK")

        sent = [0.0]
        taking = asyncio.create_task(take())
        for number in range(count):
            await asyncio.sleep(pause_s)
            sent[0] = time.perf_counter()
            await jetstream.publish(f"{subject}.{number}", body)
        await taking
    return found


@asynccontextmanager
async def _client(url: str, token: str) -> AsyncGenerator[Client]:
    client = await nats.connect(url, token=token or None, pending_size=32 * 1024 * 1024)
    try:
        yield client
    finally:
        await client.close()


async def _pull(client: Client, stream: str, pattern: str, durable: str, count: int) -> AsyncGenerator[Msg]:
    config = ConsumerConfig(
        durable_name=durable, ack_policy=AckPolicy.EXPLICIT, filter_subject=pattern, max_ack_pending=4096
    )
    await client.jetstream().add_consumer(stream, config)
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, pending_bytes_limit=-1)
    ask = msgspec.json.encode({"batch": _BATCH, "expires": 30_000_000_000})
    next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"

    async def messages() -> AsyncGenerator[Msg]:
        await client.publish(next_subject, ask, reply=inbox)
        credit = _BATCH
        left = count
        async for message in subscription.messages:
            yield message
            left -= 1
            if not left:
                return
            credit -= 1
            if credit <= _BATCH // 2:
                await client.publish(next_subject, ask, reply=inbox)
                credit += _BATCH

    return messages()
