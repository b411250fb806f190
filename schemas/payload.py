"""References to payloads: what a control message says instead of carrying tokens."""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

from schemas.errors import DigestError

INLINE: Final = "inline"
RUN_STORE: Final = "run"
"""The store that the run's config names. Messages never say which kind it is, so that a recording replays anywhere."""

INLINE_LIMIT_BYTES: Final = 16 * 1024
"""Below this size a payload may ride inside the control message that names it."""


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """Names bytes in a payload store: stored before the message that names them."""

    store: str
    """`inline`, or `run` for the store of the run."""
    id: str
    """Content address: the 128-bit xxh3 of the bytes, 32 hex digits."""
    size_bytes: int
    inline: memoryview | None = None
    """The bytes themselves, when `store` is `inline`."""


def content_id(data: bytes | memoryview) -> str:
    """The content address of `data`: 128-bit xxh3 as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest(data: bytes | memoryview) -> str:
    """A short digest for comparing two messages of one key: 64-bit xxh3 as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def inline_ref(data: bytes | memoryview) -> PayloadRef:
    """A reference that carries its own bytes."""
    return PayloadRef(store=INLINE, id=content_id(data), size_bytes=len(data), inline=memoryview(data))


def run_ref(data: bytes | memoryview) -> PayloadRef:
    """The reference under which the run's store holds `data`; pure, so that folds can name payloads before they are put."""
    return PayloadRef(store=RUN_STORE, id=content_id(data), size_bytes=len(data))


def check_payload(ref: PayloadRef, data: bytes | memoryview) -> None:
    """Compare bytes with what the reference promises.

    Raises:
        DigestError: size or checksum differ.
    """
    if len(data) != ref.size_bytes:
        raise DigestError(f"payload {ref.id}: expected {ref.size_bytes} bytes, found {len(data)}")
    found = content_id(data)
    if found != ref.id:
        raise DigestError(f"payload {ref.id}: the bytes read have the checksum {found}; the store is damaged")
