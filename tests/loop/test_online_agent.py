"""A run that is fed by a service's sessions over HTTP, with its gateway killed amid them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import httpx
import msgspec
import numpy as np
from waiting import wait_until

from ops.run_folder import RunFolderError
from ops.secrets import run_secrets
from pipeline.log import RunLog, RunPayloads
from schemas.messages.rollout import EpisodeEnded, InteractionRecorded, InteractionTokens, RowTokens, Trajectory
from schemas.topics import EPISODE_ENDED, INTERACTION_RECORDED, STEP_ASSEMBLED, TRAJECTORY_READY

ROOT = Path(__file__).parents[2]
ONLINE = ROOT / "examples" / "online_agent.toml"
SLOTS_PER_GROUP, GROUPS_PER_STEP, MAX_STALENESS = 4, 4, 1
CREDIT = (MAX_STALENESS + 1) * GROUPS_PER_STEP * SLOTS_PER_GROUP


class Service:
    """A user's service, as it would be written against any HTTP API."""

    def __init__(self, http: httpx.AsyncClient, control_key: str) -> None:
        self.http = http
        self.control = {"Authorization": f"Bearer {control_key}"}
        self.answers: dict[str, list[str]] = {}
        self.messages: dict[str, list[dict]] = {}

    async def patiently(self, path: str, body: dict, headers: dict) -> httpx.Response:
        """As any client library does it: what can't be reached is asked again."""
        with anyio.fail_after(60):
            while True:
                try:
                    response = await self.http.post(path, json=body, headers=headers)
                except httpx.TransportError:
                    await anyio.sleep(0.1)
                    continue
                if response.status_code < 500:
                    return response
                await anyio.sleep(0.1)

    async def open(self, request_id: str, **body) -> httpx.Response:
        return await self.patiently("/v1/sessions", {"request_id": request_id, **body}, self.control)

    async def talk(self, session: dict) -> None:
        """One more turn of its conversation."""
        headers = {"Authorization": f"Bearer {session['token']}"}
        messages = self.messages.setdefault(session["session_id"], [])
        messages.append({"role": "user", "content": session["data_id"]})
        response = await self.patiently("/v1/chat/completions", {"messages": messages}, headers)
        assert response.status_code == 200, response.text
        answer = response.json()
        self.answers.setdefault(session["session_id"], []).append(answer["id"])
        messages.append(answer["choices"][0]["message"])

    async def say(self, session: dict, action: str, **body) -> int:
        path = f"/v1/sessions/{session['session_id']}/{action}"
        return (await self.patiently(path, body, self.control)).status_code


async def all_of(jobs) -> None:
    async with anyio.create_task_group() as tasks:
        for job in jobs:
            tasks.start_soon(*job)


