"""Keys that a run makes for itself, kept in its folder for its owner only and given to workers by environment."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

from schemas.errors import ConfigError

_FILE: Final = "secrets.json"
GENERATION_KEY_ENV: Final = "HEADRACE_GENERATION_KEY"
CONTROL_KEY_ENV: Final = "HEADRACE_CONTROL_KEY"


class RunSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """Made once per run."""

    generation_key: str
    """The gateway's key that only generates; registered with an Arena."""
    control_key: str
    """Opens, rewards and ends online sessions over HTTP."""
    arena_token: str
    """Control plane of the local Arena."""
    arena_llm_api_key: str
    """Model gateway of the local Arena."""
    broker_token: str = ""
    """The NATS servers that the nodes of a topology run."""

    def __repr__(self) -> str:
        return "RunSecrets(…)"


def run_secrets(folder: Path, file: Path | None = None, *, may_make: bool = True) -> RunSecrets:
    """The keys of a run's folder, or of a file that several nodes share, made when missing (mode 0600). A control key in the
    environment goes before the file's: services that open sessions are told it beforehand.

    Raises:
        ConfigError: the file is missing and may not be made here, or is no such file.
    """
    made = _standing(file or folder / _FILE, may_make=may_make)
    chosen = os.environ.get(CONTROL_KEY_ENV, "")
    return msgspec.structs.replace(made, control_key=chosen) if chosen else made


def secrets_digest(secrets: RunSecrets) -> bytes:
    """Tells whether two nodes have the same keys, and nothing else about them."""
    return hashlib.sha256(msgspec.json.encode(secrets)).digest()


def make_secrets(file: Path) -> bool:
    """Make a file of keys; False where one stands.

    Raises:
        ConfigError: something else stands there.
    """
    stood = file.is_file()
    _standing(file, may_make=True)
    return not stood


def _standing(path: Path, *, may_make: bool) -> RunSecrets:
    if path.is_file():
        try:
            return msgspec.json.decode(path.read_bytes(), type=RunSecrets)
        except msgspec.DecodeError:
            raise ConfigError(f"{path}: expected the keys that `headrace up` made on the control node") from None
    if not may_make:
        raise ConfigError(
            f"{path}: expected a copy of the control node's secrets file, found none: start that node first, then copy it "
            "(mode 0600)"
        )
    made = RunSecrets(
        generation_key=secrets.token_urlsafe(32),
        control_key=secrets.token_urlsafe(32),
        arena_token=secrets.token_urlsafe(32),
        arena_llm_api_key=secrets.token_urlsafe(32),
        broker_token=secrets.token_urlsafe(32),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(made))
    part.replace(path)
    return made
