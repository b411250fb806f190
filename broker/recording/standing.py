"""Whether a recording that is to be gone on with holds the beginning of the log that stands on the broker now.

    first and last messages of the file ──▶ what stands at their sequences ──▶ the same log, or OtherLogError

A run's id alone does not tell: a run that was begun anew under its former id has another log. It must not write anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio.to_thread
import msgspec

from broker.api import Broker, Record
from broker.recording.errors import OtherLogError
from broker.recording.reader import Recording
from schemas.subjects import PREFIX

_WITNESSES: Final = 64
"""Messages of each end of the file that are compared: more than one, as another run may have said the same once."""
_SAME_TIME_S: Final = 1e-3


class Witnesses(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of the log it was made from."""

    last_sequence: int
    first: list[Record]
    last: list[Record]
    redacted: bool
    """Its messages may be others than the log's: only their subjects and times tell."""


async def check_log(broker: Broker, path: Path) -> None:
    """See that the recording at `path`, if there is one, was made from this log. Only read; nothing is changed.

    Raises:
        OtherLogError: other messages stand where it was recorded, or the log ends before the file does.
        NotARecordingError, NewerRecordingError, OSError: the file can't be read.
        BrokerError: the broker is away.
    """
    file = await anyio.to_thread.run_sync(_witnesses, path)
    if file is None or not file.last_sequence:
        return
    last = (await broker.log_status()).last_sequence
    if last < file.last_sequence:
        raise OtherLogError(
            f"{path}: holds messages up to sequence {file.last_sequence}, the log of run {broker.run!r} ends at {last}: "
            f"the file was recorded from another log of that run id. {_DO}"
        )
    told = await _compare(broker, file, file.last, path, by_time=file.redacted)
    if not told:  # all of them were purged
        await _compare(broker, file, file.first, path, by_time=True)


_DO: Final = "Choose another file, or move this one away; it was not changed"


def _witnesses(path: Path) -> Witnesses | None:
    if not path.exists() or path.stat().st_size == 0:
        return None
    with Recording(path) as recording:
        sequence = recording.last_sequence
        last: list[Record] = []
        for number in range(len(recording.lookup.messages) - 1, -1, -1):
            after = recording.lookup.messages[number][1].head.first_sequence - 1
            last = list(recording.records(after_sequence=after))[-_WITNESSES:]
            if last:
                break  # else the block is damaged
        return Witnesses(
            last_sequence=sequence,
            first=list(itertools.islice(recording.records(), _WITNESSES)),
            last=last,
            redacted=bool(recording.header.redactions),
        )


async def _compare(broker: Broker, file: Witnesses, recorded: Sequence[Record], path: Path, *, by_time: bool) -> int:
    """How many of some recorded messages stand on the log, all of them the same.

    Args:
        by_time: the time at which it was stored decides: a message's bytes may be redacted, or common to several runs.
    """
    wanted = {record.sequence: record for record in recorded}
    told = 0
    if not wanted:
        return told
    last = max(wanted)
    filters = [f"{PREFIX}.{broker.run}.>"]
    async with broker.read(filters, after_sequence=min(wanted) - 1, follow=False) as standing:
        async for now in standing:
            if now.sequence > last:
                break
            former = wanted.get(now.sequence)
            if former is None:
                continue
            told += 1
            same_time = abs(former.unix_time_s - now.unix_time_s) < _SAME_TIME_S
            same = same_time if by_time else former.data == now.data
            same = same and (file.redacted or former.data == now.data)
            if former.subject != now.subject or not same:
                raise OtherLogError(_differs(path, former, now, broker.run))
    return told


def _differs(path: Path, former: Record, now: Record, run: str) -> str:
    if former.subject != now.subject:
        what = f"{former.subject} at sequence {former.sequence}, found {now.subject} there"
    else:
        what = (
            f"{former.subject} at sequence {former.sequence} as it was recorded, found another message of that subject"
        )
    return f"{path}: expected on the log of run {run!r} {what}: the file was recorded from another log of that run id. {_DO}"
