"""What the server adds to the app: an answer's head and body leave together, in order, and all of it before the connection closes."""

import asyncio

from stages.gateway.serve import _JoinedWrites


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed_after: int | None = None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed_after = len(self.written)

    def is_closing(self) -> bool:
        return self.closed_after is not None


async def test_what_is_written_in_one_turn_of_the_loop_is_sent_at_once():
    transport = Transport()
    joined = _JoinedWrites(transport, asyncio.get_running_loop())
    joined.write(b"head ")
    joined.write(b"body")
    assert transport.written == []
    await asyncio.sleep(0)
    assert transport.written == [b"head body"]
    joined.write(b"more")
    await asyncio.sleep(0)
    assert transport.written == [b"head body", b"more"]


async def test_closing_sends_what_is_held_first():
    transport = Transport()
    joined = _JoinedWrites(transport, asyncio.get_running_loop())
    joined.write(b"last")
    joined.close()
    assert (transport.written, transport.closed_after, joined.is_closing()) == ([b"last"], 1, True)
    await asyncio.sleep(0)
    assert transport.written == [b"last"]
