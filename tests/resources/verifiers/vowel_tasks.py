"""A small verifiers taskset with a harness of its own: two calls of the model, then a reward for vowels."""

import json
import urllib.request

import verifiers.v1 as vf

WORDS = ("river", "mill", "wheel", "stone")


class VowelData(vf.TaskData):
    word: str


class VowelTask(vf.Task[VowelData]):
    @vf.reward
    async def vowels(self, trace) -> float:
        reply = trace.last_reply
        return sum(letter in "aeiou" for letter in reply) / max(len(reply), 1)


class VowelTaskset(vf.Taskset[VowelTask, vf.TasksetConfig]):
    def load(self):
        for word in WORDS:
            yield VowelTask(VowelData(word=word, id=word, prompt=f"a word like {word}"), self.config.task)


class TwoCalls(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> vf.ProgramResult:
        import asyncio  # noqa: PLC0415 - the harness's own need

        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            reply = await asyncio.to_thread(_chat, endpoint, secret, ctx.model, messages)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _chat(endpoint: str, secret: str, model: str, messages: list) -> str:
    request = urllib.request.Request(  # noqa: S310 - verifiers' own server on loopback
        f"{endpoint.rstrip('/')}/chat/completions",
        data=json.dumps({"model": model, "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - same
        return json.load(answer)["choices"][0]["message"]["content"] or ""


__all__ = ["TwoCalls", "VowelTaskset"]
