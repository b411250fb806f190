"""Which engines a run has, and how each server is started. Decides only; looks for interpreters, starts nothing."""

from __future__ import annotations

import shutil
from typing import Final
from urllib.parse import urlsplit

import msgspec

from ops.engines.commands import SERVER_KINDS, ServerSettings
from ops.engines.cpu_environment import CpuEnvironment, CpuEnvironmentError, cpu_environment
from schemas.config import EngineKind, EngineSection
from schemas.config_training import LoraSection
from schemas.errors import ConfigError

MODEL_NAME: Final = "policy"


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a run."""

    name: str
    kind: EngineKind
    slot: int = 0
    """Place among the started ones: decides port and GPUs."""
    url: str = ""
    """A server that runs already; empty: it is started."""

    @property
    def attached(self) -> bool:
        """Whether its server is somebody else's."""
        return bool(self.url)


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a person says of the one engine that a worker is to look after."""

    name: str = ""
    kind: str = ""
    url: str = ""
    slot: int = 0


def chosen_engine(choice: EngineChoice | None, section: EngineSection) -> EnginePlan:
    """The engine of a worker.

    Raises:
        ConfigError: a kind that is no server's.
    """
    choice = choice or EngineChoice()
    kind = choice.kind or section.kind.value
    if kind not in [one.value for one in SERVER_KINDS]:
        raise ConfigError(
            f"worker engine: expected --kind {' or '.join(SERVER_KINDS)}, found {kind!r} "
            f"(the run's engine.kind is {section.kind.value})"
        )
    name = choice.name or (attached_name(choice.url) if choice.url else f"engine-{choice.slot}")
    return EnginePlan(name=name, kind=EngineKind(kind), slot=choice.slot, url=choice.url.rstrip("/"))


def has_servers(section: EngineSection) -> bool:
    """Whether the run samples from servers, through the router."""
    return section.kind in SERVER_KINDS


def num_started(section: EngineSection) -> int:
    """Servers that the run starts itself."""
    if not has_servers(section):
        return 0
    return section.count if section.count is not None else 0 if section.urls else 1


def engine_plans(section: EngineSection) -> list[EnginePlan]:
    """The engines that the config names, in the order of their start."""
    if not has_servers(section):
        return []
    started = [EnginePlan(name=f"engine-{slot}", kind=section.kind, slot=slot) for slot in range(num_started(section))]
    attached = [EnginePlan(name=attached_name(url), kind=section.kind, url=url) for url in section.urls]
    return [*started, *attached]


def attached_name(url: str) -> str:
    """How a server is called that brings no name."""
    place = urlsplit(url)
    return f"{place.hostname or 'engine'}-{place.port or (443 if place.scheme == 'https' else 80)}"


def can_sleep(section: EngineSection) -> bool:
    """Whether servers are started so that they can give up their memory: where it is an accelerator's that a trainer shares."""
    return section.time_shared and section.device == "cuda"


def gpus_of(section: EngineSection, slot: int) -> tuple[str, ...]:
    """The devices of a started server."""
    if not section.gpus:
        return ()
    first = slot * section.gpus_per_engine
    return tuple(section.gpus[first : first + section.gpus_per_engine])


def server_environment(section: EngineSection) -> CpuEnvironment:
    """Interpreter of the servers, and the stubs that SGLang needs on CPUs; both empty where a command of one's own starts them.

    Raises:
        ConfigError: the interpreter is not there, or the CPU environment was not made.
    """
    if section.command:
        return CpuEnvironment(python="", stubs="")
    if section.python:
        if shutil.which(section.python) is None:
            raise ConfigError(f"engine.python: expected an interpreter, found nothing to run at {section.python}")
        return CpuEnvironment(python=section.python, stubs="")
    try:
        return cpu_environment()
    except CpuEnvironmentError as error:
        raise ConfigError(f"engine.python is not set: {error}") from error


