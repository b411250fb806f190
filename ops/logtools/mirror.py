"""`headrace bridge`: messages of a run's log, copied to a RabbitMQ as they come, for teams that only consume there.

    log after the kept position ─▶ exchange, confirmed ─▶ position kept (a last value of the run, or a file)

Nothing is written to the log. A bridge that dies goes on where it was: a message may come twice, with the same id.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import structlog
import xxhash

from broker.api import Broker, Mirror, Record

log = structlog.get_logger("headrace.bridge")

_BATCH: Final = 256


class MirrorPosition:
    """Where a bridge is: in a file, or beside the run's log."""

    def __init__(self, broker: Broker, target: str, patterns: tuple[str, ...], file: Path | None) -> None:
        """Args:
        broker: of the run.
        target: names the place where the copies go: another place begins at the log's beginning.
        patterns: what is copied.
        file: where the position is; None: beside the run's log.
        """
        self._broker: Final = broker
        self._file: Final = file
        digest = xxhash.xxh3_64_hexdigest("\n".join((target, *patterns)).encode())
        self._key: Final = f"mirror.{digest}"

    async def load(self) -> int:
        """The sequence up to which all is copied."""
        if self._file is not None:
            path = anyio.Path(self._file)
            return int(await path.read_text()) if await path.exists() else 0
        found = await self._broker.load_state(self._key)
        return int(found[0]) if found else 0

    async def save(self, sequence: int) -> None:
        """All up to here is copied and confirmed."""
        if self._file is None:
            await self._broker.save_state(self._key, str(sequence).encode())
            return
        beside = anyio.Path(self._file.with_name(f".{self._file.name}.new"))
        await beside.write_text(str(sequence))
        await beside.replace(self._file)


async def mirror_run(
    broker: Broker,
    mirror: Mirror,
    patterns: tuple[str, ...],
    position: MirrorPosition,
    *,
    follow: bool,
    on_copied: Callable[[int, int], None],
) -> int:
    """Copy until cancelled, or with `follow=False` to the log's present end; how many messages were copied.

    Args:
        on_copied: gets the number of copied messages so far and the sequence of the last one.
    """
    copied = 0
    batch: list[Record] = []

    async def send() -> None:
        nonlocal copied
        if not batch:
            return
        with anyio.CancelScope(shield=True):
            await mirror.publish_all(batch)
            await position.save(batch[-1].sequence)
        copied += len(batch)
        on_copied(copied, batch[-1].sequence)
        batch.clear()

    async with broker.read_batches(patterns, after_sequence=await position.load(), follow=follow) as batches:
        async for found in batches:
            for number in range(len(found)):
                batch.append(
                    Record(
                        subject=found.subjects[number],
                        sequence=int(found.sequences[number]),
                        data=found.datas[number],
                        unix_time_s=float(found.unix_times_s[number]),
                        headers=found.headers.get(number, {}),
                    )
                )
                if len(batch) >= _BATCH:
                    await send()
            await send()
    return copied
