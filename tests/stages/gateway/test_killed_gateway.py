"""A gateway killed at any instruction, under `strict`: no answered call is missing from the log, and its sessions go on elsewhere."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import httpx
from killable_gateway import folder_house

NUM_SESSIONS = 50
CHAT = "/v1/chat/completions"


async def test_sessions_of_a_killed_gateway_go_on_at_another_without_a_lost_answer(tmp_path):
    script = Path(__file__).parent / "killable_gateway.py"
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{script.parent}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(  # noqa: ASYNC220 - started once, before anything else runs
        [sys.executable, str(script), str(tmp_path), str(NUM_SESSIONS)], stdout=subprocess.PIPE, env=env, cwd=root
    )
    try:
        assert process.stdout is not None
        hello = json.loads(await anyio.to_thread.run_sync(process.stdout.readline))
        histories = await _talk_until_killed(process, hello["url"], hello["tokens"])
    finally:
        process.kill()
        process.wait()
    assert sum(len(answered) for _, answered in histories) >= 2 * NUM_SESSIONS
    home = folder_house(tmp_path, "survivor")
    for number, (messages, answered) in enumerate(histories):
        session = f"s{number}"
        recorded = home.recorder.interactions(session)
        assert [one.ordinal for one in recorded] == list(range(len(recorded)))
        assert set(answered) <= {one.interaction_id for one in recorded}
        async with home.http(hello["tokens"][number]) as client:
            response = await client.post(CHAT, json={"messages": messages})
        assert response.status_code == 200
        last = home.recorder.interactions(session)[-1]
        assert last.parent is not None
        assert recorded[last.parent].interaction_id == answered[-1]
        whole = await home.chain(session, last.ordinal)
        prompt = home.engine.requests[-1].prompt_ids.tolist()
        assert whole[: len(prompt)] == prompt
        closed = await home.gateway.close_session(session)
        assert closed.num_interactions == len(recorded) + 1


async def _talk_until_killed(process, url, tokens):
    """Each session's conversation and the ids of the answers that it got whole; the kill comes amid calls."""
    histories = [([{"role": "user", "content": f"start {number}"}], []) for number in range(len(tokens))]

    async def talk(client, token, messages, answered):
        while True:
            try:
                response = await client.post(
                    CHAT, json={"messages": messages}, headers={"authorization": f"Bearer {token}"}
                )
            except httpx.TransportError:
                return
            body = response.json()
            answered.append(body["id"])
            messages += [body["choices"][0]["message"], {"role": "user", "content": "go on"}]
            if all(len(done) >= 2 for _, done in histories) and process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)

    limits = httpx.Limits(max_connections=100)
    async with (
        httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client,
        anyio.create_task_group() as tasks,
    ):
        for token, (messages, answered) in zip(tokens, histories, strict=True):
            tasks.start_soon(talk, client, token, messages, answered)
    return histories
