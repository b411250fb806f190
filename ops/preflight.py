"""Preflight of a config: its Arena is asked everything that could stop a run, and no task is launched.

A local Arena is started for it with keys of its own. The model gateway's key is proved by one tiny generation, which a stand-in for our
gateway answers: no policy need be loaded for that.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog
from aiohttp import web

from ops.arena.server import ArenaSecrets, serve
from ops.arena_access import LOCAL
from ops.config import RunConfig, run_streams
from ops.doctor.checks import Level, check_servers
from ops.doctor.engines import check_engines
from ops.doctor.probe import probe_gpus, probe_machine
from ops.doctor.servers import probe_http
from ops.engines.plan import has_servers
from ops.local_arena import local_arena_config
from ops.workers.preflights import KIND, marks_folder, remove_left_preflights
from ops.workers.slots import leave_mark
from schemas.config_arena import ArenaRoute, StreamRunner
from stages.clients.arena.client import ArenaAccess, ModelEndpoint, open_arena
from stages.clients.arena.preflight import PreflightReport, Problem, preflight
from stages.clients.arena.registration import Registrations, RegistrationSettings, open_registrations
from stages.clients.arena.secret import Secret, secret_from

log = structlog.get_logger("headrace.preflight")

_START_S = 60.0


async def run_preflight(config: RunConfig, *, allow_unhealthy: bool) -> PreflightReport:
    """Check all Arena streams of a config, and whether its inference servers can be started or answer.

    Raises:
        ConfigError: The config can't be used.
        ArenaConfigError: The local Arena's can't.
    """
    report = await _check_streams(config, allow_unhealthy=allow_unhealthy)
    return msgspec.structs.replace(report, problems=(*report.problems, *await _engine_problems(config)))


async def _engine_problems(config: RunConfig) -> list[Problem]:
    """What would keep the servers from starting, or does not answer."""
    machine = await anyio.to_thread.run_sync(probe_machine, Path(config.run.dir))
    gpus = await anyio.to_thread.run_sync(probe_gpus)
    findings = check_engines(config, gpus=gpus, available_bytes=machine.available_bytes)
    if has_servers(config.engine):
        findings += check_servers([await probe_http("engine.urls", url, "/health") for url in config.engine.urls])
    wrong = [finding for finding in findings if finding.level is Level.ERROR]
    return [Problem(check=finding.check, text=f"{finding.found}; {finding.fix}") for finding in wrong]


async def _check_streams(config: RunConfig, *, allow_unhealthy: bool) -> PreflightReport:
    streams = [stream for stream in run_streams(config).values() if stream.runner is StreamRunner.ARENA]
    if not streams:  # nothing is asked of an Arena that plays nothing
        return PreflightReport(streams=(), problems=(), allow_unhealthy=allow_unhealthy)
    settings = RegistrationSettings(
        run_label=f"headrace-{config.run.id}", cleanup_timeout_s=config.arena.cleanup_timeout_s
    )
    async with (
        _arena(config) as access,
        open_arena(access) as client,
        open_registrations(client, settings) as registrations,
        _standing_in(config) as endpoint,
    ):
        proved = config.arena.route is not ArenaRoute.DIRECT
        async with _marked(config, registrations) as part:
            return await preflight(
                client,
                streams,
                config.arena,
                registrations=registrations if proved else None,
                endpoint=endpoint,
                allow_unhealthy=allow_unhealthy,
                part=part,
            )


@asynccontextmanager
async def _marked(config: RunConfig, registrations: Registrations) -> AsyncGenerator[str]:
    """What tells this preflight's registration from others', kept in the run's folder while it may stand. A local Arena ends with us."""
    if config.arena.url == LOCAL:
        yield ""
        return
    folder = marks_folder(config.run.dir)
    with ExitStack() as stack:
        try:
            await remove_left_preflights(registrations, folder)
            mark = stack.enter_context(leave_mark(folder, KIND))
        except OSError as error:  # a machine that may not write there can check a config all the same
            log.warning("a preflight that is killed leaves its registration", error=str(error))
            yield ""
            return
        yield mark.part
        if not registrations.names:
            mark.forget()


@asynccontextmanager
async def _arena(config: RunConfig) -> AsyncGenerator[ArenaAccess]:
    arena = config.arena
    if arena.url != LOCAL:
        token, key = secret_from(os.environ, arena.token_env), secret_from(os.environ, arena.llm_api_key_env)
        yield _access(config, arena.url.rstrip("/"), token, key)
        return
    made = ArenaSecrets(openapi_token=secrets.token_urlsafe(32), llm_api_key=secrets.token_urlsafe(32))
    served = local_arena_config(config)
    urls: list[str] = []
    async with anyio.create_task_group() as group:
        ready = anyio.Event()

        def started(url: str) -> None:
            urls.append(url)
            ready.set()

        async def run() -> None:
            await serve(served, ready=started, secrets=made)

        group.start_soon(run)
        with anyio.fail_after(_START_S):
            await ready.wait()
        yield _access(config, urls[0], Secret(made.openapi_token), Secret(made.llm_api_key))
        group.cancel_scope.cancel()


def _access(config: RunConfig, base_url: str, token: Secret, key: Secret) -> ArenaAccess:
    return ArenaAccess(
        base_url=base_url,
        token=token,
        llm_api_key=key,
        request_timeout_s=config.arena.request_timeout_s,
        registration_timeout_s=config.arena.registration_timeout_s,
        request_retries=config.arena.request_retries,
    )


@asynccontextmanager
async def _standing_in(config: RunConfig) -> AsyncGenerator[ModelEndpoint]:
    """A chat endpoint where our gateway will be, with a key for this preflight alone."""
    key = secrets.token_urlsafe(32)

    async def chat(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": "wrong key", "type": "invalid_request_error"}}, status=401)
        message = {"role": "assistant", "content": "ok"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response({"id": "preflight", "object": "chat.completion", "choices": choices})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.gateway.host, config.gateway.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}/v1"
        yield ModelEndpoint(endpoint_id="preflight", upstream_model="preflight", base_url=url, api_key=Secret(key))
    finally:
        await runner.cleanup()
