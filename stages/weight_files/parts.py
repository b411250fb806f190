"""How a version's files are cut for the payload store. Pure.

Cuts lie where tensors begin, so a tensor that a step left alone is a piece that stands in the store, and in every
reader's cache, already: pieces are named by their content. Small neighbours share a piece, large tensors take several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from schemas.messages.training import WeightsManifest

PART_BYTES: Final = 4 * 1024 * 1024
"""The largest piece. What a transfer keeps in memory is a few of these."""
JOIN_BYTES: Final = 512 * 1024
"""Tensors below this share a piece with their neighbours while it stays below it."""


def spans(size_bytes: int) -> list[tuple[int, int]]:
    """(offset, size) of the pieces of a file that nothing is known of."""
    return list(_pieces(0, size_bytes)) or [(0, 0)]


def tensor_spans(manifest: WeightsManifest) -> list[tuple[int, int]]:
    """(offset, size) of the pieces of the file that holds the tensors: in order, without gaps, from its header to its end."""
    data_bytes = max((tensor.offset + tensor.size_bytes for tensor in manifest.tensors), default=0)
    start = manifest.total_bytes - data_bytes
    found = list(_pieces(0, start))
    open_from = start
    for tensor in sorted(manifest.tensors, key=lambda tensor: (tensor.offset, tensor.size_bytes)):
        begin, end = start + tensor.offset, start + tensor.offset + tensor.size_bytes
        if end - open_from < JOIN_BYTES:
            continue
        found += _pieces(open_from, begin)
        open_from = begin
        if end - begin >= JOIN_BYTES:
            found += _pieces(begin, end)
            open_from = end
    found += _pieces(open_from, manifest.total_bytes)
    return found


def _pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
    for offset in range(start, end, PART_BYTES):
        yield offset, min(PART_BYTES, end - offset)
