"""The conformance suite on every broker."""

from __future__ import annotations

import pytest

from broker.conformance import CHECKS, Check
from broker.conformance.payloads import STORE_CHECKS, StoreCheck
from broker.connect import connect, open_admin
from broker.directory import DirectoryPayloads
from broker.memory import MemoryServer
from broker.topology import RunLimits

SMALL = RunLimits(log_max_bytes=256 * 2**20, payload_max_bytes=512 * 2**20, state_max_bytes=16 * 2**20)


def named(check) -> str:
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("check", CHECKS, ids=named)
async def test_memory(check: Check, run):
    memory = MemoryServer()
    await check(lambda: connect("memory://", run, memory=memory))


@pytest.mark.parametrize("check", CHECKS, ids=named)
async def test_jetstream(check: Check, run, server):
    settings = server.connect_settings()
    await check(lambda: connect(server.url, run, settings, create=True, limits=SMALL))
    async with open_admin(server.url, settings) as admin:
        await admin.delete_run(run)


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("check", STORE_CHECKS, ids=named)
async def test_directory(check: StoreCheck, fsync, tmp_path):
    await check(DirectoryPayloads(tmp_path / "payloads", fsync=fsync))
