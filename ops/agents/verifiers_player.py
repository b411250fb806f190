"""Plays a verifiers environment (package `verifiers`, its v1 API) against our gateway. Loaded by path into an agent process.

The model is an OpenAI-compatible endpoint whose key is the session's token: the environment's harness talks to verifiers' own
interception server, which forwards each call to the gateway, where its tokens are recorded. The reward is the trained trace's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports] - an optional package, perhaps of another interpreter
from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports] - same
    load_environment,
    resolve_env_config,
)

MODEL: Final = "policy"


class VerifiersPlayer:
    """One environment; its tasks are told apart by their place in the taskset."""

    def __init__(self, config: Any, timeout_error: type[Exception]) -> None:  # Any: verifiers' EnvConfig
        self._config: Final = config
        self._timeout_error: Final = timeout_error
        self._taskset: Final = load_environment(config).taskset
        self._tasks: Final[dict[int, Any]] = {}  # Any: verifiers' Task
        self._unread: Final = iter(self._taskset)

    async def play(self, task: object, *, base_url: str, api_key: str, session: str) -> float:
        """One episode of the task with this index.

        Raises:
            RuntimeError: the environment failed.
        """
        if not isinstance(task, Mapping) or not isinstance(task.get("idx"), int):
            raise TypeError(f"expected a task as {{'idx': number}}, found {task!r:.200}")
        found = self._task(task["idx"])
        # verifiers reads keys from the environment only; each session has its own, for as long as it is played.
        variable = f"HEADRACE_SESSION_{session.upper().replace('-', '_')}"
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            # An environment of its own: what serves it, and its client with this key, end with the episode.
            environment = load_environment(self._config)
            async with environment.serving():
                episode = await environment.run_episode(found, vf.ModelContext(model=MODEL, client=client))
        finally:
            del os.environ[variable]
        return self._reward(episode)

    def rows(self, limit: int) -> list[dict[str, object]]:
        """The first tasks, or all of a taskset that ends."""
        if not limit and not self._taskset.bounded:
            raise ValueError("the taskset is infinite: set the stream's `rows` to how many tasks it shall have")
        tasks = itertools.islice(self._taskset, limit or None)
        return [
            {"id": str(task.data.id or task.data.idx), "prompt": {"idx": task.data.idx}, "tags": _tags(task)}
            for task in tasks
        ]

    def _task(self, index: int) -> Any:  # Any: verifiers' Task
        while index not in self._tasks:
            task = next(self._unread, None)
            if task is None:
                raise LookupError(f"the taskset has no task {index}")
            self._tasks[task.data.idx] = task
        return self._tasks[index]

    def _reward(self, episode: Any) -> float:  # Any: verifiers' Episode
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            text = "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok"
            if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
                raise self._timeout_error(text)
            raise RuntimeError(text)
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) != 1:
            raise RuntimeError(
                f"expected one trained agent in an episode, found {len(trained)} of {len(episode.traces)}"
            )
        return float(trained[0].reward)


def _tags(task: Any) -> list[str]:  # Any: verifiers' Task
    return [task.data.name] if task.data.name else []


@asynccontextmanager
async def open_player(
    agent: str, args: Mapping[str, Any], timeout_error: type[Exception]
) -> AsyncGenerator[VerifiersPlayer]:
    """Open the environment of a taskset.

    Args:
        agent: Id of the taskset's installed package.
        args: The environment's own settings, as in the `[env]` table of verifiers; `taskset.id` is `agent`.
        timeout_error: Raised when an episode ran out of a limit of its own.
    """
    taskset = {**args.get("taskset", {}), "id": agent}
    yield VerifiersPlayer(resolve_env_config({**args, "taskset": taskset}), timeout_error)
