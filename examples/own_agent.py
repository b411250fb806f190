"""An agent of one's own: two calls of the model, each rewarded for itself."""

from __future__ import annotations

import httpx


async def vowels(task: str, *, base_url: str, api_key: str, session: str) -> dict[str, float]:
    """Ask for a word of many vowels, twice; the reward of each completion is its share of vowels.

    Args:
        task: The row's prompt.
        base_url: The gateway, with `/v1`, as OpenAI clients take it.
        api_key: The session's token.
        session: The session's id, for logs of one's own.

    Returns:
        completion id → reward. One number for the whole episode is as good.
    """
    messages = [{"role": "user", "content": task}]
    rewards: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as http:
        for _ in range(2):
            answer = await http.post("/chat/completions", json={"model": "policy", "messages": messages})
            answer.raise_for_status()
            completion = answer.json()
            reply = completion["choices"][0]["message"]["content"] or ""
            rewards[completion["id"]] = sum(letter in "aeiou" for letter in reply) / max(len(reply), 1)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"more, {session}"}]
    return rewards
