"""The run's model folder of version 0: the configured one, or the built-in tiny policy, made and warmed up once.

The warm-up's conversations are tasks of the same kinds as the run's own, drawn with another seed. Knows the local Arena's
tasks; imports torch only when something must be made.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from ops.arena.config import StreamSpec
from ops.arena.tasks import TaskSource
from ops.config import RunConfig
from ops.local_arena import local_arena_config
from ops.run_folder import RunFolder
from schemas.config import EngineKind
from schemas.errors import ConfigError
from stages.policy.byte_level import write_tokenizer_files
from stages.policy.demonstrations import Task, mixed_conversations, right_conversations

_SEED_OFFSET: Final = 1_000_003
_LINK: Final = "policy.json"
_HASHED_BYTES: Final = 1 << 20
_RIGHT_SHARE: Final = 0.7
"""Right answers among the mixed ones, as a share of the target: below 1, so that the target is reached."""


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    digest: str = ""


def policy_folder(config: RunConfig, folder: RunFolder) -> str:
    """The model folder of version 0, which `prepare_policy` made or checked.

    Raises:
        ConfigError: it was not prepared.
    """
    if config.policy.folder:
        return config.policy.folder
    try:
        return msgspec.json.decode((folder.path / _LINK).read_bytes(), type=_Made).folder
    except OSError as error:
        raise ConfigError(f"policy: {folder.path} has no prepared policy; start the run with `headrace run`") from error


def prepared_digest(folder: RunFolder) -> str:
    """The digest of version 0's weight files, as `prepare_policy` found them; empty where there are none."""
    try:
        return msgspec.json.decode((folder.path / _LINK).read_bytes(), type=_Made).digest
    except OSError:
        return ""


def weights_digest(model_folder: str | Path) -> str:
    """One digest of all weight files in a model folder, their names and bytes; empty without any."""
    hasher = xxhash.xxh3_128()
    files = sorted(Path(model_folder).glob("*.safetensors"))
    for file in files:
        hasher.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_HASHED_BYTES):
                hasher.update(chunk)
    return hasher.hexdigest() if files else ""


def prepare_policy(config: RunConfig, folder: RunFolder) -> str:
    """Make the built-in policy, or check the configured folder; its path.

    Raises:
        ConfigError: the folder is no model folder.
    """
    made = _model_folder(config, folder)
    link = msgspec.json.encode(_Made(folder=made, digest=weights_digest(made)))
    (folder.path / _LINK).write_bytes(link)
    return made


def _model_folder(config: RunConfig, folder: RunFolder) -> str:
    if config.policy.folder:
        missing = [
            name
            for name in ("config.json", "tokenizer.json", "model.safetensors")
            if not (Path(config.policy.folder) / name).is_file()
        ]
        if missing:
            raise ConfigError(
                f"policy.folder: {config.policy.folder} lacks {', '.join(missing)}: expected a HF model folder"
            )
        return config.policy.folder
    if config.engine.kind is EngineKind.SCRIPTED and config.training.backend == "standin":
        write_tokenizer_files(folder.policy, max_context=config.rollout.max_context_tokens)
        return str(folder.policy)
    import torch  # noqa: PLC0415 - only where something is made

    from stages.policy.tiny import PolicySpec  # noqa: PLC0415 - same
    from stages.policy.warmup import WarmUpSettings, warm_policy_folder  # noqa: PLC0415

    torch.set_num_threads(1)  # whoever makes it, a start or a replay: the same bits
    policy = config.policy
    spec = PolicySpec(
        hidden_size=policy.hidden_size,
        intermediate_size=2 * policy.hidden_size,
        num_layers=policy.num_layers,
        num_heads=policy.num_heads,
        num_kv_heads=max(1, policy.num_heads // 2),
        max_context=config.rollout.max_context_tokens,
        seed=policy.seed + config.run.seed,
    )
    streams = local_arena_config(config).streams
    lessons = _tasks(streams, policy.warmup_conversations, _SEED_OFFSET)
    share = _RIGHT_SHARE * policy.warmup_target
    with _one_at_a_time(cache_folder()) as cache:
        return str(
            warm_policy_folder(
                cache,
                spec,
                WarmUpSettings(target=policy.warmup_target, max_updates=policy.warmup_max_updates, seed=spec.seed),
                right_conversations(lessons),
                mixed_conversations(lessons, right_share=share, seed=spec.seed),
                right_conversations(_tasks(streams, 64, 2 * _SEED_OFFSET)),
            )
        )


@contextmanager
def _one_at_a_time(cache: Path) -> Generator[Path]:
    """Several nodes on one machine make the same policy once: the others wait for it."""
    with (cache / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield cache


def cache_folder() -> Path:
    """Where prepared policies are kept for later runs: $HEADRACE_CACHE, else ~/.cache/headrace."""
    base = os.environ.get("HEADRACE_CACHE") or str(Path.home() / ".cache" / "headrace")
    path = Path(base) / "policies"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _tasks(streams: tuple[StreamSpec, ...], per_stream: int, seed_offset: int) -> list[Task]:
    """Tasks with their right answers, `per_stream` of each stream."""
    tasks: list[Task] = []
    for stream in streams:
        source = TaskSource(msgspec.structs.replace(stream, size=per_stream, seed=stream.seed + seed_offset))
        for data_id in source.data_ids:
            texts = source.texts(data_id)
            tasks.append(Task(turns=texts.turns, answer=texts.answer.lower() if stream.lowercase else texts.answer))
    return tasks
