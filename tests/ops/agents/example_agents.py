"""Agents that the pool's tests play."""

import asyncio
import os
import subprocess
import sys
import time


async def echo(task, *, base_url, api_key, session, bonus=0.0):
    print("an agent may print")  # noqa: T201 - it must not get among the pool's answers
    return float(task["reward"]) + bonus


async def by_completion(task, *, base_url, api_key, session):
    return {f"{session}-a": 1.0, f"{session}-b": 0.0}


async def told(task, *, base_url, api_key, session):
    """What the task says."""
    match task["do"]:
        case "return":
            return task["value"]
        case "raise":
            raise RuntimeError(f"no luck with {api_key}")
        case "die":
            os._exit(7)
        case "wait":
            await asyncio.Event().wait()
        case "block":
            time.sleep(600)  # noqa: ASYNC251 - the agent that does not listen
        case "spawn":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # noqa: ASYNC220
            with open(task["file"], "w") as file:  # noqa: ASYNC230, PTH123
                file.write(str(child.pid))
            await asyncio.Event().wait()
        case "meet":
            number = len(_met)
            _met.append(number)
            while len(_met) < task["count"]:
                await asyncio.sleep(0)
            return float(number)
    return None


_met: list[int] = []


def no_coroutine(task, *, base_url, api_key, session):
    return 0.0
