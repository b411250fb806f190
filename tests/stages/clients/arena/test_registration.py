"""The life of registrations against the local Arena's faults."""

import asyncio

import pytest
import structlog
from waiting import wait_until

from ops.arena.config import CallFault, CallName, FaultPlan
from stages.clients.arena.client import ArenaClient, ModelEndpoint
from stages.clients.arena.errors import ArenaBusyError, ArenaConnectionError, ArenaNotFoundError, ArenaRefusedError
from stages.clients.arena.registration import (
    RegistrationCounts,
    RegistrationSettings,
    episode_model_name,
    open_registrations,
    session_model_name,
)
from stages.clients.arena.secret import Secret

SETTINGS = RegistrationSettings(run_label="headrace/run-1", cleanup_timeout_s=2)
NAME = session_model_name("headrace/run-1", arena_url="http://a", gateway_url="http://g", worker="launch-0")


async def never(_delay_s: float) -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def client(start_arena, open_client) -> ArenaClient:
    """A client of an Arena without faults."""
    return await open_client(await start_arena())


def _faults(*calls: CallFault) -> FaultPlan:
    return FaultPlan(calls=calls)


def test_names_have_their_prefix_and_sixteen_hex_digits_and_are_the_same_after_a_restart() -> None:
    prefix, digest = NAME[: len("stream-areal-session-")], NAME[len("stream-areal-session-") :]
    assert prefix == "stream-areal-session-"
    assert len(digest) == 16
    int(digest, 16)
    again = session_model_name("headrace/run-1", arena_url="http://a", gateway_url="http://g", worker="launch-0")
    others = {
        session_model_name("headrace/run-2", arena_url="http://a", gateway_url="http://g", worker="launch-0"),
        session_model_name("headrace/run-1", arena_url="http://a", gateway_url="http://h", worker="launch-0"),
        session_model_name("headrace/run-1", arena_url="http://a", gateway_url="http://g", worker="launch-1"),
    }
    assert again == NAME
    assert len(others | {NAME}) == 4
    assert episode_model_name("l", "s-1") != episode_model_name("l", "s-2")


async def test_a_shared_registration_is_made_once_for_many_users_and_removed_at_the_end(client, endpoint) -> None:
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        async with registrations.hold(NAME, endpoint, shared=True), registrations.hold(NAME, endpoint, shared=True):
            assert (await client.get_model(NAME))["metadata"] == {"deployment_id": "headrace/run-1"}
        assert await client.get_model(NAME) is not None
        assert registrations.counts.registered == 1
    assert await client.get_model(NAME) is None
    assert registrations.names == []


async def test_an_episodes_own_registration_ends_with_it(client, endpoint) -> None:
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        async with registrations.hold(NAME, endpoint, shared=False):
            assert await client.get_model(NAME) is not None
        assert await client.get_model(NAME) is None


async def test_a_collected_registration_in_use_is_restored_under_the_same_name(client, endpoint) -> None:
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        async with registrations.hold(NAME, endpoint, shared=True):
            await client.delete_model(NAME)
            await registrations.probe()
            assert await client.get_model(NAME) is not None
            assert registrations.counts.restored == 1
            await registrations.probe()
        assert registrations.counts.registered == 2


async def test_a_suspicion_restores_a_collected_registration_at_once_and_is_followed_once(client, endpoint) -> None:
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        async with registrations.hold(NAME, endpoint, shared=True):
            await client.delete_model(NAME)
            await registrations.suspect(NAME)
            assert await client.get_model(NAME) is not None
            await client.delete_model(NAME)
            await registrations.suspect(NAME)
            assert await client.get_model(NAME) is None
        await registrations.suspect("stream-areal-unknown")
        assert registrations.counts.restored == 1


async def test_a_registration_nobody_uses_is_not_probed(client, endpoint) -> None:
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        async with registrations.hold(NAME, endpoint, shared=True):
            pass
        await client.delete_model(NAME)
        await registrations.probe()
        assert await client.get_model(NAME) is None


