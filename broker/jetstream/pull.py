"""One continuous pull on a consumer: credit is asked for in time, and asked again whenever the server may have
forgotten it (restart, lost heartbeats, a status that says so).

    server ──messages──▶ queue ──next()──▶ caller ──settled()──▶ room ──request──▶ server

Three numbers bound what a worker holds: credit (asked for, not arrived), queued, and unsettled (given to the caller).
Their sum never exceeds `prefetch`. A cancelled `next()` takes nothing from the queue. It must not know what is done
with messages.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import anyio
from nats.aio.subscription import Subscription

from broker.errors import NotConnectedError, RetryableBrokerError
from broker.jetstream.api import RETRY_WAIT_S
from broker.jetstream.headers import header, status_of, status_text
from broker.jetstream.link import Link

_GONE: Final = ("consumer deleted", "consumer is push based", "no responders", "bad request", "not found")
MISSED_HEARTBEATS: Final = 2
SILENCES_BEFORE_RECOVERY: Final = 3
"""Pulls in a row that are not even met with a heartbeat before somebody looks whether the consumer is there: while a
cluster elects a leader nobody answers, and asking again is all that is needed."""


class Raw(NamedTuple):
    """A message as it came."""

    subject: bytes
    reply: bytes
    data: bytes
    headers: bytes | None


class Pull:
    """A continuous pull. `open`, then `next` again and again, then `close`."""

    def __init__(
        self,
        link: Link,
        *,
        prefetch: int,
        max_bytes: int,
        recover: Callable[[str], Awaitable[str]],
        ack_wait_s: float | None = None,
    ) -> None:
        """Args:
        link: The connection.
        prefetch: Most messages held at once.
        max_bytes: Most bytes queued at once, roughly.
        recover: Makes sure that the consumer exists, given what went wrong; returns `<stream>.<consumer>`.
        ack_wait_s: After so long the server takes a message for lost; None where nothing is acknowledged.
        """
        self._link = link
        self._prefetch = prefetch
        self._max_bytes = max_bytes
        self._recover = recover
        self._consumer = ""
        self._inbox = link.new_inbox()
        self._generation = 0
        self._credit = 0
        self._queue: deque[Raw] = deque()
        self._queued_bytes = 0
        self._unsettled = 0
        self._heard_s = 0.0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._trouble = ""
        self._mending = False
        self._silences = 0
        self._touched_s = 0.0
        self._asking = False
        self._subscription: Subscription | None = None
        self._forget: list[Callable[[], None]] = []
        self.num_rearmed = 0
        self._acked = ack_wait_s is not None
        self._keep_every_s = 0.0 if ack_wait_s is None else ack_wait_s / 3

    async def open(self) -> None:
        """Start to pull."""
        self._subscription = await self._link.subscribe(f"{self._inbox}.*", self._on_message)
        self._forget = [
            self._link.on_reconnect(self._renewed),
            self._link.on_sweep(self._look),
            self._link.on_elected(self._elected),
        ]
        self._consumer = await self._recover("")
        self._rearm()

    async def next(self) -> Raw:
        """The next message. May be cancelled and called again without loss.

        Raises:
            Whatever `recover` raises when the consumer can't be had again.
        """
        while not self._queue:
            if self._trouble and not self._mending:
                await self._mend()
                continue
            self._ask()
            await self._woken()
        raw = self._queue.popleft()
        self._queued_bytes -= len(raw.data)
        if self._acked:
            self._unsettled += 1
        return raw

    async def _woken(self) -> None:
        """Wait for a message or a trouble."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.cancelled():
                with suppress(ValueError):
                    self._waiters.remove(waiter)
            else:
                self._wake()  # it was meant for a caller who goes: pass it on
            raise

    def _look(self) -> None:
        """Now and then: keep what is queued, and see whether what was asked for is still known to the server."""
        self._keep_queued()
        if not self._waiters or self._trouble:
            return
        patience_s = MISSED_HEARTBEATS * self._link.settings.idle_heartbeat_s
        if not self._credit or not self._link.client.is_connected or time.monotonic() - self._heard_s <= patience_s:
            self._ask()
            return
        self._silences += 1
        if self._silences >= SILENCES_BEFORE_RECOVERY or not self._acked:
            self.trouble("no heartbeat")
        else:
            self._rearm()

    def _renewed(self) -> None:
        """The server forgot what was asked for. What it had sent to a reader without acks may be lost, too."""
        if self._acked and self._consumer and not self._trouble:
            self._link.log.info("pulling again", consumer=self._consumer, reason="the connection was renewed")
            self._rearm()
        else:
            self.trouble("the connection was renewed")

    def _elected(self, consumer: str) -> None:
        """The consumer has a new leader, which knows nothing of what was asked for."""
        if consumer == self._consumer and not self._trouble:
            self._link.log.info("pulling again", consumer=consumer, reason="its leader is new")
            self._rearm()

    def _keep_queued(self) -> None:
        """A message that waits here for a free handler must not be taken for lost and handed to others."""
        now_s = time.monotonic()
        if not self._keep_every_s or now_s - self._touched_s < self._keep_every_s:
            return
        self._touched_s = now_s
        if self._link.client.is_connected:
            for raw in self._queue:
                self._link.client.send_nowait(b"PUB %b 4\r\n+WPI\r\n" % raw.reply)

    def _wake(self) -> None:
        """Wake one of the callers who wait: each message needs only one."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def settled(self) -> None:
        """The caller is done with a message: there is room for another."""
        self._unsettled -= 1
        self._ask_soon()

    def forgotten(self) -> None:
        """As `settled`, but from a finaliser, perhaps after the loop has ended: seen at the next look."""
        self._unsettled -= 1

    def trouble(self, reason: str) -> None:
        """What was asked for can't be relied on: mend it when the next message is wanted."""
        self._trouble = self._trouble or reason
        self._wake()

    async def close(self) -> None:
        """Stop; give back what was not taken, so that others get it at once."""
        for forget in self._forget:
            forget()
        if self._subscription is None:
            return
        client = self._link.client
        if self._acked:
            client.replace_handler(self._subscription, self._refuse)
            for raw in self._queue:
                self._refuse(*raw)
        self._queue.clear()
        if client.is_connected:
            client.send_unsubscribe(self._subscription)
            if self._acked:
                with suppress(NotConnectedError):  # then nothing is under way either
                    await self._link.round_trip()
        client.forget(self._subscription)

    @property
    def ready(self) -> bool:
        """Whether `next` has something at once."""
        return bool(self._queue)

    def queued(self) -> tuple[Sequence[bytes], Sequence[bytes], Sequence[bytes], Sequence[bytes | None]]:
        """What has arrived and was not taken, left where it is: subjects, replies, data and headers. Not for an empty queue."""
        subjects, replies, datas, headers = zip(*self._queue, strict=True)
        return subjects, replies, datas, headers

    def take(self, count: int) -> None:
        """Take the first `count` of the queued messages of a consumer that needs no acknowledgement."""
        if count == len(self._queue):
            self.clear()
        else:
            for _ in range(count):
                self._queued_bytes -= len(self._queue.popleft().data)
        self._ask()

    def clear(self) -> None:
        """Drop what is queued (a reader that starts again from a known place)."""
        self._queue.clear()
        self._queued_bytes = 0

    def _refuse(self, _subject: bytes, reply: bytes, _data: bytes | memoryview, headers: bytes | None) -> None:
        if reply and status_of(headers) == 0:
            self._link.client.send_nowait(b"PUB %b 4\r\n-NAK\r\n" % reply)

    async def _mend(self) -> None:
        """Make sure of the consumer and ask anew; one caller does it for all."""
        self._mending = True
        reason = self._trouble
        try:
            self._consumer = await self._recover_patiently(reason)
            self._trouble = ""
            self._silences = 0
            self._link.log.info("pulling again", consumer=self._consumer, reason=reason)
            self._rearm()
        finally:
            self._mending = False
            self._wake()

    async def _recover_patiently(self, reason: str) -> str:
        """However long the broker is away: whoever waits for messages waits for it, too."""
        while True:
            try:
                await self._link.wait_connected(self._link.settings.publish_deadline_s)
                return await self._recover(reason)
            except RetryableBrokerError as error:
                if self._link.client.is_closed:
                    raise
                self._link.log.warning("can't pull: the broker is away", reason=reason, error=str(error))
            await anyio.sleep(RETRY_WAIT_S)

    def _rearm(self) -> None:
        self.num_rearmed += 1
        self._generation += 1
        self._credit = 0
        self._heard_s = time.monotonic()
        self._ask()

    def _ask_soon(self) -> None:
        if not self._asking:
            self._asking = True
            asyncio.get_running_loop().call_soon(self._ask)

    def _ask(self) -> None:
        self._asking = False
        need = self._prefetch - len(self._queue) - self._unsettled - self._credit
        if need <= 0 or not self._consumer or self._trouble:
            return
        hungry = not self._credit and not self._queue
        if not hungry and (need * 2 < self._prefetch or self._queued_bytes * 2 > self._max_bytes):
            return
        settings = self._link.settings
        body = (
            f'{{"batch":{need},"expires":{int(settings.pull_expires_s * 1e9)},'
            f'"idle_heartbeat":{int(settings.idle_heartbeat_s * 1e9)},"max_bytes":{self._request_bytes()}}}'
        )
        if self._link.client.is_connected:
            reply = f"{self._inbox}.{self._generation}"
            self._link.tell(f"$JS.API.CONSUMER.MSG.NEXT.{self._consumer}", body.encode(), reply=reply)
            self._credit += need
            self._heard_s = time.monotonic()

    def _request_bytes(self) -> int:
        # A single message must always fit, or the server would refuse it for ever.
        return max(self._max_bytes // 2, self._link.client.max_payload + 64 * 1024)

    def _on_message(self, subject: bytes, reply: bytes, data: bytes | memoryview, headers: bytes | None) -> None:
        self._heard_s = time.monotonic()
        self._silences = 0
        if headers is not None and not data:
            status = status_of(headers)
            if status:
                self._on_status(subject, status, headers)
                return
        if self._credit:
            self._credit -= 1
        self._queue.append(Raw(subject, reply, bytes(data), headers))
        self._queued_bytes += len(data)
        self._wake()

    def _on_status(self, subject: bytes, status: int, headers: bytes) -> None:
        if status == 100 or not subject.endswith(b".%d" % self._generation):
            return  # a heartbeat, or the end of a pull that was given up before
        text = status_text(headers).lower()
        if status == 503 or any(word in text for word in _GONE):
            self.trouble(text or "no responders")
            return
        pending = header(headers, b"Nats-Pending-Messages")
        if pending is None or "leadership" in text or "shutdown" in text or "maxwaiting" in text:
            self.trouble(text or f"status {status}")
            return
        self._credit = max(0, self._credit - int(pending))
        self._wake()
