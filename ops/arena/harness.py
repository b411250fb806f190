"""How a harness plays one episode: model calls over HTTP, or a command of its own. Runs inside a harness process.

Knows the task's texts and the endpoint it was given; never the verifier, the Arena's tokens or other episodes.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from pathlib import Path

import aiohttp
import msgspec

from ops.arena.config import HarnessKind
from ops.arena.dialects import CHAT, MESSAGES, RESPONSES, Dialect, Turns
from ops.arena.jobs import End, Endpoint, Job, Outcome, anthropic_endpoint, openai_endpoint

_TRIES = 3
"""Calls per turn, as the vendors' SDKs do: one and two retries."""
_OUTPUT_LIMIT_BYTES = 1 << 20
_CANT_START = 127
"""What a shell, and the leash, answer for a program that isn't there."""


class AgentError(Exception):
    """The episode can't go on; `error_type` says whose doing it is where the model's."""

    def __init__(self, message: str, *, error_type: str = "") -> None:
        super().__init__(message)
        self.error_type = error_type


class SetupError(Exception):
    """The harness could not be started at all."""


class _Progress:
    """What stands when an episode is cut off."""

    def __init__(self) -> None:
        self.reply = ""
        self.num_calls = 0


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail = msgspec.field(default_factory=_ErrorDetail)


async def play(job: Job, http: aiohttp.ClientSession) -> Outcome:
    """Play one episode to its end; every way of ending is an outcome."""
    progress = _Progress()
    try:
        async with asyncio.timeout(job.harness.timeout_s):
            await _play(job, http, progress)
    except TimeoutError:
        return _outcome(job, progress, End.TIMEOUT, message=f"no end within {job.harness.timeout_s} s")
    except SetupError as error:
        return _outcome(job, progress, End.SETUP_FAILED, message=str(error))
    except AgentError as error:
        return _outcome(job, progress, End.HARNESS_FAILED, message=str(error), error_type=error.error_type)
    end = End.OK if progress.reply.strip() else End.NO_OUTPUT
    return _outcome(job, progress, end)


async def _play(job: Job, http: aiohttp.ClientSession, progress: _Progress) -> None:
    match job.harness.kind:
        case HarnessKind.SCRIPTED:
            progress.reply = job.harness.scripted_answer.replace("{answer}", job.texts.answer)
        case HarnessKind.OPENAI_LOOP:
            await _converse(job, http, progress, CHAT, 1)
        case HarnessKind.OPENAI_TWO_TURN:
            await _converse(job, http, progress, CHAT, 2)
        case HarnessKind.RESPONSES_LOOP:
            await _converse(job, http, progress, RESPONSES, job.max_turns)
        case HarnessKind.ANTHROPIC_LOOP:
            await _converse(job, http, progress, MESSAGES, job.max_turns)
        case HarnessKind.COMMAND:
            await _run_command(job, progress)


async def _converse(
    job: Job, http: aiohttp.ClientSession, progress: _Progress, dialect: Dialect, max_turns: int
) -> None:
    anthropic = dialect is MESSAGES
    endpoint = anthropic_endpoint(job.envs) if anthropic else openai_endpoint(job.envs)
    auth = {"x-api-key": endpoint.api_key} if anthropic else {"Authorization": f"Bearer {endpoint.api_key}"}
    if anthropic:
        auth["anthropic-version"] = "2023-06-01"
    turns: Turns = []
    for text in job.texts.turns[:max_turns]:
        turns.append(("user", text.replace("{reply}", progress.reply)))
        body = msgspec.json.encode(dialect.body(job.harness, endpoint.model, turns))
        headers = {**endpoint.headers, **auth}
        progress.reply = await _call(http, endpoint, headers, dialect=dialect, body=body, stream=job.harness.stream)
        progress.num_calls += 1
        turns.append(("assistant", progress.reply))


async def _call(
    http: aiohttp.ClientSession,
    endpoint: Endpoint,
    headers: dict[str, str],
    *,
    dialect: Dialect,
    body: bytes,
    stream: bool,
) -> str:
    url = endpoint.base_url + dialect.path
    last = ""
    for attempt in range(_TRIES):
        try:
            async with http.post(url, data=body, headers={**headers, "Content-Type": "application/json"}) as answer:
                if answer.status == 200:
                    return await _streamed(answer, dialect) if stream else dialect.reply(await answer.read())
                last = f"HTTP {answer.status}"
                if answer.status != 429 and answer.status < 500:
                    raise _refused(answer.status, await answer.read())
                pause = answer.headers.get("Retry-After", "")
        except (aiohttp.ClientError, msgspec.MsgspecError) as error:
            last, pause = f"{type(error).__name__}: {error}", ""
        if attempt < _TRIES - 1:
            await asyncio.sleep(float(pause) if pause.isdigit() else 0.5 * 2**attempt)
    raise AgentError(f"model call failed {_TRIES} times, last with {last}")


