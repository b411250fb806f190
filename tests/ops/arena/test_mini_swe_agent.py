"""The real mini-swe-agent, unmodified, as a command harness: local Arena → model gateway → chat endpoint, one process per episode."""

import json

import pytest

pytestmark = pytest.mark.resources

HARNESS = """
kind = "command"
timeout_s = 120
{command}
answer_file = "answer.txt"
"""


def _tool_call(number: int, command: str) -> dict:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {
        "role": "assistant",
        "content": "THOUGHT: go on.",
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


async def test_mini_swe_agent_completes_a_task_through_the_arenas_gateway(start_arena, chat, mini_swe_agent) -> None:
    chat.answers = [
        _tool_call(0, "printf %s -4 > answer.txt"),
        _tool_call(1, "cat answer.txt"),
        _tool_call(2, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    arena = await start_arena(HARNESS.format(command=mini_swe_agent), stream='scorer = "exact"')
    await arena.register(chat.url)
    envs = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_CUSTOM_HEADERS": "X-Session-Id: s-1\nX-Session-Token: t-1",
    }
    result = await arena.played(envs=envs)
    assert (result["status"], result["score"]) == ("DONE", 1.0), result["raw"]
    assert len(chat.calls) == 3
    assert {call["model"] for call in chat.calls} == {"policy"}
    assert "add 0 - 4" in chat.calls[0]["messages"][1]["content"]
    assert [message["role"] for message in chat.calls[2]["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert "-4" in chat.calls[2]["messages"][-1]["content"]
    assert {(h["x-session-id"], h["x-session-token"]) for h in chat.headers} == {("s-1", "t-1")}
