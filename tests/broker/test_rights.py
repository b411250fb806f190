"""What each role may and may not do, on a real server."""

from __future__ import annotations

import pytest
from nats_servers import nats_server

from broker.api import ConsumerSettings
from broker.conformance.asserting import take, take_all, take_and_ack
from broker.connect import connect, open_admin
from broker.errors import BrokerError, NotAllowedError, NotConnectedError
from broker.rights import Role, User, account_config, inbox_prefix, permissions
from broker.settings import ConnectSettings
from broker.topology import RunLimits, durable, run_topology

RUN, OTHER = "r1", "r2"
LIMITS = RunLimits(log_max_bytes=2**20, payload_max_bytes=2**20, state_max_bytes=2**20)
SETTINGS = ConsumerSettings()


def user(role: Role, run: str = RUN, **rights: list[str]) -> User:
    name = f"{role}-{run}"
    return User(name=name, password=f"secret-{name}", permissions=permissions(role, run, name, **rights))


@pytest.fixture
async def opened(tmp_path):
    """Opens a run as a role, on a server with an account for each run."""
    users = {
        RUN: [
            user(Role.WORKER, topics=["episode.ended"], durables=["map"]),
            user(Role.GATEWAY, topics=["interaction.recorded"]),
            user(Role.ROLLOUT, topics=["episode.ended"], durables=["map"]),
            user(Role.FOLD, topics=["step.assembled"]),
            user(Role.READER),
            user(Role.KEEPER, topics=["run.retain"]),
            user(Role.OPERATOR),
        ],
        OTHER: [user(Role.OPERATOR, OTHER)],
    }
    accounts = "".join(account_config(run, members) for run, members in users.items())

    def settings(role: Role, run: str = RUN) -> ConnectSettings:
        name = f"{role}-{run}"
        (tmp_path / name).write_text(f"secret-{name}")
        return ConnectSettings(user=name, password_file=str(tmp_path / name), inbox_prefix=inbox_prefix(name))

    async with nats_server(tmp_path / "s", f"accounts {{\n{accounts}}}") as port:
        url = f"nats://127.0.0.1:{port}"

        def open_as(role: Role, run: str = RUN, **options: object):
            return connect(url, run, settings(role, run), **options)

        durables = [durable("map", [f"hr.{RUN}.episode.ended.>"], SETTINGS)]
        async with open_admin(url, settings(Role.OPERATOR)) as admin:
            await admin.apply(run_topology(RUN, LIMITS, durables))
        async with open_as(Role.OPERATOR, OTHER, create=True, limits=LIMITS):
            pass
        yield open_as


async def test_a_worker_takes_from_its_durable_and_publishes_its_topics_only(opened):
    async with opened(Role.WORKER) as worker:
        ref = await worker.payloads.put(b"payload")
        assert await worker.payloads.get(ref) == b"payload"
        assert (await worker.publish(f"hr.{RUN}.episode.ended.g1.0.1", b"x")).created
        assert not (await worker.publish(f"hr.{RUN}.episode.ended.g1.0.1", b"x")).created
        async with worker.consume("map", [f"hr.{RUN}.episode.ended.>"], SETTINGS) as deliveries:
            await take_and_ack(deliveries, 1)
        with pytest.raises(NotAllowedError, match=r"may not publish to 'hr\.r1\.step\.assembled\.1'"):
            await worker.publish(f"hr.{RUN}.step.assembled.1", b"x")
        with pytest.raises(NotAllowedError):
            await worker.get(f"hr.{RUN}.step.assembled.1")
        with pytest.raises(NotAllowedError):
            async with worker.consume("other", [f"hr.{RUN}.>"], SETTINGS):
                pass
        with pytest.raises(NotAllowedError):
            async with worker.read([f"hr.{RUN}.>"]):
                pass
        for forbidden in (worker.save_state("k", b"x"), worker.purge_below(2), worker.consumers()):
            with pytest.raises(NotAllowedError):
                await forbidden


async def test_a_gateway_has_its_topics_and_no_durable(opened):
    async with opened(Role.GATEWAY) as gateway:
        assert (await gateway.publish(f"hr.{RUN}.interaction.recorded.s1.0", b"x")).created
        found = await gateway.get(f"hr.{RUN}.interaction.recorded.s1.0")
        assert found is not None
        with pytest.raises(NotAllowedError):
            await gateway.publish(f"hr.{RUN}.episode.ended.g1.0.1", b"x")
        with pytest.raises(NotAllowedError):
            async with gateway.consume("map", [f"hr.{RUN}.episode.ended.>"], SETTINGS):
                pass


async def test_a_rollout_node_works_and_tells_what_it_runs_but_decides_nothing(opened):
    async with opened(Role.ROLLOUT) as node:
        assert (await node.publish(f"hr.{RUN}.episode.ended.g1.0.1", b"x")).created
        async with node.consume("map", [f"hr.{RUN}.episode.ended.>"], SETTINGS) as deliveries:
            await take_and_ack(deliveries, 1)
        async with node.read([f"hr.{RUN}.>"], follow=False) as records:
            assert len(await take_all(records)) == 1
        await node.save_state("node.rollout-1", b"here")
        assert list(await node.list_state("node")) == ["node.rollout-1"]
        for forbidden in (
            node.publish(f"hr.{RUN}.step.trained.1.1", b"x"),
            node.save_state("fold.assembly", b"x"),
            node.save_state("trainer.lease", b"x"),
            node.delete_state("node.rollout-1"),
            node.purge_below(1),
        ):
            with pytest.raises(NotAllowedError):
                await forbidden


