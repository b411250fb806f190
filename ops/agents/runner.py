"""Episodes of the user's own agents: an `EpisodeRunner` over pools of processes, one per stream.

    intent on the log ─▶ agent(task, base_url, api_key, session) in a process ─▶ reward, or a reward per completion

The agent reaches our gateway itself, with the session's token. An agent that raises is a failed harness, one that runs out
of time is the model's own failure, and a process that dies is nobody's but ours: its episodes are tried again.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import msgspec

from ops.agents.pool import AgentAnswer, AgentCall, AgentPool, AgentProgram, open_pool
from ops.secrets import CONTROL_KEY_ENV, GENERATION_KEY_ENV
from schemas.config_arena import ArenaSettings, StreamConfig, StreamRunner
from schemas.messages.rollout import EpisodeLaunched, SessionClosed
from stages.arena_launch.ports import Ending, Episode, TryLog
from stages.clients.arena.classify import LOCAL_ERROR, LOCAL_WAIT_CANCELLED
from stages.clients.arena.wire import TaskResult
from stages.ports import Payloads

ADAPTERS: Final = {
    StreamRunner.FUNCTION: "",
    StreamRunner.VERIFIERS: str(Path(__file__).with_name("verifiers_player.py")),
}
_GATEWAY_PARENT_ENV: Final = "HEADRACE_PARENT_PID"


class AgentRunner:
    """Plays the streams that have a pool; open with `open_agents`."""

    def __init__(self, pools: Mapping[str, AgentPool], payloads: Payloads) -> None:
        self._pools: Final = pools
        self._payloads: Final = payloads

    async def refusal(self, stream: StreamConfig) -> str:
        return "" if stream.name in self._pools else f"stream {stream.name!r} has no agent processes"

    async def away(self, stream: StreamConfig) -> str:
        del stream  # its processes are this worker's own
        return ""

    @asynccontextmanager
    async def play(self, episode: Episode, log: TryLog, over: anyio.Event) -> AsyncGenerator[Ending]:
        requested, stream, ticket = episode.requested, episode.stream, episode.ticket
        task: object = requested.data_id
        if requested.prompt is not None:
            task = msgspec.json.decode(await self._payloads.get(requested.prompt))
        await log.intend(route=stream.runner.value, model_name=stream.agent, harness=stream.agent)
        call = AgentCall(
            task=task, base_url=f"{ticket.base_url}/v1", api_key=ticket.token.reveal(), session=ticket.session
        )
        answer = await self._pools[stream.name].play(call, timeout_s=stream.agent_timeout_s, over=over)
        yield ending_of(answer, session=ticket.session, timeout_s=stream.agent_timeout_s)

    @asynccontextmanager
    async def take_over(
        self, launched: EpisodeLaunched, task_id: str, stream: StreamConfig, over: anyio.Event
    ) -> AsyncGenerator[Ending]:
        """Agents end with the worker that started them, and none is ever accepted under an id."""
        del stream, over
        yield Ending(status=LOCAL_ERROR, error=f"agent {task_id} of {launched.session} ended with its worker")

    async def disown(self, launched: EpisodeLaunched) -> None:
        """It ended with its worker."""

    async def explain(self, launched: EpisodeLaunched, ending: Ending, closed: SessionClosed) -> object:
        del launched, ending, closed  # an agent leaves no receipt: an exception of its own names no cause to rely on
        return None


def ending_of(answer: AgentAnswer, *, session: str, timeout_s: float) -> Ending:
    """What an agent's answer means, in the statuses that an Arena's tasks have."""
    match answer.end:
        case "returned":
            # One number for maps too: whether the episode counts as solved is asked of the whole episode.
            mean = sum(answer.rewards.values()) / len(answer.rewards) if answer.rewards else answer.reward
            return Ending(status="DONE", result=_result("DONE", session, mean), turn_rewards=answer.rewards)
        case "timeout":
            error = answer.error or f"the agent did not end within {timeout_s:g} s"
            return Ending(status="TIMEOUT", error=error, result=_result("TIMEOUT", session, None))
        case "failed":
            status = "HARNESS_FAILED"
            return Ending(status=status, error=answer.error, result=_result(status, session, None))
        case "cancelled":
            return Ending(status=LOCAL_WAIT_CANCELLED, error="its group is closed")
        case "rows" | "died":
            return Ending(status=LOCAL_ERROR, error=answer.error)


def _result(status: str, session: str, score: float | None) -> TaskResult:
    return TaskResult(
        task_id=session, status=status, score=score, raw=None, artifacts_uri=None, trace_id=None, computed_at=None
    )


def agent_program(stream: StreamConfig, arena: ArenaSettings) -> AgentProgram:
    """What a stream's processes run, in an environment without this project's own keys."""
    secret = (GENERATION_KEY_ENV, CONTROL_KEY_ENV, arena.token_env, arena.llm_api_key_env, _GATEWAY_PARENT_ENV)
    inherited = {name: value for name, value in os.environ.items() if name not in secret}
    return AgentProgram(
        name=stream.name,
        agent=stream.agent,
        adapter=ADAPTERS[stream.runner],
        args=stream.agent_args,
        python=stream.agent_python,
        envs={**inherited, "PYTHONUNBUFFERED": "1", **stream.task_envs},
        num_processes=stream.agent_processes,
    )


@asynccontextmanager
async def open_agents(
    streams: Mapping[str, StreamConfig], arena: ArenaSettings, payloads: Payloads
) -> AsyncGenerator[AgentRunner]:
    """The pools of all streams that are not an Arena's, as long as the context."""
    async with AsyncExitStack() as stack:
        pools: dict[str, AgentPool] = {}
        for stream in streams.values():
            if stream.runner in ADAPTERS:
                pools[stream.name] = await stack.enter_async_context(open_pool(agent_program(stream, arena)))
        yield AgentRunner(pools, payloads)
