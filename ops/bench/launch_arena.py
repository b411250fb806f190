"""The bare Arena of `headrace bench launch`: accepts every launch and ends each task after a fixed time. Nothing else."""

from __future__ import annotations

import asyncio
import sys
import time

_HEAD = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests come whole, since clients send one and wait."""

    def __init__(self, ends_at_s: list[float], episode_s: float) -> None:
        self._ends_at_s = ends_at_s
        self._episode_s = episode_s
        self._transport: asyncio.Transport | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to answer."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each whole request."""
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            self._answer(head.split(b" ", 2)[1])

    def _answer(self, path: bytes) -> None:
        status = b"200 OK"
        if path.endswith(b"/launch_one_task"):
            status, body = (
                b"202 Accepted",
                b'{"accepted":true,"task_id":"task-%d","status":"PENDING"}' % len(self._ends_at_s),
            )
            self._ends_at_s.append(time.monotonic() + self._episode_s)
        else:
            task_id = path.split(b"/")[-2]
            number = int(task_id.removeprefix(b"task-"))
            ended = number < len(self._ends_at_s) and time.monotonic() >= self._ends_at_s[number]
            state = b'"DONE","score":1.0' if ended else b'"AGENT_RUNNING"'
            body = b'{"task_id":"%s","status":%s}' % (task_id, state)
        if self._transport is not None:
            self._transport.write(_HEAD % (status, len(body), body))


async def main(episode_s: float) -> None:
    """Serve on loopback until standard input ends."""
    loop = asyncio.get_running_loop()
    ends_at_s: list[float] = []
    server = await loop.create_server(lambda: Connection(ends_at_s, episode_s), "127.0.0.1", 0, backlog=4096)
    host, port = server.sockets[0].getsockname()[:2]
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
