"""The gateway beside others: added latency, calls and streams a second on one core, memory and the cost of late turns.

Ours samples from an engine in its own process and records every call; the others pass to a server that answers at once, and their latency
is counted without its share. All answer 200 tokens. Others are measured where they are installed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import anyio
import msgspec
import psutil

from ops.bench.gateway_servers import Serving, competitor, make_gateway, our_gateway, upstream
from ops.bench.result import BenchResult, machine
from stages.gateway.http import GatewayApp
from stages.gateway.settings import Recording

CONCURRENCY: Final = 32
_BODY: Final = {"model": "policy", "messages": [{"role": "user", "content": "hello there, how are you?"}]}
_COMPETITORS: Final = ("litellm", "rllm", "smg")
_NUM_SINGLE: Final = 400
_WARM_UP: Final = 40
_SECONDS: Final = 4.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one load gave."""

    per_second: float
    per_core_second: float
    """Calls per second of the server's CPU time."""
    p50_ms: float
    p99_ms: float


def run() -> BenchResult:
    """Measure; about two minutes with all competitors."""
    metrics: dict[str, float | str] = {}
    with our_gateway(Recording.FAST, chunk_tokens=200, num_sessions=64) as serving:
        metrics |= _named("fast", _measure(serving))
    with our_gateway(Recording.STRICT, chunk_tokens=200, num_sessions=64) as serving:
        metrics |= _named("strict", _measure(serving))
    with our_gateway(Recording.FAST, chunk_tokens=1, num_sessions=64) as serving:
        streams = measure_load(serving, concurrency=CONCURRENCY, stream=True, seconds=_SECONDS)
        metrics |= {"streams_per_s": streams.per_second, "streams_per_core_s": streams.per_core_second}
    metrics |= _late_turns() | _memory()
    reference = _competitors()
    ratio = {
        f"{key}_over_{name}": round(float(metrics[ours]) / float(reference[f"{name}_{theirs}"]), 3)
        for name in _COMPETITORS
        for key, ours, theirs in (
            ("requests", "fast_requests_per_s", "requests_per_s"),
            ("requests_per_core", "fast_requests_per_core_s", "requests_per_core_s"),
            ("streams", "streams_per_s", "streams_per_s"),
            ("streams_per_core", "streams_per_core_s", "streams_per_core_s"),
        )
        if f"{name}_{theirs}" in reference
    }
    return BenchResult(name="gateway", metrics=metrics, reference=reference, ratio=ratio, machine=machine())


def _named(mode: str, loads: tuple[Load, Load]) -> dict[str, float | str]:
    single, many = loads
    return {
        f"{mode}_p50_ms": single.p50_ms,
        f"{mode}_p99_ms": single.p99_ms,
        f"{mode}_requests_per_s": many.per_second,
        f"{mode}_requests_per_core_s": many.per_core_second,
    }


def _measure(serving: Serving) -> tuple[Load, Load]:
    measure_load(serving, concurrency=1, stream=False, calls=_WARM_UP)
    single = measure_load(serving, concurrency=1, stream=False, calls=_NUM_SINGLE)
    return single, measure_load(serving, concurrency=CONCURRENCY, stream=False, seconds=_SECONDS)


def _competitors() -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    with upstream() as behind, tempfile.TemporaryDirectory() as folder:
        bare, _ = _measure(behind)
        for name in _COMPETITORS:
            try:
                with competitor(name, behind, Path(folder), _works) as serving:
                    single, many = _measure(serving)
                    streams = measure_load(serving, concurrency=CONCURRENCY, stream=True, seconds=_SECONDS)
            except FileNotFoundError:
                found[name] = "not installed: tests/resources/install_clients.sh --competitors"
                continue
            except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
                found[name] = f"did not run: {str(error)[:200]}"
                continue
            found |= {
                f"{name}_added_p50_ms": round(single.p50_ms - bare.p50_ms, 3),
                f"{name}_requests_per_s": many.per_second,
                f"{name}_requests_per_core_s": many.per_core_second,
                f"{name}_streams_per_s": streams.per_second,
                f"{name}_streams_per_core_s": streams.per_core_second,
            }
    return found


