"""Batches of records: made of single records, put together, cut. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.api import Record, RecordBatch


def batch_of(records: Sequence[Record]) -> RecordBatch:
    """A batch of records that are in the order of their sequences."""
    return RecordBatch(
        subjects=[record.subject for record in records],
        sequences=np.array([record.sequence for record in records], dtype=np.int64),
        unix_times_s=np.array([record.unix_time_s for record in records], dtype=np.float64),
        datas=[record.data for record in records],
        headers={number: record.headers for number, record in enumerate(records) if record.headers},
    )


def joined(batches: Sequence[RecordBatch]) -> RecordBatch:
    """One batch of several that follow each other."""
    if len(batches) == 1:
        return batches[0]
    start = 0
    headers = {}
    for batch in batches:
        headers |= {start + number: found for number, found in batch.headers.items()}
        start += len(batch)
    return RecordBatch(
        subjects=[subject for batch in batches for subject in batch.subjects],
        sequences=np.concatenate([batch.sequences for batch in batches]),
        unix_times_s=np.concatenate([batch.unix_times_s for batch in batches]),
        datas=[data for batch in batches for data in batch.datas],
        headers=headers,
    )


def part(batch: RecordBatch, start: int, end: int) -> RecordBatch:
    """The messages `start` to before `end` of a batch."""
    return RecordBatch(
        subjects=batch.subjects[start:end],
        sequences=batch.sequences[start:end],
        unix_times_s=batch.unix_times_s[start:end],
        datas=batch.datas[start:end],
        headers={number - start: found for number, found in batch.headers.items() if start <= number < end},
    )
