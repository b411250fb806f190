"""A gateway process that a test may kill: `python killable_gateway.py FOLDER NUM_SESSIONS` prints its URL and its sessions' tokens.

Its log is a folder of files, one a message, created once: what stands there has survived.
"""

import json
import os
import sys
from pathlib import Path

import anyio
import msgspec
from gateway_fakes import FakeEngine, House, house

from schemas.messages.rollout import InteractionRecorded, SessionClosed, SessionOpened
from schemas.payload import PayloadRef, content_id
from stages.gateway.ports import RecordConflictError
from stages.gateway.serve import serve_gateway


class FolderLog:
    """Recorder and payloads over a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    async def record(self, message) -> None:
        match message:
            case SessionOpened():
                name = f"opened.{message.session}.{message.gateway}"
            case InteractionRecorded():
                name = f"interaction.{message.session}.{message.ordinal:06d}"
            case _:
                name = f"closed.{message.session}"
        data = msgspec.msgpack.encode(message)
        scratch = self.folder / f"tmp.{os.getpid()}.{name}"
        scratch.write_bytes(data)
        try:
            os.link(scratch, self.folder / name)
        except FileExistsError:
            if (self.folder / name).read_bytes() != data:
                raise RecordConflictError(name) from None
        finally:
            scratch.unlink()
        await anyio.lowlevel.checkpoint()

    def _read(self, pattern, kind):
        return [msgspec.msgpack.decode(path.read_bytes(), type=kind) for path in sorted(self.folder.glob(pattern))]

    def interactions(self, session):
        return self._read(f"interaction.{session}.*", InteractionRecorded)

    async def read_session(self, session):
        return self.interactions(session)

    async def read_openings(self, session):
        return self._read(f"opened.{session}.*", SessionOpened)

    async def read_closing(self, session):
        return next(iter(self._read(f"closed.{session}", SessionClosed)), None)

    async def put(self, data) -> PayloadRef:
        name = content_id(data)
        (self.folder / f"payload.{name}").write_bytes(data)
        return PayloadRef(store="folder", id=name, size_bytes=len(data))

    async def get(self, ref) -> memoryview:
        data = ref.inline if ref.inline is not None else (self.folder / f"payload.{ref.id}").read_bytes()
        return memoryview(data)


def folder_house(folder: Path, name: str) -> House:
    log = FolderLog(folder)
    return house(FakeEngine(lambda request: f"answer {request.prompt_ids.size}"), recorder=log, payloads=log, name=name)


async def main(folder: str, num_sessions: int) -> None:
    home = folder_house(Path(folder), "killed")
    tickets = [await home.gateway.open_session(f"s{number}") for number in range(num_sessions)]

    def ready(url: str) -> None:
        sys.stdout.write(json.dumps({"url": url, "tokens": [one.token for one in tickets]}) + "\n")
        sys.stdout.flush()

    await serve_gateway(home.gateway, ready=ready)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]))