def server_settings(
    section: EngineSection,
    plan: EnginePlan,
    *,
    model: str,
    max_context: int,
    port: int,
    api_key: str,
    lora: LoraSection | None = None,
) -> ServerSettings:
    """How one server is started.

    Args:
        lora: the adapters that it is to take; None: it gets whole weights.

    Raises:
        ConfigError: see `server_environment`.
    """
    environment = server_environment(section)
    return ServerSettings(
        model=model,
        port=port,
        host=section.host,
        served_model_name=MODEL_NAME,
        python=environment.python,
        launcher=tuple(section.command),
        device=section.device,
        gpu_ids=gpus_of(section, plan.slot),
        dtype=section.dtype or ("float32" if section.device == "cpu" else "bfloat16"),
        max_context=max_context,
        max_running_requests=section.max_running_requests,
        kv_cache_bytes=section.kv_cache_bytes,
        kv_cache_tokens=section.kv_cache_tokens,
        threads=section.threads,
        stubs=environment.stubs,
        api_key=api_key,
        adapter_rank=0 if lora is None else lora.rank,
        adapter_targets=() if lora is None else lora.targets,
        can_sleep=can_sleep(section),
        extra_args=tuple(section.args),
        extra_env=dict(section.env),
    )


def check_engine(section: EngineSection) -> None:
    """What no single key can say.

    Raises:
        ConfigError: keys that contradict each other or can't work.
    """
    if not has_servers(section):
        for key in ("count", "urls", "python", "command", "args", "gpus", "ports"):
            if getattr(section, key):
                raise ConfigError(
                    f"engine.{key}: is for servers, and engine.kind = {section.kind.value} has none: expected engine.kind = "
                    f"{' or '.join(SERVER_KINDS)}, or no engine.{key}"
                )
        return
    _check_servers(section)
    _check_gpus(section)


def _check_servers(section: EngineSection) -> None:
    started = num_started(section)
    if section.count is not None and section.count < 0:
        raise ConfigError(f"engine.count: expected at least 0, found {section.count}")
    for url in section.urls:
        place = urlsplit(url)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise ConfigError(f"engine.urls: expected http://host:port, found {url!r}")
        if place.username or place.password:
            raise ConfigError(
                f"engine.urls: {place.hostname}: a key goes into the variable that engine.api_key_env names"
            )
    if len({attached_name(url) for url in section.urls}) < len(section.urls):
        raise ConfigError("engine.urls: expected each server once")
    if section.ports and len(section.ports) < started:
        raise ConfigError(f"engine.ports: expected one for each of {started} servers, found {len(section.ports)}")
    if len(set(section.ports)) < len(section.ports) or any(not 0 < port < 65536 for port in section.ports):
        raise ConfigError(f"engine.ports: expected different ports in 1..65535, found {section.ports}")
    for key in ("max_running_requests", "threads", "gpus_per_engine", "max_failed_starts", "kv_cache_bytes"):
        if getattr(section, key) < 1:
            raise ConfigError(f"engine.{key}: expected at least 1, found {getattr(section, key)}")
    for key in ("start_timeout_s", "wait_deadline_s"):
        if getattr(section, key) <= 0:
            raise ConfigError(f"engine.{key}: expected more than 0 seconds, found {getattr(section, key)}")


def _check_gpus(section: EngineSection) -> None:
    if section.device not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: expected cpu or cuda, found {section.device!r}")
    if section.device == "cuda" and num_started(section) and not section.python and not section.command:
        raise ConfigError(
            'engine.device = "cuda": expected engine.python (an interpreter with the server installed) or engine.command'
        )
    if section.device == "cpu" and section.gpus:
        raise ConfigError('engine.gpus: found ids with engine.device = "cpu"; expected engine.device = "cuda"')
    needed = num_started(section) * section.gpus_per_engine
    if section.gpus and len(section.gpus) < needed:
        raise ConfigError(
            f"engine.gpus: expected {needed} ids for {num_started(section)} engines of {section.gpus_per_engine}, "
            f"found {len(section.gpus)}"
        )
    if len(set(section.gpus)) < len(section.gpus):
        raise ConfigError(f"engine.gpus: expected different ids, found {', '.join(section.gpus)}")
