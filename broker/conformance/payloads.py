"""Payload stores, checked through a broker's own and, by `STORE_CHECKS`, on their own."""

# ruff: noqa: D103 - the name of a check is its sentence
from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec

from broker.api import CollectablePayloads, PayloadStore
from broker.conformance.asserting import BrokerFactory, Check, claim, equal, raises
from broker.errors import PayloadMissingError
from schemas.errors import DigestError
from schemas.payload import RUN_STORE, content_id, inline_ref

StoreCheck = Callable[[CollectablePayloads], Awaitable[None]]


async def check_bytes_come_back(store: PayloadStore) -> None:
    rng = random.Random(3)  # noqa: S311 - test data
    for size in (0, 1, 1000, 1024 * 1024, 3 * 1024 * 1024 + 17):
        data = rng.randbytes(size)
        ref = await store.put(memoryview(data))
        equal((ref.store, ref.id, ref.size_bytes), (RUN_STORE, content_id(data), size), "reference")
        equal(bytes(await store.get(ref)), data, f"{size} bytes")


async def check_the_same_bytes_are_stored_once(store: PayloadStore) -> None:
    data = random.Random(4).randbytes(2 * 1024 * 1024 + 5)  # noqa: S311 - test data
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(store.put, data)
    ref = await store.put(data)
    equal(bytes(await store.get(ref)), data, "bytes")


async def check_a_missing_payload_is_named(store: PayloadStore) -> None:
    ref = await store.put(b"there for a while")
    await store.delete(ref.id)
    await raises(PayloadMissingError, store.get(ref), "a payload that was deleted")
    await store.delete(ref.id)
    elsewhere = msgspec.structs.replace(ref, store="elsewhere")
    await raises(PayloadMissingError, store.get(elsewhere), "a payload of another store")


async def check_bytes_other_than_promised_are_refused(store: PayloadStore) -> None:
    for size in (100, 2 * 1024 * 1024 + 100):
        ref = await store.put(bytes(size))
        for wrong in (size - 1, size + 1):
            await raises(DigestError, store.get(msgspec.structs.replace(ref, size_bytes=wrong)), "another size")


async def check_inline_payloads_need_no_store(store: PayloadStore) -> None:
    equal(bytes(await store.get(inline_ref(b"inside"))), b"inside", "bytes")
    damaged = msgspec.structs.replace(inline_ref(b"inside"), inline=memoryview(b"1nside"))
    await raises(DigestError, store.get(damaged), "damaged bytes")


async def check_what_is_stored_is_listed_by_age(store: CollectablePayloads) -> None:
    began_s = time.time()
    refs = [await store.put(f"listed {number}".encode()) for number in range(3)]
    refs.append(await store.put(bytes(2 * 1024 * 1024 + 1)))
    later_s = time.time() + 60
    found = {payload.id: payload async for payload in store.stored(before_unix_s=later_s)}
    for ref in refs:
        claim(ref.id in found, f"{ref.id} is listed")
        equal(found[ref.id].size_bytes, ref.size_bytes, "size")
        claim(began_s - 60 < found[ref.id].unix_time_s < later_s, "the time it was stored")
    await store.delete(refs[0].id)
    ids = [payload.id async for payload in store.stored(before_unix_s=later_s)]
    claim(refs[0].id not in ids and refs[1].id in ids, "what is deleted is listed no more")
    equal([payload.id async for payload in store.stored(before_unix_s=began_s - 3600)], [], "what is old")


async def check_what_is_listed_can_be_collected(store: CollectablePayloads) -> None:
    refs = [await store.put(f"collected {number}".encode()) for number in range(2)]
    listed = [payload async for payload in store.stored(before_unix_s=time.time() + 60) if payload.id == refs[0].id]
    await store.collect(listed[0])
    await raises(PayloadMissingError, store.get(refs[0]), "the collected one")
    await store.collect(listed[0])
    equal(bytes(await store.get(refs[1])), b"collected 1", "another one")


STORE_CHECKS: Final[tuple[StoreCheck, ...]] = (
    check_bytes_come_back,
    check_the_same_bytes_are_stored_once,
    check_a_missing_payload_is_named,
    check_bytes_other_than_promised_are_refused,
    check_inline_payloads_need_no_store,
    check_what_is_stored_is_listed_by_age,
    check_what_is_listed_can_be_collected,
)


def collectable(store: PayloadStore) -> CollectablePayloads:
    """The store, if it can list what it holds, as every store of a broker must."""
    claim(hasattr(store, "stored"), f"{store.name}: expected a store that lists what it holds")
    return store  # pyright: ignore[reportReturnType] - just checked


async def check_the_broker_s_store_does_all_that(make: BrokerFactory) -> None:
    async with make() as broker:
        for check in STORE_CHECKS:
            await check(collectable(broker.payloads))


async def check_payloads_are_seen_by_other_connections(make: BrokerFactory) -> None:
    async with make() as one, make() as two:
        ref = await one.payloads.put(b"shared")
        equal(bytes(await two.payloads.get(ref)), b"shared", "bytes")


CHECKS: Final[tuple[Check, ...]] = (
    check_the_broker_s_store_does_all_that,
    check_payloads_are_seen_by_other_connections,
)