async def test_a_services_sessions_are_trained_on_though_the_gateway_is_killed_amid_them(headrace) -> None:
    async with headrace("--steps", "2", "--set", "gateway.port=0", config=ONLINE) as run:
        url = await _gateway_url(run)
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            service = Service(http, run_secrets(run.folder.path).control_key)
            sessions: dict[str, dict] = {}

            async def open_one(number: int) -> None:
                response = await service.open(f"r{number}", task=f"task-{number // 4}", wait_s=30)
                assert response.status_code == 200, response.text
                sessions[f"r{number}"] = response.json()

            await all_of((open_one, number) for number in range(CREDIT))
            assert len({one["session_id"] for one in sessions.values()}) == CREDIT
            refused = await service.open("one-too-many")
            assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (429, True)
            groups = {number: {sessions[f"r{number * 4 + k}"]["group"] for k in range(4)} for number in range(8)}
            assert all(len(found) == 1 for found in groups.values()), "sessions of a task share a group"
            opened = list(sessions.values())
            await all_of((service.talk, one) for one in opened)
            rewarded = opened[: CREDIT // 2]
            for number, one in enumerate(rewarded):
                assert await service.say(one, "reward", score=float(number % 3)) == 200
            gateway = run.children()["gateway"]
            gateway.kill()
            await all_of((service.talk, one) for one in opened)
            again = await service.open("r0")
            assert again.json()["session_id"] == sessions["r0"]["session_id"]
            for number, one in enumerate(opened):
                body = {} if number < CREDIT // 2 else {"score": float(number % 3)}
                assert await service.say(one, "close", **body) == 200
        await run.wait_for_step(2)
        ends, rows, trained, sampled = await _log(run)
        result = await run.result()
    assert (result["steps"], result["unexplained"], result["dead_letters"]) == (2, 0, 0)
    assert len(ends) == CREDIT
    assert {end.session: end.score for end in ends.values()} == {
        one["session_id"]: float(number % 3) for number, one in enumerate(opened)
    }
    assert {interaction for calls in sampled.values() for interaction in calls} == {
        answer for answers in service.answers.values() for answer in answers
    }
    assert trained
    for session, tokens in trained.items():
        assert tokens == list(sampled[session].values()), "exactly what was sampled is trained"
    assert set(rows) == set(sampled)


async def _gateway_url(run) -> str:
    async def served() -> str:
        assert run.process.returncode is None, run.stderr.decode()
        try:
            url = f"http://127.0.0.1:{run.folder.read_endpoints().gateway_port}"
            async with httpx.AsyncClient(base_url=url, timeout=5) as http:
                await http.get("/health")
        except (RunFolderError, httpx.TransportError):  # it is not up yet
            return ""
        return url

    return await wait_until(served, "the gateway", deadline_s=60, every_s=0.05)


async def _log(run):
    """Ends, rows' trajectories, trained tokens by session and turn, sampled tokens by session and call."""
    ends: dict[str, EpisodeEnded] = {}
    rows: dict[str, Trajectory] = {}
    sampled: dict[str, dict[str, list[int]]] = {}
    trained: dict[str, list[list[int]]] = {}
    groups: set[str] = set()
    topics = [EPISODE_ENDED, TRAJECTORY_READY, INTERACTION_RECORDED, STEP_ASSEMBLED]
    async with run.broker() as broker, RunLog(broker).read(topics, follow=False) as entries:
        payloads = RunPayloads(broker)
        async for entry in entries:
            message = entry.message
            if isinstance(message, EpisodeEnded):
                ends[message.session] = message
            elif isinstance(message, Trajectory):
                rows[message.session] = message
            elif isinstance(message, InteractionRecorded):
                tokens = msgspec.msgpack.decode(await payloads.get(message.tokens), type=InteractionTokens)
                ids = tokens.completion_ids.as_numpy().tolist()
                sampled.setdefault(message.session, {})[message.interaction_id] = ids
            else:
                groups |= set(message.groups)
        for session, trajectory in rows.items():
            if trajectory.group not in groups:
                continue
            (row,) = trajectory.rows
            tokens = msgspec.msgpack.decode(await payloads.get(row.tokens), type=RowTokens)
            ids, mask = tokens.token_ids.as_numpy(), tokens.loss_mask.as_numpy()
            turns = tokens.turns.as_numpy()
            trained[session] = [ids[mask & (turns == turn)].tolist() for turn in np.unique(turns[turns >= 0])]
    return ends, rows, trained, sampled


def test_the_documented_client_is_the_example_that_runs() -> None:
    source = (ROOT / "examples" / "online_agent.py").read_text(encoding="utf-8")
    start, end = source.index("async def serve"), source.index("\n\nasync def main")
    shown = "".join(f"    {line}\n" if line else "\n" for line in source[start:end].rstrip().split("\n"))
    assert shown in (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    assert len(shown.splitlines()) <= 25


async def test_the_example_client_feeds_a_whole_run(headrace, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_CONTROL_KEY", "chosen-by-the-user")
    async with headrace("--steps", "2", "--set", "gateway.port=0", config=ONLINE) as run:
        url = await _gateway_url(run)
        client = await anyio.to_thread.run_sync(
            lambda: subprocess.run(
                [sys.executable, str(ROOT / "examples" / "online_agent.py"), url, "32"],
                env={**os.environ, "HEADRACE_CONTROL_KEY": "chosen-by-the-user"},
                capture_output=True,
                check=False,
                timeout=120,
            )
        )
        assert client.returncode == 0, client.stderr.decode()
        result = await run.result()
    assert (result["steps"], result["classes"], result["unexplained"]) == (2, {"scored": 32}, 0)
