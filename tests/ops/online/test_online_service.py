"""Online sessions at two gateways over one log: claims, rewards, ends, whichever gateway is asked and whichever dies."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import httpx
import pytest
from online_run import CHAT, a_run

from schemas.messages.rollout import EpisodeClass, EpisodeEnded, EpisodeLaunched, SessionClaimed
from schemas.messages.sampling import GroupClosed
from schemas.topics import EPISODE_LAUNCHED, EPISODE_REQUESTED, SESSION_CLAIMED


async def test_a_session_from_its_claim_to_its_scored_end() -> None:
    async with a_run("gw-1") as run:
        await run.request(0)
        opened = await run.opened(request_id="mine", task="ticket-12")
        assert (opened["session_id"], opened["group"], opened["slot"]) == ("g0000000-0-0-0", "g0000000", 0)
        assert (opened["data_id"], opened["task"]) == ("ticket-12", None)
        launched = await run.log.find(EPISODE_LAUNCHED, "g0000000", 0, 0, 0)
        assert isinstance(launched, EpisodeLaunched)
        assert (launched.session, launched.route, launched.model_name) == ("g0000000-0-0-0", "online", "ticket-12")
        await run.chat("gw-1", opened["token"])
        assert run.homes["gw-1"].engine.requests[0].min_version == 3
        assert await run.end() is None
        closed = await run.ask("gw-1", "/v1/sessions/g0000000-0-0-0/close", {"score": 0.75})
        assert closed.json() == {"session_id": "g0000000-0-0-0", "num_interactions": 1}
        end = await run.end()
        assert end is not None
        assert (end.outcome, end.score, end.final, end.session) == (EpisodeClass.SCORED, 0.75, True, "g0000000-0-0-0")
        late = await run.ask("gw-1", CHAT, {"messages": [{"role": "user", "content": "x"}]}, opened["token"])
        assert late.status_code == 410


async def test_without_credit_a_request_waits_or_gets_429() -> None:
    async with a_run("gw-1") as run:
        refused = await run.ask("gw-1", "/v1/sessions")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert await run.log.find(SESSION_CLAIMED, "mine", 0) is None, "a refusal leaves nothing on the log"
        found: list[dict] = []

        async def wait_for_credit() -> None:
            found.append(await run.opened(request_id="mine", wait_s=30.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_credit)
            while not run.services["gw-1"]._num_waiting:
                await anyio.lowlevel.checkpoint()
            await run.request(0)
        assert found[0]["session_id"] == "g0000000-0-0-0"


async def test_who_waits_for_credit_at_a_gateway_that_ends_is_told_to_ask_elsewhere() -> None:
    async with a_run("gw-1") as run:
        found: list[httpx.Response] = []

        async def wait_for_credit() -> None:
            found.append(await run.ask("gw-1", "/v1/sessions", {"request_id": "mine", "wait_s": 30.0}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_credit)
            while not run.services["gw-1"]._num_waiting:
                await anyio.lowlevel.checkpoint()
            run.services["gw-1"].leave()
        assert (found[0].status_code, found[0].headers["retry-after"]) == (503, "5")
        assert "this gateway ends" in found[0].text
        assert await run.log.find(SESSION_CLAIMED, "mine", 0) is None


async def test_asking_again_gives_the_same_session_and_token() -> None:
    async with a_run("gw-1") as run:
        await run.request(0, 1)
        first, again = await run.opened(request_id="mine"), await run.opened(request_id="mine")
        assert again == first
        assert run.services["gw-1"].gauges()["online_free_slots"] == 1


async def test_two_gateways_that_want_the_last_slot_find_one_winner() -> None:
    async with a_run("gw-1", "gw-2") as run:
        await run.request(0)
        answers: list[int] = []

        async def claim(gateway: str) -> None:
            answers.append((await run.ask(gateway, "/v1/sessions")).status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(claim, "gw-1")
            tasks.start_soon(claim, "gw-2")
        assert sorted(answers) == [200, 429]
        await run.caught_up()
        held = [service._view.slots.held for service in run.services.values()]
        assert held[0] == held[1]
        assert len(held[0]) == 1


async def test_a_reward_may_come_after_the_end_and_turn_rewards_must_name_calls() -> None:
    async with a_run("gw-1") as run:
        await run.request(0)
        opened = await run.opened()
        name = opened["session_id"]
        answer = await run.chat("gw-1", opened["token"])
        await run.ask("gw-1", f"/v1/sessions/{name}/close")
        assert await run.end() is None, "it waits for a reward"
        async with run.homes["gw-1"].http("ctl") as client:
            assert (await client.get(f"/v1/sessions/{name}")).json()["state"] == "closed"
        unknown = await run.ask("gw-1", f"/v1/sessions/{name}/reward", {"turn_rewards": {"chatcmpl-none": 1.0}})
        assert unknown.status_code == 400
        more = {"turn_rewards": {answer["id"]: 0.5}, "final": False}
        assert (await run.ask("gw-1", f"/v1/sessions/{name}/reward", more)).status_code == 200
        assert await run.end() is None, "more rewards may follow"
        await run.ask("gw-1", f"/v1/sessions/{name}/reward", {"score": 2.0})
        end = await run.end()
        assert end is not None
        assert (end.score, end.turn_rewards) == (2.0, {answer["id"]: 0.5})
        late = await run.ask("gw-1", f"/v1/sessions/{name}/reward", {"score": 3.0})
        assert late.status_code == 410
        async with run.homes["gw-1"].http("ctl") as client:
            assert (await client.get(f"/v1/sessions/{name}")).json()["outcome"] == "scored: DONE"


async def test_a_session_without_a_reward_gives_its_slot_back_and_the_last_attempt_ends_it() -> None:
    async with a_run("gw-1") as run:
        await run.request(0)
        for attempt in range(2):
            opened = await run.opened(task="x")
            assert opened["session_id"] == f"g0000000-0-{attempt}-0"
            await run.ask("gw-1", f"/v1/sessions/{opened['session_id']}/close")
            await run.caught_up()
            await run.sweep()
            assert await run.end(attempt=attempt) is None
            run.clock.ahead_s = 31.0
            await run.sweep()
            run.clock.ahead_s = 0.0  # the log's own times are real ones
            end = await run.end(attempt=attempt)
            assert end is not None
            assert (end.status, end.outcome) == ("LOCAL_NO_REWARD", EpisodeClass.SYSTEM)
            assert end.final == (attempt == 1)
        assert await run.log.find(EPISODE_REQUESTED, "g0000000", 0, 2) is None


async def test_a_discarded_session_gives_its_slot_back_at_once() -> None:
    async with a_run("gw-1") as run:
        await run.request(0)
        opened = await run.opened()
        await run.ask("gw-1", f"/v1/sessions/{opened['session_id']}/close", {"discard": True})
        end = await run.end()
        assert end is not None
        assert (end.status, end.final) == ("LOCAL_DISCARDED", False)
        assert (await run.opened())["session_id"] == "g0000000-0-1-0"


async def test_slots_that_nobody_claims_end_after_their_deadline() -> None:
    async with a_run("gw-1") as run:
        await run.request(0, 1)
        opened = await run.opened()
        run.clock.ahead_s += 59.0
        await run.sweep()
        assert await run.end(slot=1) is None
        run.clock.ahead_s += 2.0
        await run.sweep()
        end = await run.end(slot=1)
        assert end is not None
        assert (end.status, end.final, end.session) == ("LOCAL_UNCLAIMED", True, "")
        assert await run.end(slot=0) is None, "the claimed one goes on"
        assert (await run.ask("gw-1", "/v1/sessions")).status_code == 429
        assert (await run.chat("gw-1", opened["token"]))["id"]


async def test_rewards_survive_their_gateway_and_the_session_goes_on_at_another() -> None:
    async with a_run("gw-1", "gw-2") as run:
        await run.request(0)
        opened = await run.opened("gw-1", request_id="mine")
        name = opened["session_id"]
        first = await run.chat("gw-1", opened["token"])
        await run.ask("gw-1", f"/v1/sessions/{name}/reward", {"turn_rewards": {first["id"]: 1.0}, "final": False})
        await run.caught_up()
        del run.peers.alive["gw-1"]
        await run.chat("gw-2", opened["token"])
        again = await run.opened("gw-2", request_id="mine")
        assert (again["session_id"], again["token"]) == (name, opened["token"])
        closed = await run.ask("gw-2", f"/v1/sessions/{name}/close", {"score": 0.5})
        assert closed.json()["num_interactions"] == 2
        end = await run.end()
        assert end is not None
        assert (end.score, end.turn_rewards) == (0.5, {first["id"]: 1.0})


async def test_a_session_whose_gateway_died_before_the_answer_is_opened_again_with_a_new_token() -> None:
    async with a_run("gw-1", "gw-2") as run:
        await run.request(0)
        opened = await run.opened("gw-1", request_id="mine")
        await run.chat("gw-1", opened["token"])
        await run.caught_up()
        del run.peers.alive["gw-1"]
        again = await run.opened("gw-2", request_id="mine")
        assert again["session_id"] == opened["session_id"]
        assert again["token"] != opened["token"]
        await run.chat("gw-2", again["token"])
        closed = await run.ask("gw-2", f"/v1/sessions/{opened['session_id']}/close", {"score": 1.0})
        assert closed.json()["num_interactions"] == 2


async def test_an_orphaned_session_ends_when_nobody_takes_it_up() -> None:
    async with a_run("gw-1", "gw-2") as run:
        await run.request(0)
        await run.opened("gw-1")
        await run.caught_up()
        del run.peers.alive["gw-1"]
        await run.sweep("gw-2")
        run.clock.ahead_s += 101.0
        await run.sweep("gw-2")
        run.clock.ahead_s += 31.0
        await run.sweep("gw-2")
        end = await run.end()
        assert end is not None
        assert (end.status, end.final) == ("LOCAL_NO_REWARD", False)


async def test_an_idle_session_ends_and_its_reward_stands() -> None:
    async with a_run("gw-1") as run:
        await run.request(0)
        opened = await run.opened()
        await run.chat("gw-1", opened["token"])
        await run.ask("gw-1", f"/v1/sessions/{opened['session_id']}/reward", {"score": 0.25})
        gateway = run.homes["gw-1"].gateway
        gateway.sessions.named(opened["session_id"]).last_used_s -= 10_000
        (closed,) = await gateway.expire()
        assert closed.system_error == ""
        end = await run.end()
        assert end is not None
        assert (end.outcome, end.score) == (EpisodeClass.SCORED, 0.25)


async def test_an_attempt_that_was_owed_when_its_gateway_died_is_asked_for_by_another() -> None:
    async with a_run("gw-1") as run:
        await run.request(0)
        opened = await run.opened()
        ended = EpisodeEnded(
            group="g0000000",
            slot=0,
            attempt=0,
            stream="support",
            data_id="7",
            session=opened["session_id"],
            outcome=EpisodeClass.SYSTEM,
            final=False,
            status="LOCAL_NO_REWARD",
        )
        await run.log.publish(ended)
        await run.caught_up()
        await run.sweep()
        assert await run.log.find(EPISODE_REQUESTED, "g0000000", 0, 1) is not None


async def test_a_session_of_a_closed_group_is_served_and_told_so() -> None:
    async with a_run("gw-1") as run:
        await run.request(0, 1)
        opened = await run.opened()
        await run.log.publish(GroupClosed(group="g0000000", stream="support", usable=False, reason="too_few_usable"))
        await run.caught_up()
        await run.chat("gw-1", opened["token"])
        async with run.homes["gw-1"].http("ctl") as client:
            state = (await client.get(f"/v1/sessions/{opened['session_id']}")).json()
        assert (state["group_closed"], state["num_interactions"]) == (True, 1)
        assert run.services["gw-1"].gauges()["online_free_slots"] == 0


async def test_a_row_that_is_handed_out_comes_with_the_session() -> None:
    async with a_run("gw-1") as run:
        prompt = await run.services["gw-1"]._payloads.put(b'{"question":"2 + 2"}')
        await run.request(0, prompt=prompt)
        opened = await run.opened(task="7")
        assert (opened["data_id"], opened["task"], opened["evaluation"]) == ("7", {"question": "2 + 2"}, False)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/sessions", {"stream": "other"}, 400),
        ("/v1/sessions", {"wait_s": 1e9}, 400),
        ("/v1/sessions", {"request_id": "no spaces"}, 400),
        ("/v1/sessions", {"unknown": 1}, 400),
        ("/v1/sessions/g0000000-0-0-0/reward", {"score": 1.0}, 404),
        ("/v1/sessions/g0000000-0-0-0/close", {}, 404),
        ("/v1/sessions/other/reward", {"score": 1.0}, 404),
        ("/v1/sessions/g0000000-0-0-0/reward", {}, 400),
    ],
)
async def test_what_a_service_is_told_when_it_asks_wrongly(path, body, status) -> None:
    async with a_run("gw-1") as run:
        assert (await run.ask("gw-1", path, body)).status_code == status


async def test_a_claim_that_lost_a_race_is_void_and_leaves_no_slot_taken() -> None:
    async with a_run("gw-1", "gw-2") as run:
        await run.request(0)
        await run.log.publish(SessionClaimed(claim="first", ordinal=0, stream="support", gateway="gw-2"))
        await run.log.publish(SessionClaimed(claim="second", ordinal=0, stream="support", gateway="gw-1"))
        await run.caught_up()
        assert run.services["gw-1"]._view.slots.asked("second") == (1, "")
        await run.request(1)
        assert (await run.opened(request_id="second"))["session_id"] == "g0000000-1-0-0"
