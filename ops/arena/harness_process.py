"""A warm harness process: reads jobs as JSON lines on standard input, plays them all at once, writes outcomes.

Ends when its parent dies or closes the pipe.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import aiohttp
import msgspec

from ops.arena.harness import play
from ops.arena.jobs import LINE_LIMIT_BYTES, End, Job, Outcome
from ops.arena.lifeline import die_with_parent


async def serve_jobs() -> None:
    """Play jobs until standard input ends or SIGTERM comes; commands that run end with it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as http:
        _answer(b'"ready"')
        loop.add_signal_handler(signal.SIGTERM, reader.feed_eof)
        running: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            task = asyncio.create_task(_play_line(line, http))
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _play_line(line: bytes, http: aiohttp.ClientSession) -> None:
    job = msgspec.json.decode(line, type=Job)
    try:
        outcome = await play(job, http)
    except Exception as error:  # noqa: BLE001 - the process's outermost edge: a fault here is one episode's, not all episodes'
        text = f"harness fault: {type(error).__name__}: {error}"
        outcome = Outcome(job_id=job.job_id, end=End.HARNESS_FAILED, message=text)
    _answer(msgspec.json.encode(outcome))


def _answer(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Serve until the parent is gone."""
    die_with_parent(int(sys.argv[1]))
    os.setsid()
    asyncio.run(serve_jobs())


if __name__ == "__main__":
    main()
