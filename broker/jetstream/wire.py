"""nats-py's client with two short cuts: messages go from the socket straight to a function (`transport.py`), and commands are put
together here and sent without a task, a queue or a parsed header for each message.

The connection itself (handshake, TLS, credentials, pings, reconnecting, restoring subscriptions) stays nats-py's.
This is the only module that uses names that nats-py keeps to itself; `check_client` says so at once if they change.
It must not know JetStream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from nats.aio.client import Client, Srv
from nats.aio.subscription import Subscription

from broker.errors import BrokerError
from broker.jetstream.transport import WireTransport

Handler = Callable[[bytes, bytes, bytes | memoryview, bytes | None], None]
"""Called with subject, reply subject, data and raw headers of each message. Must not raise or block. Large data is a read-only
memoryview of the buffer it was received into.
"""

_NEEDED: Final = (
    "_process_err",
    "_process_op_err",
    "_process_pong",
    "_attempt_reconnect",
    "_connect_to_server",
    "_send_subscribe",
    "_send_unsubscribe",
)
_NEEDED_FIELDS: Final = (
    "_sid",
    "_subs",
    "_transport",
    "_pending",
    "_pending_data_size",
    "_flush_queue",
    "_pongs",
    "_pongs_received",
    "_pings_outstanding",
    "_reconnection_task",
)


def check_client() -> None:
    """Raise BrokerError if the installed nats-py lacks the parts that `WireClient` builds on."""
    fields = vars(Client())
    missing = [name for name in _NEEDED if not hasattr(Client, name)]
    missing += [name for name in _NEEDED_FIELDS if name not in fields]
    if missing:
        raise BrokerError(f"this nats-py lacks {', '.join(missing)}: install the version named in constraints.txt")


class WireClient(Client):
    """A NATS client with direct dispatch and direct sending. All its subscriptions are made with `subscribe_direct`."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[int, Handler] = {}
        self._failing: set[asyncio.Task[None]] = set()
        self._transport = WireTransport(self._deliver)
        self._is_over = False

    async def close(self) -> None:
        """Close for good. nats-py's own cancels a reconnecting task once, which a connection that fails at that moment swallows: it
        would go on trying for ever, and hold up the end of the event loop.
        """
        self._is_over = True
        await super().close()

    async def _connect_to_server(self, s: Srv) -> None:
        if self._is_over:
            raise asyncio.CancelledError
        await super()._connect_to_server(s)

    async def subscribe_direct(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Give the bytes of every message on `subject` to `handler`, also after reconnects."""
        sid = self._sid + 1  # the id that subscribe gives out before it first waits
        self._handlers[sid] = handler
        try:
            return await self.subscribe(subject, queue=queue)
        except BaseException:
            del self._handlers[sid]
            raise

    def replace_handler(self, subscription: Subscription, handler: Handler) -> None:
        """Let another function have what still comes on a subscription."""
        self._handlers[_sid_of(subscription)] = handler

    def forget(self, subscription: Subscription) -> None:
        """End a subscription: at once here, and at the server as soon as it is reachable."""
        sid = _sid_of(subscription)
        self._handlers.pop(sid, None)
        if self._subs.pop(sid, None) is not None:
            self.send_unsubscribe(subscription)

    def send_unsubscribe(self, subscription: Subscription) -> None:
        """Ask the server for no more messages; what is under way still comes."""
        if self.is_connected:
            self.send_nowait(f"UNSUB {_sid_of(subscription)}\r\n".encode())

    def send_nowait(self, command: bytes) -> None:
        """Queue a whole protocol command and let it be written soon."""
        self._pending.append(command)
        self._pending_data_size += len(command)
        self._kick()

    def send_parts_nowait(self, parts: tuple[bytes | memoryview, ...], size_bytes: int) -> None:
        """Queue a command given in parts, so that large data isn't copied into it."""
        self._pending.extend(parts)  # pyright: ignore[reportArgumentType] - only ever joined: a memoryview does
        self._pending_data_size += size_bytes
        self._kick()

    def _kick(self) -> None:
        if self._flush_queue is not None and self._flush_queue.empty() and self.is_connected:
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def written(self) -> None:
        """Wait until what is queued now is with the operating system."""
        if self._flush_queue is not None and self.is_connected:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            await self._flush_queue.put(future)
            await future

    def _deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes | memoryview, headers: bytes | None) -> None:
        handler = self._handlers.get(sid)
        if handler is None:
            return  # forgotten meanwhile
        try:
            handler(subject, reply, data, headers)
        except Exception as error:  # noqa: BLE001 - raised here it would end the connection in silence
            task = asyncio.get_running_loop().create_task(self._tell(error))
            self._failing.add(task)
            task.add_done_callback(self._failing.discard)

    async def _tell(self, error: Exception) -> None:
        await self._error_cb(error)

    async def _process_pong(self) -> None:
        """nats-py's own ends the read loop when somebody stopped waiting for this pong."""
        if self._pongs:
            future = self._pongs.pop(0)
            if not future.done():
                future.set_result(True)
            self._pongs_received += 1
            self._pings_outstanding = 0

    def revive(self) -> None:
        """Try again if the task that reconnects has died of something it did not expect."""
        task = self._reconnection_task
        if self.is_reconnecting and task is not None and task.done():
            self._reconnection_task = asyncio.get_running_loop().create_task(self._attempt_reconnect())

    async def _process_err(self, err_msg: str) -> None:
        """nats-py closes for good on most errors of the server; a connection here is renewed instead."""
        if "permissions violation" in err_msg or self.is_connecting:
            await super()._process_err(err_msg)
            return
        error = ConnectionError(f"the server ended the connection: {err_msg.strip()}")
        await self._error_cb(error)
        await self._process_op_err(error)


def _sid_of(subscription: Subscription) -> int:
    return subscription._id  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - the only way to name it to the server
