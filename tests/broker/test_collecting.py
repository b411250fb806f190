"""Payloads that are stored again while somebody collects old ones."""

from __future__ import annotations

import time

import msgspec
import pytest

from broker.api import CollectablePayloads, StoredPayload
from broker.connect import connect
from broker.directory import DirectoryPayloads
from broker.errors import PayloadMissingError
from broker.memory.payloads import MemoryPayloads
from broker.topology import RunLimits

LIMITS = RunLimits(log_max_bytes=2**20, payload_max_bytes=64 * 2**20, state_max_bytes=2**20)


async def listed(store: CollectablePayloads) -> list[StoredPayload]:
    return [payload async for payload in store.stored(before_unix_s=time.time() + 60)]


async def check_renewal(store: CollectablePayloads, data: bytes) -> None:
    """A payload that was stored again after it was listed is not collected."""
    ref = await store.put(data)
    before = await listed(store)
    assert (await store.put(data)) == ref
    for payload in before:
        await store.collect(payload)
    assert await store.get(ref) == data
    for payload in await listed(store):
        await store.collect(payload)
    with pytest.raises(PayloadMissingError):
        await store.get(ref)


@pytest.mark.parametrize("size", [10, 3 * 2**20 + 5])
async def test_a_payload_that_is_stored_again_is_not_collected_by_its_old_age(server, run, size):
    settings = msgspec.structs.replace(server.connect_settings(), payload_renew_after_s=-60.0)
    async with connect(server.url, run, settings, create=True, limits=LIMITS) as broker:
        store = broker.payloads
        await check_renewal(store, bytes(range(256)) * (size // 256) + b"x")  # pyright: ignore[reportArgumentType]


async def test_a_payload_file_that_is_stored_again_is_not_collected_by_its_old_age(tmp_path):
    await check_renewal(DirectoryPayloads(tmp_path, renew_after_s=-60.0), b"payload")


async def test_a_payload_in_memory_that_is_stored_again_is_not_collected_by_its_old_age():
    store, times = MemoryPayloads(), iter(range(1000, 2000))
    store.renew_after_s, store.now = -60.0, lambda: float(next(times))
    await check_renewal(store, b"payload")


async def test_young_payloads_are_not_written_twice(server, run):
    async with connect(server.url, run, server.connect_settings(), create=True, limits=LIMITS) as broker:
        await broker.payloads.put(b"payload")
        before = await listed(broker.payloads)  # pyright: ignore[reportArgumentType]
        await broker.payloads.put(b"payload")
        assert await listed(broker.payloads) == before  # pyright: ignore[reportArgumentType]
