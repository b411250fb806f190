"""What a recording says about itself: the run, when, and how each topic's messages were built when it was written."""

from __future__ import annotations

import os
import time
from typing import BinaryIO, Final

import msgspec
import zstandard

from broker.recording.errors import NotARecordingError
from broker.recording.frames import PRELUDE_BYTES, Kind, check_prelude, place_at, read_frame
from schemas.json_schema import SCHEMA_VERSION, TopicSchema, topic_schemas


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of every file of a recording."""

    run: str
    created_unix_s: float
    headrace_version: str
    schema_version: int = SCHEMA_VERSION
    topics: dict[str, TopicSchema] = {}
    """Topic → message name, key fields and JSON Schema, as the writer knew them."""
    part: int = 0
    """0 for the first file, then 1, 2 … of a rotated recording."""
    redactions: list[str] = []
    """The rules by which messages and payloads were changed before they were written."""
    weights: str = "first"
    """Which weight files were kept: `none`, `first` or `all`."""


def new_header(run: str, *, headrace_version: str, redactions: list[str], weights: str) -> Header:
    """The header of a new recording of `run`."""
    return Header(
        run=run,
        created_unix_s=time.time(),
        headrace_version=headrace_version,
        topics=topic_schemas(),
        redactions=redactions,
        weights=weights,
    )


_decoder: Final = msgspec.msgpack.Decoder(Header)


def encode_header(header: Header) -> bytes:
    """The body of the header frame."""
    return zstandard.ZstdCompressor(level=9).compress(msgspec.msgpack.encode(header))


def read_header(file: BinaryIO, path: str) -> Header:
    """The header of a recording file.

    Raises:
        NotARecordingError, NewerRecordingError.
    """
    check_prelude(file, path)
    place = place_at(file, PRELUDE_BYTES, os.fstat(file.fileno()).st_size)
    found = None if place is None or place.kind != Kind.HEADER else read_frame(file, place)
    if found is None:
        raise NotARecordingError(
            f"{path}: expected a whole header after the first {PRELUDE_BYTES} bytes, found none: the file was cut off "
            "there or its header is damaged"
        )
    try:
        return _decoder.decode(zstandard.ZstdDecompressor().decompress(found[1]))
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise NotARecordingError(f"{path}: the header can't be read: {error}") from error
