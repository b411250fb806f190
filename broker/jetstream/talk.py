"""Short-lived talk on core subjects: announcements and requests. Nothing of it is stored."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio

from broker.errors import NotConnectedError, RequestFailedError, TooLargeError
from broker.iterating import Iterating
from broker.jetstream.headers import header, status_of
from broker.jetstream.link import Link, LinkLostError, NoAnswerError
from broker.naming import check_literal, check_talk_subject
from schemas.subjects import check_filter

QUEUE: Final = "servers"
FAILED: Final = b"Request-Failed"
_NOBODY_WAIT_S: Final = 0.05


def announce(link: Link, subject: str, data: bytes) -> None:
    """Tell whoever listens now; dropped while the connection is away for long."""
    check_literal(subject)
    check_talk_subject(subject)
    if len(data) > link.client.max_payload:
        raise TooLargeError(f"{subject!r}: expected at most {link.client.max_payload} bytes, found {len(data)}")
    link.tell(subject, data)


@asynccontextmanager
async def listen(link: Link, pattern: str) -> AsyncGenerator[AsyncIterator[tuple[str, bytes]]]:
    """What is announced from now on."""
    check_filter(pattern)
    check_talk_subject(pattern)
    heard: deque[tuple[str, bytes]] = deque(maxlen=link.settings.listen_buffer)
    arrived = asyncio.Event()

    def hear(subject: bytes, _reply: bytes, data: bytes | memoryview, _headers: bytes | None) -> None:
        heard.append((subject.decode("utf-8", "replace"), bytes(data)))
        arrived.set()

    async def take() -> tuple[str, bytes]:
        while not heard:
            arrived.clear()
            await arrived.wait()
        return heard.popleft()

    subscription = await link.subscribe(pattern, hear)
    try:
        yield Iterating(take)
    finally:
        link.client.forget(subscription)


async def request(link: Link, subject: str, data: bytes, deadline_s: float) -> bytes:
    """Ask one server of a subject; ask again only where nobody can have heard it."""
    check_literal(subject)
    check_talk_subject(subject)
    until_s = time.monotonic() + deadline_s
    with anyio.move_on_after(deadline_s):
        while True:
            await link.wait_connected(until_s - time.monotonic())
            try:
                answer = await link.ask(subject, data, timeout_s=deadline_s + 1)
            except (LinkLostError, NoAnswerError):
                break
            if status_of(answer.headers) != 503:
                found = bytes(answer.data)
                if header(answer.headers, FAILED) is not None:
                    text = found.decode("utf-8", "replace")
                    raise RequestFailedError(f"{subject!r} was answered with an error: {text}")
                return found
            await anyio.sleep(_NOBODY_WAIT_S)
    raise NotConnectedError(f"expected an answer on {subject!r} within {deadline_s} s, found none")


@asynccontextmanager
async def serve(link: Link, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> AsyncGenerator[None]:
    """Answer requests, several at a time, while the context is open."""
    check_literal(subject)
    check_talk_subject(subject)
    send, receive = anyio.create_memory_object_stream[tuple[bytes, bytes]](link.settings.listen_buffer)

    def arrived(_subject: bytes, reply: bytes, data: bytes | memoryview, _headers: bytes | None) -> None:
        try:
            send.send_nowait((reply, bytes(data)))
        except anyio.WouldBlock:
            link.tell(reply.decode(), b"too many requests are waiting here", headers=FAILED + b": busy\r\n")

    async def answer() -> None:
        async for reply, data in receive:
            try:
                result, head = await handler(data), b""
            except Exception as error:  # whoever asks must hear of it instead of waiting
                link.log.exception("request failed", subject=subject)
                result, head = str(error).encode(), FAILED + b": error\r\n"
            link.tell(reply.decode(), result, headers=head)

    subscription = await link.subscribe(subject, arrived, queue=QUEUE)
    try:
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            for _ in range(link.settings.serve_concurrency):
                tasks.start_soon(answer)
            try:
                yield
            except Exception as error:  # noqa: BLE001 - raised below as itself: a task group would wrap it
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
    finally:
        link.client.forget(subscription)
        send.close()
        receive.close()
