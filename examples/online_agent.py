"""A service of one's own that is trained while it serves: it opens sessions, works, and says what they were worth.

HEADRACE_CONTROL_KEY=… python examples/online_agent.py http://127.0.0.1:8700 40
"""

from __future__ import annotations

import os
import sys

import anyio
import httpx


async def serve(gateway: str, control_key: str, task: str) -> None:
    """One session: waits for credit, talks to the policy, sets the reward."""
    control = {"Authorization": f"Bearer {control_key}"}
    async with httpx.AsyncClient(base_url=f"{gateway}/v1", timeout=90) as http:
        while (opened := await http.post("/sessions", json={"task": task, "wait_s": 60}, headers=control)).is_error:
            if opened.status_code != httpx.codes.TOO_MANY_REQUESTS:
                opened.raise_for_status()
            await anyio.sleep(int(opened.headers["retry-after"]))
        session = opened.json()
        key = {"Authorization": f"Bearer {session['token']}"}  # any OpenAI or Anthropic client takes it as its API key
        messages = [{"role": "user", "content": f"A word of many vowels, please: {task}"}]
        answer = await http.post("/chat/completions", json={"model": "policy", "messages": messages}, headers=key)
        reply = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
        score = sum(letter in "aeiou" for letter in reply) / max(len(reply), 1)
        ended = await http.post(f"/sessions/{session['session_id']}/close", json={"score": score}, headers=control)
        ended.raise_for_status()


async def main(gateway: str, num_sessions: int) -> None:
    """Many sessions at once, four of each task: they are compared with each other."""
    async with anyio.create_task_group() as tasks:
        for number in range(num_sessions):
            tasks.start_soon(serve, gateway, os.environ["HEADRACE_CONTROL_KEY"], f"task {number // 4}")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]))
