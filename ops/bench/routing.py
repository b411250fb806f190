"""What gateway and router add in front of an engine that answers at once.

    bare      client ──HTTP──▶ a server that answers at once
    gateway   client ──HTTP──▶ gateway ──▶ the engine
    routed    client ──HTTP──▶ gateway ──▶ router ──▶ one of 16 engines

All answer 200 tokens, recorded before the answer ends. `routed_p50_ms` is everything: the client's side of HTTP, gateway, router. The
router's own share is measured without HTTP, one call after the other and with others waiting for a slot.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import anyio
import anyio.lowlevel
import numpy as np

from ops.bench.gateway import CONCURRENCY, measure_load
from ops.bench.gateway_servers import NUM_TOKENS, Serving, make_router, our_gateway, upstream
from ops.bench.result import BenchResult, machine
from stages.gateway.settings import Recording
from stages.ports import GenerateRequest, SamplingSettings, TokenChunk
from stages.routing.router import Router

NUM_ENGINES: Final = 16
_WARM_UP: Final = 100
_NUM_SINGLE: Final = 1000
_NUM_DIRECT: Final = 5000
_SECONDS: Final = 4.0
_Generate = Callable[[GenerateRequest], AsyncIterator[TokenChunk]]


def run() -> BenchResult:
    """Measure; about half a minute."""
    with upstream() as serving:
        bare = _measure(serving)
    with our_gateway(Recording.STRICT, chunk_tokens=NUM_TOKENS, num_sessions=64) as serving:
        gateway = _measure(serving)
    with our_gateway(Recording.STRICT, chunk_tokens=NUM_TOKENS, num_sessions=64, num_engines=NUM_ENGINES) as serving:
        routed = _measure(serving)
    alone_us, crowded_us = anyio.run(_router_alone, backend_options={"use_uvloop": True})
    metrics: dict[str, float | str] = {
        "routed_p50_ms": routed["p50_ms"],
        "routed_p99_ms": routed["p99_ms"],
        "routed_cpu_ms": routed["cpu_ms"],
        "gateway_p50_ms": gateway["p50_ms"],
        "gateway_cpu_ms": gateway["cpu_ms"],
        "added_p50_ms": round(routed["p50_ms"] - bare["p50_ms"], 3),
        "router_call_us": alone_us,
        "router_call_crowded_us": crowded_us,
    }
    reference: dict[str, float | str] = {"bare_p50_ms": bare["p50_ms"], "bare_p99_ms": bare["p99_ms"]}
    ratio = {"routed_over_gateway_cpu": round(routed["cpu_ms"] / gateway["cpu_ms"], 3)}
    return BenchResult(name="routing", metrics=metrics, reference=reference, ratio=ratio, machine=machine())


def _measure(serving: Serving) -> dict[str, float]:
    measure_load(serving, concurrency=1, stream=False, calls=_WARM_UP)
    single = measure_load(serving, concurrency=1, stream=False, calls=_NUM_SINGLE)
    many = measure_load(serving, concurrency=CONCURRENCY, stream=False, seconds=_SECONDS)
    return {"p50_ms": single.p50_ms, "p99_ms": single.p99_ms, "cpu_ms": round(1e3 / many.per_core_second, 4)}


async def _router_alone() -> tuple[float, float]:
    """CPU time of a call through the router less that of a call straight to an engine: calm, and with a full house."""
    router = make_router(NUM_ENGINES, NUM_TOKENS, NUM_TOKENS)
    straight = await _cpu_us(make_router(1, NUM_TOKENS, NUM_TOKENS).members[0].engine.generate, 1)
    calm = await _cpu_us(router.generate, 1)
    crowded = await _cpu_us(_small(router).generate, 256)
    return round(calm - straight, 1), round(crowded - straight, 1)


def _small(router: Router) -> Router:
    """Engines with so few slots that most calls wait for one."""
    for member in router.members:
        member.limit = 4.0
    return router


async def _cpu_us(generate: _Generate, at_once: int) -> float:
    """CPU time a call, microseconds; the least of three rounds."""
    found: list[float] = []
    for _ in range(3):
        began = time.process_time()
        async with anyio.create_task_group() as tasks:
            for number in range(at_once):
                tasks.start_soon(_calls, generate, number, _NUM_DIRECT // at_once)
        found.append((time.process_time() - began) / (_NUM_DIRECT // at_once * at_once) * 1e6)
    return min(found)


async def _calls(generate: _Generate, number: int, count: int) -> None:
    settings = SamplingSettings(max_new_tokens=NUM_TOKENS)
    prompt = np.arange(64, dtype=np.int32)
    for call in range(count):
        request = GenerateRequest(
            request_id=f"{number}-{call}", prompt_ids=prompt, settings=settings, min_version=1, session=f"s{number}"
        )
        async for _ in generate(request):
            await anyio.lowlevel.checkpoint()
