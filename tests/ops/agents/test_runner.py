"""Agents behind the launch stage: what is on the log, what the agent is given, and how its end is classed."""

import json

import pytest

from ops.agents.pool import AgentAnswer
from ops.agents.runner import AgentRunner, agent_program, ending_of
from pipeline.metrics import Metrics
from schemas.config_arena import ArenaSettings, StreamConfig, StreamRunner
from schemas.messages.rollout import EpisodeClass, SessionClosed
from schemas.messages.sampling import EpisodeRequested
from schemas.payload import run_ref
from stages.arena_launch.groups import ClosedGroups
from stages.arena_launch.ports import LaunchTry, SessionTicket
from stages.arena_launch.stage import LaunchSettings, launch_episode
from stages.clients.arena.secret import Secret


class FakeWorld:
    """Sessions, log and payloads in memory."""

    def __init__(self, num_interactions: int = 1) -> None:
        self.said: list = []
        self.tried: list[LaunchTry] = []
        self.num_interactions = num_interactions
        self.stored: dict[str, bytes] = {}

    async def serves(self, version):
        return version == 0

    async def open(self, session, *, min_version):
        self.said.append(("open", session))
        return SessionTicket(session=session, token=Secret("token"), base_url="http://gateway")

    async def close(self, session):
        self.said.append(("close", session))
        return SessionClosed(session=session, num_interactions=self.num_interactions)

    async def tries(self, _requested):
        return self.tried

    async def record(self, message):
        self.said.append(("intent", message.route))
        self.tried.append(LaunchTry(launched=message, accepted=None))

    async def get(self, ref):
        return memoryview(self.stored[ref.id])

    def request(self, task, **changes) -> EpisodeRequested:
        data = json.dumps(task).encode()
        ref = run_ref(data)
        self.stored[ref.id] = data
        return EpisodeRequested(
            **{"group": "g0000000", "slot": 0, "attempt": 0, "stream": "s", "data_id": "d", "prompt": ref, **changes}
        )


@pytest.fixture
def launch(open_agent):
    async def launch(world, task, *, function="told", timeout_s=60.0, groups=None, **changes):
        stream = StreamConfig(
            name="s", stream_id="s", runner=StreamRunner.FUNCTION, agent="m:f", agent_timeout_s=timeout_s
        )
        async with open_agent(function) as pool:
            return await launch_episode(
                world.request(task, **changes),
                launches=world, sessions=world, groups=groups, metrics=Metrics("run", "launch"),
                runners={StreamRunner.FUNCTION: AgentRunner({"s": pool}, world)},
                settings=LaunchSettings(streams={"s": stream}, arena=ArenaSettings(), attempts=2),
            )  # fmt: skip

    return launch


async def test_the_intent_is_on_the_log_before_the_agent_runs_and_its_reward_ends_the_episode(launch) -> None:
    world = FakeWorld()
    (end,) = await launch(world, {"reward": 0.5}, function="echo")
    session = "g0000000-0-0-0"
    assert world.said == [("open", session), ("intent", "function"), ("close", session)]
    assert (end.outcome, end.status, end.score, end.final, end.session) == ("scored", "DONE", 0.5, True, session)


async def test_a_map_becomes_turn_rewards_and_its_mean_the_score(launch) -> None:
    (end,) = await launch(FakeWorld(), None, function="by_completion")
    assert end.turn_rewards == {"g0000000-0-0-0-a": 1.0, "g0000000-0-0-0-b": 0.0}
    assert end.score == 0.5


async def test_a_killed_process_is_a_system_failure_and_its_slot_is_tried_again(launch) -> None:
    end, again = await launch(FakeWorld(), {"do": "die"})
    assert (end.outcome, end.final, end.score) == (EpisodeClass.SYSTEM, False, None)
    assert isinstance(again, EpisodeRequested)
    assert again.attempt == 1
    (last,) = await launch(FakeWorld(), {"do": "die"}, attempt=1)
    assert last.final


@pytest.mark.parametrize(
    ("num_interactions", "outcome", "score"), [(1, EpisodeClass.MODEL, 0.0), (0, EpisodeClass.UNKNOWN, None)]
)
async def test_running_out_of_time_is_the_models_own_failure_after_a_model_call(
    launch, num_interactions, outcome, score
) -> None:
    (end,) = await launch(FakeWorld(num_interactions), {"do": "wait"}, timeout_s=0.05)
    assert (end.status, end.outcome, end.score) == ("TIMEOUT", outcome, score)


async def test_an_agent_that_raises_is_never_trained_on(launch) -> None:
    (end,) = await launch(FakeWorld(), {"do": "raise"})
    assert (end.status, end.outcome, end.score) == ("HARNESS_FAILED", EpisodeClass.UNKNOWN, None)
    assert "no luck" in end.error
    assert "token" not in end.error


async def test_an_episode_of_a_closed_group_is_not_played(launch) -> None:
    groups = ClosedGroups()
    groups.close("g0000000")
    (end,) = await launch(FakeWorld(), {"do": "wait"}, groups=groups)
    assert end.status == "LOCAL_WAIT_CANCELLED"


async def test_a_worker_killed_while_an_agent_ran_is_followed_by_a_try_with_another_session(launch) -> None:
    world = FakeWorld()
    await launch(world, {"reward": 1}, function="echo")
    (end,) = await launch(world, {"reward": 1}, function="echo")
    assert end.session == "g0000000-0-0-1"
    assert world.said[3] == ("close", "g0000000-0-0-0")


def test_a_group_that_closes_while_an_agent_runs_leaves_no_result() -> None:
    ending = ending_of(AgentAnswer(end="cancelled"), session="s", timeout_s=1)
    assert (ending.status, ending.result) == ("LOCAL_WAIT_CANCELLED", None)


def test_an_agent_sees_its_own_environment_and_none_of_our_keys(monkeypatch) -> None:
    for name in ("HEADRACE_GENERATION_KEY", "HEADRACE_CONTROL_KEY"):
        monkeypatch.setenv(name, "secret")
    stream = StreamConfig(name="s", stream_id="s", runner=StreamRunner.FUNCTION, agent="m:f", task_envs={"MARK": "1"})
    program = agent_program(stream, ArenaSettings())
    assert program.envs["MARK"] == "1"
    assert not {"HEADRACE_GENERATION_KEY", "HEADRACE_CONTROL_KEY", "ARENA_OPENAPI_TOKEN"} & set(program.envs)