def _works(serving: Serving) -> bool:
    """Whether a server answers a call."""
    try:
        measure_load(serving, concurrency=1, stream=False, calls=1)
    except (OSError, asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        return False
    return True


def measure_load(serving: Serving, *, concurrency: int, stream: bool, calls: int = 0, seconds: float = 0.0) -> Load:
    """Clients that call again as soon as they are answered, for so many calls each or so long."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds if seconds else float("inf")

    async def clients() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(concurrency):
                key = serving.tokens[number % len(serving.tokens)]
                tasks.start_soon(_client, serving, key, stream, calls, until, latencies)

    cpu_s, began = _cpu_s(serving.pid), time.perf_counter()
    try:
        anyio.run(clients, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    wall_s, used_s = time.perf_counter() - began, _cpu_s(serving.pid) - cpu_s
    latencies.sort()
    return Load(
        per_second=round(len(latencies) / wall_s, 1),
        per_core_second=round(len(latencies) / max(used_s, 1e-3), 1),
        p50_ms=round(latencies[len(latencies) // 2] * 1e3, 3),
        p99_ms=round(latencies[int(len(latencies) * 0.99)] * 1e3, 3),
    )


def _cpu_s(pid: int) -> float:
    """CPU time of a server with its children: unlike calls a second, a busy machine changes it little."""
    used_s = 0.0
    try:
        for process in (server := psutil.Process(pid), *server.children(recursive=True)):
            times = process.cpu_times()
            used_s += times.user + times.system
    except psutil.NoSuchProcess:
        return used_s
    return used_s


async def _client(serving: Serving, key: str, stream: bool, calls: int, until: float, latencies: list[float]) -> None:
    body = msgspec.json.encode({**_BODY, "stream": True} if stream else _BODY)
    request = (
        f"POST {serving.path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    reader, writer = await asyncio.open_connection(serving.host, serving.port, limit=2**22)
    try:
        while (not calls or calls > 0) and time.perf_counter() < until:
            began = time.perf_counter()
            writer.write(request)
            with anyio.fail_after(30):
                await _read_answer(reader)
            latencies.append(time.perf_counter() - began)
            if calls:
                calls -= 1
                if not calls:
                    return
    finally:
        writer.close()


async def _read_answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ConnectionError(f"expected 200, found {head.splitlines()[0].decode()}")
    _, sized, rest = head.partition(b"content-length:")
    if sized:
        await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        await reader.readexactly(size + 2)
    await reader.readline()


_NUM_TURNS: Final = 1000
_TURN_TOKENS: Final = 20


def _late_turns() -> dict[str, float | str]:
    """CPU time of turns 1,000 and 10 of one conversation, for the same new tokens."""
    times = anyio.run(_turns, backend_options={"use_uvloop": True})
    early, late = (sorted(part)[len(part) // 2] for part in (times[5:45], times[-40:]))
    return {
        "turn_10_ms": round(early * 1e3, 3),
        "turn_1000_ms": round(late * 1e3, 3),
        "turn_1000_over_10": round(late / early, 2),
    }


async def _turns() -> list[float]:
    gateway = make_gateway(Recording.STRICT, num_tokens=_TURN_TOKENS, chunk_tokens=_TURN_TOKENS)
    app, ticket = GatewayApp(gateway), await gateway.open_session("long")
    messages: list[object] = [{"role": "user", "content": "let us begin"}]
    times: list[float] = []
    for turn in range(_NUM_TURNS):
        body = msgspec.json.encode({"model": "policy", "messages": messages})
        began = time.process_time()
        answer = await _in_process(app, ticket.token, body)
        times.append(time.process_time() - began)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"and then {turn}"}]
    return times


class _Choice(msgspec.Struct):
    message: dict[str, object]


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def _in_process(app: GatewayApp, token: str, body: bytes) -> dict[str, list[dict[str, object]]]:
    """One call without a socket."""
    sent: list[bytes] = []
    waiting = anyio.Event()
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if not pending:
            await waiting.wait()
        return dict(pending.pop())

    async def send(message: dict[str, object]) -> None:
        part = message.get("body")
        if isinstance(part, bytes):
            sent.append(part)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {token}".encode())],
    }
    await app(scope, receive, send)  # pyright: ignore[reportArgumentType] - ASGI's types are mutable mappings of Any
    completion = msgspec.json.decode(b"".join(sent), type=_Completion)
    return {"choices": [{"message": one.message} for one in completion.choices]}


_NUM_SESSIONS: Final = 1000
_SESSION_TOKENS: Final = 32_000


def _memory() -> dict[str, float | str]:
    """Memory of a fresh process with 1,000 open sessions of 32k tokens."""
    done = subprocess.run(
        [sys.executable, "-m", "ops.bench.gateway"], capture_output=True, check=True, timeout=300, env=dict(os.environ)
    )
    return {"memory_1000_sessions_mb": round(float(done.stdout), 1)}


async def _fill() -> float:
    """Open the sessions, in turns of 4,000 tokens each; resident megabytes."""
    gateway = make_gateway(Recording.STRICT, num_tokens=_SESSION_TOKENS // 16, chunk_tokens=1000)
    app = GatewayApp(gateway)
    for number in range(_NUM_SESSIONS):
        ticket = await gateway.open_session(f"s{number}")
        messages: list[object] = []
        for turn in range(8):
            messages.append({"role": "user", "content": f"{turn:04d} " * (_SESSION_TOKENS // 16 // 5)})
            answer = await _in_process(
                app, ticket.token, msgspec.json.encode({"model": "policy", "messages": messages})
            )
            messages.append(answer["choices"][0]["message"])
    return psutil.Process().memory_info().rss / 1e6


if __name__ == "__main__":
    sys.stdout.write(f"{anyio.run(_fill, backend_options={'use_uvloop': True})}\n")
