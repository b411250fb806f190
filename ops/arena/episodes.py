"""Runs launched tasks: harness, verdict, terminal status, and the plan's faults. Knows no HTTP."""

from __future__ import annotations

import msgspec
import structlog
from anyio import CapacityLimiter, sleep_forever, to_thread

from ops.arena.config import EpisodeFault
from ops.arena.jobs import End, Job, Outcome
from ops.arena.pool import HarnessPool
from ops.arena.state import ArenaState, Json, Task

_log = structlog.get_logger("arena.episodes")


class EpisodeRunner:
    """Takes tasks from PENDING to their terminal status."""

    def __init__(self, state: ArenaState, pool: HarnessPool) -> None:
        self._state = state
        self._pool = pool
        self._running = CapacityLimiter(state.config.max_running_episodes)
        self._graders = CapacityLimiter(1)

    async def run(self, task: Task, fault: EpisodeFault | None) -> None:
        """Run one task to its end; a hung boot has none."""
        if fault is not None and fault.kind == "hung_boot":
            await sleep_forever()
        async with self._running:
            task.status = "AGENT_RUNNING"
            outcome: Outcome | None = None
            if fault is None or fault.run_harness or fault.kind == "immediate":
                outcome = await self._pool.play(self._job(task))
            status, score, raw = await self._verdict(task, outcome)
        if fault is not None and fault.kind == "status":
            status, score, raw = fault.status, _faulty_score(fault, score), raw | {"planned": True}
            task.receipt = msgspec.Raw(fault.receipt_json.encode()) if fault.receipt_json else None
        task.end(status, score=score, raw=raw)
        self._state.count_ended()

    def _job(self, task: Task) -> Job:
        source = self._state.sources[task.stream_id]
        request = task.request
        ours = {"MODEL_NAME": request.model_name, "BASE_URL": request.base_url, "API_KEY": request.api_key}
        return Job(
            job_id=task.task_id,
            harness=task.harness,
            texts=source.texts(request.data_id),
            max_turns=source.spec.max_turns,
            envs={**request.envs, **ours},
        )

    async def _verdict(self, task: Task, outcome: Outcome | None) -> tuple[str, float | None, Json]:
        if outcome is None:
            return "FAILED", None, {"exit_reason": "not_run"}
        raw: Json = {"exit_reason": "done", "reply": outcome.reply, "num_calls": outcome.num_calls}
        match outcome.end:
            case End.OK:
                return await self._graded(task, outcome, raw)
            case End.NO_OUTPUT:
                return "NO_OUTPUT", None, raw | {"exit_reason": "no_output"}
            case End.TIMEOUT:
                return await self._after_timeout(task, outcome, raw | {"exit_reason": "timeout"})
            case End.SETUP_FAILED:
                return "SETUP_FAILED", None, raw | {"exit_reason": "setup", "error": outcome.message}
            case End.HARNESS_FAILED:
                task.receipt = _receipt(task, outcome)
                why: Json = {"type": outcome.error_type, "message": outcome.message}
                return "HARNESS_FAILED", None, raw | {"exit_reason": "harness", "error": why}

    async def _graded(self, task: Task, outcome: Outcome, raw: Json) -> tuple[str, float | None, Json]:
        source = self._state.sources[task.stream_id]
        try:
            score = await to_thread.run_sync(source.score, task.request.data_id, outcome.reply, limiter=self._graders)
        except Exception as error:  # noqa: BLE001 - any fault of a verifier is a failed evaluation, never a score
            _log.warning("verifier failed", task_id=task.task_id, error=type(error).__name__)
            return "EVAL_FAILED", None, raw | {"exit_reason": "grading_error", "error": type(error).__name__}
        return "DONE", score, raw

    async def _after_timeout(self, task: Task, outcome: Outcome, raw: Json) -> tuple[str, float | None, Json]:
        """Partial work that passes the verifier counts; the reason stays `timeout` in any case."""
        if outcome.reply.strip():
            status, score, graded = await self._graded(task, outcome, raw)
            if status != "DONE" or score:
                return status, score, graded
        return "TIMEOUT", None, raw


def _faulty_score(fault: EpisodeFault, score: float | None) -> float | None:
    if fault.status in ("DONE", "OK"):
        return score if score is not None else 0.0
    return 1.0 if fault.with_score else None


def _receipt(task: Task, outcome: Outcome) -> msgspec.Raw | None:
    """The harness's own account of an agent-phase error."""
    kinds = {"context_length_exceeded": "prompt_too_long", "max_turns": "max_turns"}
    kind = kinds.get(outcome.error_type)
    if kind is None:
        return None
    error = {"phase": "agent", "type": kind, "message": outcome.message[:200]}
    return msgspec.Raw(msgspec.json.encode({"task_id": task.task_id, "error": error}))
