"""Keys that a run makes for itself, kept in its folder for its owner only and given to workers by environment."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

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

    def __repr__(self) -> str:
        return "RunSecrets(…)"


def run_secrets(folder: Path) -> RunSecrets:
    """The keys of a run's folder, made when missing (mode 0600). A control key in the environment goes before the folder's:
    services that open sessions are told it beforehand.
    """
    made = _standing(folder / _FILE)
    chosen = os.environ.get(CONTROL_KEY_ENV, "")
    return msgspec.structs.replace(made, control_key=chosen) if chosen else made


def _standing(path: Path) -> RunSecrets:
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=RunSecrets)
    made = RunSecrets(
        generation_key=secrets.token_urlsafe(32),
        control_key=secrets.token_urlsafe(32),
        arena_token=secrets.token_urlsafe(32),
        arena_llm_api_key=secrets.token_urlsafe(32),
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(made))
    return made
