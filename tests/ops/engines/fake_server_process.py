"""A fake vLLM or SGLang server as a process of its own, started like a real one: for tests that kill it.

    python fake_server_process.py [--tokens N] --model FOLDER --port PORT …      (other flags of the real one are passed over)

`--tokens N`: each request gets N tokens, then nothing more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2] / "stages" / "clients" / "engines"))

from fake_servers import FakeServer, Running

from ops.arena.lifeline import die_with_parent
from schemas.config import EngineKind


class HangingServer(FakeServer):
    """Each request gets `num_tokens` tokens, then waits for ever."""

    num_tokens = 0

    async def _events(self, one: Running) -> AsyncIterator[bytes]:
        number = 0
        async for event in super()._events(one):
            yield event
            number += 1
            if number == self.num_tokens:
                await anyio.sleep_forever()


async def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", "--model-path", dest="model", default="")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=-1)
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--mark", default="", help="whom it belongs to, for who looks at processes")
    options, _ = parser.parse_known_args()
    if options.parent:
        die_with_parent(options.parent)
    fake = HangingServer(EngineKind(options.kind), options.model)
    fake.num_tokens = options.tokens
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port).start()
    await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