async def test_a_fold_reads_all_and_keeps_checkpoints(opened):
    async with opened(Role.WORKER) as worker:
        await worker.publish(f"hr.{RUN}.episode.ended.g1.0.1", b"x")
    async with opened(Role.FOLD) as fold:
        async with fold.read([f"hr.{RUN}.>"], follow=False) as records:
            assert len(await take_all(records)) == 1
        revision = await fold.save_state("fold.assembly", b"1", expected_revision=0)
        assert await fold.load_state("fold.assembly") == (b"1", revision)
        assert (await fold.publish(f"hr.{RUN}.step.assembled.1", b"x")).created
        with pytest.raises(NotAllowedError):
            await fold.publish(f"hr.{RUN}.episode.ended.g1.0.2", b"x")


async def test_a_reader_sees_all_and_changes_nothing(opened):
    async with opened(Role.WORKER) as worker:
        ref = await worker.payloads.put(b"payload")
        await worker.publish(f"hr.{RUN}.episode.ended.g1.0.1", b"x")
    async with opened(Role.READER) as reader:
        async with reader.read([f"hr.{RUN}.>"], follow=False) as records:
            assert len(await take_all(records)) == 1
        assert await reader.payloads.get(ref) == b"payload"
        assert (await reader.log_status()).num_messages == 1
        for forbidden in (
            reader.publish(f"hr.{RUN}.episode.ended.g1.0.2", b"x"),
            reader.payloads.put(b"other"),
            reader.payloads.delete(ref.id),
            reader.save_state("k", b"x"),
            reader.purge_below(2),
        ):
            with pytest.raises(NotAllowedError):
                await forbidden


async def test_a_reader_may_hold_the_log_and_read_the_mark_and_no_other_last_value(opened):
    async with opened(Role.KEEPER) as keeper, opened(Role.READER) as reader:
        await keeper.save_state("retain", b"mark")
        await reader.save_state("hold.why.1", b"wish")
        assert list(await keeper.list_state("hold")) == ["hold.why.1"]
        assert (await reader.load_state("retain") or (b"",))[0] == b"mark"
        for forbidden in (reader.save_state("retain", b"x"), reader.load_state("trainer.lease")):
            with pytest.raises(NotAllowedError):
                await forbidden


async def test_the_keeper_purges_and_collects_and_publishes_its_mark_only(opened):
    async with opened(Role.WORKER) as worker:
        ref = await worker.payloads.put(b"payload")
        await worker.publish(f"hr.{RUN}.episode.ended.g1.0.1", b"x")
    async with opened(Role.KEEPER) as keeper:
        async with keeper.read([f"hr.{RUN}.>"], follow=False) as records:
            assert len(await take_all(records)) == 1
        assert [status.durable for status in await keeper.consumers()] == ["map"]
        assert await keeper.purge_below(2, pattern=f"hr.{RUN}.episode.ended.>") == 1
        listed = [payload async for payload in keeper.payloads.stored(before_unix_s=2**40)]
        assert [payload.id for payload in listed] == [ref.id]
        await keeper.payloads.collect(listed[0])
        assert (await keeper.publish(f"hr.{RUN}.run.retain.1", b"x")).created
        with pytest.raises(NotAllowedError):
            await keeper.publish(f"hr.{RUN}.episode.ended.g1.0.2", b"x")


async def test_reports_and_requests_of_a_run_reach_its_own_processes_only(opened):
    async with opened(Role.WORKER) as worker, opened(Role.FOLD) as fold:
        async with fold.listen(f"hrm.{RUN}.>") as heard:
            await worker.announce(f"hrm.{RUN}.fan_out", b"report")
            assert await take(heard, 1) == [(f"hrm.{RUN}.fan_out", b"report")]
        with pytest.raises(NotAllowedError, match="may not subscribe"):
            async with worker.listen(f"hrm.{OTHER}.>"):
                pass


async def test_talk_reaches_those_of_the_run_and_answers_only_the_one_who_asked(opened):
    async with opened(Role.FOLD) as fold, opened(Role.WORKER) as worker:

        async def double(data: bytes) -> bytes:
            return data * 2

        async with fold.serve(f"hrt.{RUN}.double", double), fold.listen(f"hrt.{RUN}.beat.>") as heard:
            assert await worker.request(f"hrt.{RUN}.double", b"ab", deadline_s=5) == b"abab"
            await worker.announce(f"hrt.{RUN}.beat.w1", b"alive")
            assert await take(heard, 1) == [(f"hrt.{RUN}.beat.w1", b"alive")]
        for overheard in ("_INBOX.>", f"hrt.{OTHER}.>"):
            with pytest.raises(NotAllowedError, match="may not subscribe"):
                async with worker.listen(overheard):
                    pass


async def test_one_run_s_operator_does_not_see_another_run(opened):
    async with opened(Role.OPERATOR, OTHER) as other:
        assert (await other.publish(f"hr.{OTHER}.a.b.1", b"x")).created
        assert await other.admin.runs() == [OTHER]
        with pytest.raises(BrokerError):
            await other.admin.delete_run(RUN)
    async with opened(Role.OPERATOR) as operator:
        assert await operator.admin.runs() == [RUN]


async def test_a_name_that_is_no_user_s_is_refused(opened):
    with pytest.raises(NotConnectedError, match="uthorization"):
        async with opened(Role.WORKER, OTHER):
            pass