async def test_probes_run_by_themselves_at_their_interval(client, endpoint) -> None:
    gate = asyncio.Queue[float]()
    passed = asyncio.Event()

    async def sleep(delay_s: float) -> None:
        assert delay_s == 60
        passed.set()
        await gate.get()
        passed.clear()

    async with (
        open_registrations(client, SETTINGS, sleep=sleep) as registrations,
        registrations.hold(NAME, endpoint, shared=True),
    ):
        await passed.wait()
        await client.delete_model(NAME)
        gate.put_nowait(0)
        await wait_until(lambda: registrations.counts.restored)


async def test_a_failed_probe_is_advisory_counted_and_told_once_in_a_while(start_arena, open_client, endpoint) -> None:
    fault = CallFault(call=CallName.MODELS_RENEW, kind="status", status=500)
    client = await open_client(await start_arena(faults=_faults(fault)), request_retries=0)
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        async with registrations.hold(NAME, endpoint, shared=True):
            with structlog.testing.capture_logs() as logs:
                for _ in range(12):
                    await registrations.probe()
            assert await client.get_model(NAME) is not None
        assert registrations.counts.failed_probes == 12
        assert registrations.counts.restored == 0
    assert [entry["log_level"] for entry in logs] == ["warning", "warning"]


@pytest.mark.parametrize("fault", [{"kind": "lost_answer"}, {"kind": "status", "status": 502}])
async def test_a_post_whose_answer_was_lost_is_followed_by_delete_of_that_exact_name(
    start_arena, open_client, endpoint, fault
) -> None:
    client = await open_client(
        await start_arena(faults=_faults(CallFault(call=CallName.MODELS_REGISTER, limit=1, **fault))), request_retries=0
    )
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        with pytest.raises((ArenaConnectionError, ArenaBusyError)):
            async with registrations.hold(NAME, endpoint, shared=True):
                pytest.fail("the body must not run without a registration")
        assert await client.get_model(NAME) is None
        assert registrations.names == []
        async with registrations.hold(NAME, endpoint, shared=True):
            assert await client.get_model(NAME) is not None


async def test_a_cancelled_registration_leaves_nothing(start_arena, open_client, endpoint) -> None:
    fault = CallFault(call=CallName.MODELS_REGISTER, kind="delay", delay_s=0.2, limit=1)
    client = await open_client(await start_arena(faults=_faults(fault)))
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), registrations.hold(NAME, endpoint, shared=False):
                pytest.fail("the body must not run without a registration")
    assert registrations.names == []


async def test_a_failing_clean_up_is_counted_and_never_hides_the_error_it_follows(
    start_arena, open_client, endpoint
) -> None:
    fault = CallFault(call=CallName.MODELS_DELETE, kind="status", status=500)
    client = await open_client(await start_arena(faults=_faults(fault)), request_retries=0)
    counts = RegistrationCounts()
    registrations = []

    async def fail_while_holding() -> None:
        async with open_registrations(client, SETTINGS, counts=counts, sleep=never) as opened:
            registrations.append(opened)
            async with opened.hold(NAME, endpoint, shared=False):
                raise KeyError("the original error")

    with structlog.testing.capture_logs() as logs, pytest.raises(ExceptionGroup) as caught:
        await fail_while_holding()
    assert caught.group_contains(KeyError, match="the original error")
    assert counts.failed_cleanups >= 1
    assert any("could not be removed" in entry["event"] for entry in logs)
    assert registrations[0].names == [NAME]


async def test_clean_up_is_bounded_in_time(start_arena, open_client, endpoint) -> None:
    fault = CallFault(call=CallName.MODELS_DELETE, kind="delay", delay_s=60)
    client = await open_client(await start_arena(faults=_faults(fault)))
    settings = RegistrationSettings(run_label="l", cleanup_timeout_s=0.05)
    async with asyncio.timeout(5), open_registrations(client, settings, sleep=never) as registrations:
        async with registrations.hold(NAME, endpoint, shared=True):
            assert registrations.names == [NAME]
        assert registrations.counts.failed_cleanups == 0
    assert registrations.counts.failed_cleanups == 1


