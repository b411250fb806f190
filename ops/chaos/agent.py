"""The agent of chaos runs: one call of the model, rewarded by its vowels. It gives up at once where the gateway is away."""

from __future__ import annotations

import httpx

_PATIENCE_S = 30.0


async def vowels(task: str, *, base_url: str, api_key: str, session: str) -> dict[str, float]:
    """The share of vowels in the answer, for the completion that gave it."""
    headers = {"Authorization": f"Bearer {api_key}"}
    messages = [{"role": "user", "content": f"{task} {session}"}]
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=_PATIENCE_S) as http:
        answer = await http.post("/chat/completions", json={"model": "policy", "messages": messages})
        answer.raise_for_status()
        completion = answer.json()
    reply = completion["choices"][0]["message"]["content"] or ""
    return {completion["id"]: sum(letter in "aeiou" for letter in reply) / max(len(reply), 1)}
