"""Local Arenas driven by plain HTTP, and a scripted chat endpoint."""

import asyncio
import json
import os
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web
from waiting import wait_until

from ops.arena.config import load_config
from ops.arena.server import ArenaSecrets, serve

TOKEN, LLM_KEY, UPSTREAM_KEY = "control-token", "gateway-key", "upstream-key"
CONFIG = """
pool_processes = 1
[[streams]]
stream_id = "sums"
dataset = "chain_sum"
dataset_options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
size = 20
turns = ["add {{expression}}", "check {{reply}}"]
harness = "under-test@1"
{stream}
[[harnesses]]
key = "under-test"
{harness}
{rest}
"""


class Arena:
    """One running Arena."""

    def __init__(self, process, url: str, http: aiohttp.ClientSession) -> None:
        self.process, self.url, self.http = process, url, http

    async def call(self, method: str, path: str, **options):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.http.request(method, f"{self.url}/openapi/v1{path}", headers=headers, **options) as answer:
            body = await answer.read()
            return answer.status, json.loads(body) if body else None

    async def register(self, base_url: str, name: str = "stream-areal-test") -> None:
        endpoint = {
            "endpoint_id": "e",
            "upstream_model": "policy",
            "base_url": base_url,
            "api_key": UPSTREAM_KEY,
            "inbound_protos": ["chat"],
            "enabled": True,
        }
        body = {"model_name": name, "endpoints": [endpoint], "enabled": True, "metadata": {"deployment_id": "d"}}
        assert await self.call("POST", "/llm/models", json=body) == (200, {"model_name": name})

    async def launch(self, number: int = 0, **changes) -> str:
        body = {
            "data_id": f"chain_sum-0-{number:06d}",
            "model_name": "stream-areal-test",
            "base_url": f"{self.url}/api",
            "api_key": LLM_KEY,
            "envs": {},
        }
        status, answer = await self.call("POST", "/streams/sums/launch_one_task", json={**body, **changes})
        assert (status, answer["status"]) == (202, "PENDING")
        return answer["task_id"]

    async def finished(self, task_id: str) -> dict:
        async def result() -> dict | None:
            _, found = await self.call("GET", f"/tasks/{task_id}/result")
            return None if found["status"] in ("PENDING", "AGENT_RUNNING") else found

        return await wait_until(result, task_id, deadline_s=120, every_s=0.02)

    async def played(self, **changes) -> dict:
        return await self.finished(await self.launch(**changes))

    async def generate(self, path: str, body: dict, key: str = LLM_KEY):
        async with self.http.post(
            f"{self.url}/api{path}", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            return answer.status, await answer.text()


@pytest.fixture
async def start_arena(tmp_path: Path):
    """Starts local Arenas in this process, with a harness and extra settings."""
    running: list[asyncio.Task[None]] = []
    async with aiohttp.ClientSession() as http:

        async def start(harness: str = 'kind = "scripted"', stream: str = "", rest: str = "") -> Arena:
            config = load_config(_written(tmp_path, harness, stream, rest))
            ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            secrets = ArenaSecrets(openapi_token=TOKEN, llm_api_key=LLM_KEY)
            running.append(asyncio.create_task(serve(config, ready=ready.set_result, secrets=secrets)))
            return Arena(psutil.Process(), await ready, http)

        yield start
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture
async def start_process(tmp_path: Path):
    """Starts `python -m ops.arena` with a harness."""
    processes = []
    async with aiohttp.ClientSession() as http:

        async def start(harness: str = 'kind = "scripted"') -> Arena:
            path = _written(tmp_path, harness, "", "")
            envs = {**os.environ, "ARENA_OPENAPI_TOKEN": TOKEN, "ARENA_LLM_API_KEY": LLM_KEY}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "ops.arena", str(path),
                env=envs, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            processes.append(process)
            line = await process.stdout.readline()
            assert line, (await process.stderr.read()).decode()
            return Arena(process, json.loads(line)["url"], http)

        yield start
    for process in processes:
        if process.returncode is None:
            process.terminate()
    for process in processes:
        await process.communicate()


def _written(folder: Path, harness: str, stream: str, rest: str) -> Path:
    path = folder / f"arena-{len(list(folder.iterdir()))}.toml"
    path.write_text(CONFIG.format(harness=harness, stream=stream, rest=rest))
    return path


class Chat:
    """A chat endpoint that answers what it is told to."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list = []

    async def handle(self, request: web.Request):
        self.calls.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if request.headers.get("Authorization") != f"Bearer {UPSTREAM_KEY}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        answer = self.answers.pop(0) if self.answers else "0"
        if callable(answer):
            return await answer(request)
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return web.json_response(
            {"id": "c1", "choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage}
        )


@pytest.fixture
async def chat():
    fake = Chat()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield fake
    await runner.cleanup()