async def _streamed(answer: aiohttp.ClientResponse, dialect: Dialect) -> str:
    parts: list[str] = []
    async for line in answer.content:
        data = line.strip()
        if data.startswith(b"data:") and data != b"data: [DONE]":
            event = data[5:].strip()
            failed = msgspec.json.decode(event, type=_ErrorBody).error
            if failed.message:
                raise AgentError(f"the stream broke: {failed.message[:200]}", error_type=_error_type(failed))
            parts.append(dialect.delta(event))
    return "".join(parts)


def _refused(status: int, body: bytes) -> AgentError:
    try:
        detail = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        detail = _ErrorDetail(message=body[:200].decode(errors="replace"))
    return AgentError(f"model endpoint answered {status}: {detail.message[:200]}", error_type=_error_type(detail))


def _error_type(detail: _ErrorDetail) -> str:
    overflow = "context_length_exceeded"
    return overflow if overflow in (detail.code, detail.type) else ""


async def _run_command(job: Job, progress: _Progress) -> None:
    try:
        folder = tempfile.TemporaryDirectory(prefix="arena-episode-", ignore_cleanup_errors=True)
    except OSError as error:  # a full disk is the machine's fault: no episode of it may look like the model's
        raise SetupError(f"no working folder: {error.strerror}") from error
    endpoint = openai_endpoint(job.envs)
    with folder as workdir:
        fill = {
            "{prompt}": job.texts.turns[0],
            "{model}": endpoint.model,
            "{base_url}": endpoint.base_url,
            "{headers_json}": msgspec.json.encode(endpoint.headers).decode(),
            "{workdir}": workdir,
        }
        command = [_filled(word, fill) for word in job.harness.command]
        code, output = await _output_of(command, workdir, _command_envs(job, workdir))
        answer_file = Path(workdir) / job.harness.answer_file
        if job.harness.answer_file and answer_file.is_file():
            output = answer_file.read_bytes()[:_OUTPUT_LIMIT_BYTES]
        elif job.harness.answer_file:
            output = b""
        progress.reply = output.decode(errors="replace")
        if code == _CANT_START:
            raise SetupError(f"can't start {job.harness.command[0]!r}: is it installed?")
        if code != 0:
            name = shlex.quote(job.harness.command[0])
            raise AgentError(f"{name} ended with exit code {code}", error_type="exit_code")


async def _output_of(command: list[str], workdir: str, envs: dict[str, str]) -> tuple[int, bytes]:
    leash = str(Path(__file__).parent / "leash.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", leash, str(os.getpid()), *command,
        cwd=workdir, env=envs, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        stdout = process.stdout
        output = bytearray()
        while stdout is not None and (part := await stdout.read(1 << 16)):
            output += part[: max(0, _OUTPUT_LIMIT_BYTES - len(output))]
        return await process.wait(), bytes(output)
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.shield(process.wait())


def _command_envs(job: Job, workdir: str) -> dict[str, str]:
    openai, anthropic = openai_endpoint(job.envs), anthropic_endpoint(job.envs)
    return {
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", os.defpath),
        "HOME": workdir,
        "LANG": "C.UTF-8",
        **job.envs,
        "OPENAI_BASE_URL": openai.base_url,
        "OPENAI_API_BASE": openai.base_url,
        "OPENAI_API_KEY": openai.api_key,
        "ANTHROPIC_BASE_URL": anthropic.base_url,
        "ANTHROPIC_AUTH_TOKEN": anthropic.api_key,
    }


def _filled(word: str, fill: dict[str, str]) -> str:
    for name, value in fill.items():
        word = word.replace(name, value)
    return word


def _outcome(job: Job, progress: _Progress, end: End, *, message: str = "", error_type: str = "") -> Outcome:
    return Outcome(
        job_id=job.job_id,
        end=end,
        reply=progress.reply,
        num_calls=progress.num_calls,
        error_type=error_type,
        message=message,
    )
