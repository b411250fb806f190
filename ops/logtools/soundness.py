"""What of a recording could not be read, or is not in it: for whoever goes by what was read.

Only what a reader met is known: a damaged block that nobody asked for is found by `headrace inspect --verify`.
"""

from __future__ import annotations

import msgspec

from broker.recording import Recording
from ops.logtools.sources import FileSource, LogSource


class Soundness(msgspec.Struct, frozen=True, kw_only=True):
    """How whole a recording was found; a live log always is."""

    damages: list[str] = []
    """Bytes of its files that could not be read, each with its place."""
    gaps: list[tuple[int, int]] = []
    """(first missing, last missing) sequences: purged before they were recorded, filtered out, or damaged."""
    closed: bool = True
    """False: its last writer did not end properly, or goes on; it may end before the log does."""

    @property
    def is_whole(self) -> bool:
        """Nothing is damaged or missing."""
        return not self.damages and not self.gaps


def soundness(read: Recording | LogSource) -> Soundness:
    """How whole a recording is, as far as it was read until now."""
    recording = read.recording if isinstance(read, FileSource) else read
    if not isinstance(recording, Recording):
        return Soundness()
    gaps = [(gap.after_sequence + 1, gap.before_sequence - 1) for gap in recording.gaps()]
    damages = [
        f"{found.path}: {found.reason} ({found.size_bytes} bytes at {found.offset})" for found in recording.damages
    ]
    return Soundness(damages=damages, gaps=gaps, closed=recording.complete)