async def test_orphans_of_our_label_are_removed_and_others_left_alone(client, endpoint) -> None:
    theirs = episode_model_name("headrace/other", "s")
    await client.register_model(NAME, endpoint, deployment_id="headrace/run-1")
    await client.register_model(theirs, endpoint, deployment_id="headrace/other")
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        await registrations.remove_orphans([NAME, theirs, "stream-areal-session-none"])
        assert registrations.counts.orphans_removed == 1
    assert await client.get_model(NAME) is None
    assert await client.get_model(theirs) is not None


async def test_a_restarted_worker_takes_its_old_name_again(client, endpoint) -> None:
    await client.register_model(NAME, endpoint, deployment_id="headrace/run-1")
    moved = ModelEndpoint(
        endpoint_id="e2", upstream_model="policy", base_url="http://127.0.0.1:1/v1", api_key=Secret("k")
    )
    async with (
        open_registrations(client, SETTINGS, sleep=never) as registrations,
        registrations.hold(NAME, moved, shared=True),
    ):
        assert (await client.get_model(NAME))["endpoints"][0]["endpoint_id"] == "e2"


async def test_a_name_that_another_deployment_holds_is_refused_and_not_deleted(client, endpoint) -> None:
    await client.register_model(NAME, endpoint, deployment_id="headrace/other")
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        with pytest.raises(ArenaRefusedError, match="409"):
            async with registrations.hold(NAME, endpoint, shared=True):
                pytest.fail("refused")
    assert await client.get_model(NAME) is not None


async def test_an_adopted_registration_is_kept_alive_and_removed_after_its_last_task(client, endpoint) -> None:
    await client.register_model(NAME, endpoint, deployment_id="headrace/run-1")
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        async with registrations.adopt(NAME, endpoint):
            await client.delete_model(NAME)
            await registrations.probe()
            assert await client.get_model(NAME) is not None
        assert await client.get_model(NAME) is None
        async with registrations.adopt(NAME, None):
            with pytest.raises(ArenaNotFoundError):
                await client.generate_once(NAME)


async def test_one_that_keeps_anothers_shared_registration_alive_removes_it_neither_then_nor_at_its_end(
    start_arena, open_client, endpoint
) -> None:
    url = await start_arena()
    owners, others = await open_client(url), await open_client(url)
    async with (
        open_registrations(owners, SETTINGS, sleep=never) as owner,
        owner.hold(NAME, endpoint, shared=True),
    ):
        async with open_registrations(others, SETTINGS, sleep=never) as other:
            async with other.adopt(NAME, None, shared=True), other.adopt(NAME, None, shared=True):
                await other.probe()
            assert await owners.get_model(NAME) is not None
            async with other.adopt(NAME, None, shared=True):
                assert other.names == []
        assert await owners.get_model(NAME) is not None
        assert (owner.counts.restored, other.counts.failed_cleanups) == (0, 0)
    assert await owners.get_model(NAME) is None


async def test_a_shared_registration_that_was_adopted_before_its_gateway_was_known_is_removed_by_its_owner(
    client, endpoint
) -> None:
    await client.register_model(NAME, endpoint, deployment_id="headrace/run-1")
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        async with registrations.adopt(NAME, None, shared=True), registrations.hold(NAME, endpoint, shared=True):
            await client.delete_model(NAME)
            await registrations.probe()
            assert await client.get_model(NAME) is not None
        assert registrations.names == [NAME]
    assert await client.get_model(NAME) is None


async def test_what_a_former_worker_of_this_name_left_is_removed_at_the_end_though_nobody_used_it_here(
    client, endpoint
) -> None:
    await client.register_model(NAME, endpoint, deployment_id="headrace/run-1")
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        registrations.inherit(NAME)
        async with registrations.adopt(NAME, None, shared=True):
            await registrations.probe()
            assert registrations.counts.failed_probes == 0
        assert await client.get_model(NAME) is not None
    assert await client.get_model(NAME) is None


async def test_a_name_that_was_taken_up_is_registered_again_for_its_first_user(client, endpoint) -> None:
    async with open_registrations(client, SETTINGS, sleep=never) as registrations:
        registrations.inherit(NAME)
        async with registrations.hold(NAME, endpoint, shared=True):
            assert await client.get_model(NAME) is not None
