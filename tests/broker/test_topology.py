from __future__ import annotations

import functools

import msgspec
import pytest

from broker.api import ConsumerSettings
from broker.connect import connect, open_admin
from broker.errors import StoreFullError, TopologyError
from broker.topology import RunLimits, durable, run_topology

LIMITS = RunLimits(log_max_bytes=10 * 2**20, payload_max_bytes=20 * 2**20, state_max_bytes=5 * 2**20)


@pytest.fixture
async def admin(server):
    async with open_admin(server.url, server.connect_settings()) as admin:
        yield admin


@pytest.fixture
def declared(run):
    durables = [durable("reward", [f"hr.{run}.episode.ended.>"], ConsumerSettings(ack_wait_s=7))]
    return run_topology(run, LIMITS, durables)


def test_durables_are_replicated_as_the_log_is():
    limits = msgspec.structs.replace(LIMITS, replicas=3)
    topology = run_topology("r", limits, [durable("d", ["hr.r.>"], ConsumerSettings())])
    assert {spec.replicas for spec in (*topology.streams, *topology.durables)} == {3}


async def test_what_is_applied_stands_as_declared(admin, declared):
    assert [line.partition(": ")[2] for line in await admin.diff(declared)] == ["missing"] * 4
    assert [change.done for change in await admin.apply(declared)] == ["created"] * 4
    assert await admin.diff(declared) == []
    await admin.verify(declared)
    assert [change.done for change in await admin.apply(declared)] == ["unchanged"] * 4


async def test_what_stands_otherwise_is_reported_and_not_changed(admin, declared, run):
    await admin.apply(declared)
    other = run_topology(
        run,
        msgspec.structs.replace(LIMITS, log_max_bytes=11 * 2**20),
        [durable("reward", [f"hr.{run}.episode.ended.>"], ConsumerSettings(ack_wait_s=8.0))],
    )
    expected = [
        f"stream HR_{run}: max_bytes: expected 11534336, found 10485760",
        "durable reward: ack_wait_s: expected 8.0, found 7.0",
    ]
    assert await admin.diff(other) == expected
    with pytest.raises(TopologyError, match="max_bytes: expected 11534336, found 10485760"):
        await admin.apply(other)
    with pytest.raises(TopologyError):
        await admin.verify(other)
    await admin.verify(declared)


async def test_an_update_changes_what_differs(admin, declared, run):
    await admin.apply(declared)
    other = run_topology(run, msgspec.structs.replace(LIMITS, log_max_bytes=11 * 2**20), declared.durables)
    assert [change.done for change in await admin.apply(other, update=True)] == ["changed"] + ["unchanged"] * 3
    await admin.verify(other)


async def test_connecting_with_other_limits_than_stand_there_is_reported(server, run, admin, declared):
    await admin.apply(declared)
    with pytest.raises(TopologyError, match="max_bytes"):
        async with connect(server.url, run, server.connect_settings(), create=True):
            pass


async def test_a_declared_durable_is_what_consume_expects(server, run, admin, declared):
    await admin.apply(declared)
    async with connect(server.url, run, server.connect_settings()) as broker:
        filters = [f"hr.{run}.episode.ended.>"]
        async with broker.consume("reward", filters, ConsumerSettings(ack_wait_s=7)):
            pass
        assert [status.durable for status in await broker.consumers()] == ["reward"]


async def test_a_foreign_stream_that_would_drop_messages_is_not_accepted(server, run, admin, declared):
    async with connect(server.url, f"{run}x", server.connect_settings(), create=True, limits=LIMITS) as broker:
        client = broker._link  # pyright: ignore[reportAttributeAccessIssue] - a foreign client's hands
        body = {"name": f"HR_{run}", "subjects": [f"hr.{run}.>"], "discard": "old", "max_age": 3_600_000_000_000}
        await client.ask(f"$JS.API.STREAM.CREATE.HR_{run}", msgspec.json.encode(body), timeout_s=5)
    lines = await admin.diff(declared)
    assert f"stream HR_{run}: discard: expected new, found old" in lines
    assert f"stream HR_{run}: max_age: expected 0, found 3600000000000" in lines
    assert f"stream HR_{run}: allow_direct: expected True, found False" in lines
    with pytest.raises(TopologyError, match="discard: expected new, found old"):
        await admin.apply(declared)


async def test_the_server_refuses_a_second_message_of_a_foreign_client(server, run):
    async with connect(server.url, run, server.connect_settings(), create=True, limits=LIMITS) as broker:
        await broker.publish(f"hr.{run}.prompt.published.s.1", b"first")
        answer = await broker._link.ask(f"hr.{run}.prompt.published.s.1", b"second", timeout_s=5)  # pyright: ignore[reportAttributeAccessIssue]
        assert b"maximum messages per subject exceeded" in answer.data
        record = await broker.get(f"hr.{run}.prompt.published.s.1")
        assert record is not None
        assert record.data == b"first"


async def test_single_messages_can_not_be_deleted_but_the_owner_can_purge(server, run):
    async with connect(server.url, run, server.connect_settings(), create=True, limits=LIMITS) as broker:
        for number in range(3):
            await broker.publish(f"hr.{run}.a.b.{number}", b"x")
        answer = await broker._link.ask(  # pyright: ignore[reportAttributeAccessIssue]
            f"$JS.API.STREAM.MSG.DELETE.HR_{run}", b'{"seq":2}', timeout_s=5
        )
        assert b"error" in answer.data
        assert await broker.purge_below(3) == 2


async def test_a_limit_that_the_server_has_no_room_for_is_said_so(admin, run):
    limits = msgspec.structs.replace(LIMITS, log_max_bytes=2**60)
    with pytest.raises(StoreFullError, match="no room for this limit"):
        await admin.apply(run_topology(run, limits))


async def test_runs_are_listed_and_deleted_with_all_they_hold(server, run, admin):
    opened = functools.partial(connect, server.url, create=True, settings=server.connect_settings(), limits=LIMITS)
    async with opened(run=run) as one, opened(run=f"{run}b") as two:
        await one.publish(f"hr.{run}.a.b.1", b"one")
        await two.publish(f"hr.{run}b.a.b.1", b"two")
        assert {run, f"{run}b"} <= set(await admin.runs())
        await admin.delete_run(run)
        assert run not in await admin.runs()
        assert await two.get(f"hr.{run}b.a.b.1") is not None
        await admin.delete_run(run)
