"""What the probes saw. Plain data, without judgement; never a credential's value."""

from __future__ import annotations

import msgspec


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as this process may use it."""

    num_cores: int
    """Cores that this process may run on, a container's quota taken into account."""
    memory_bytes: int
    """The smaller of the machine's memory and a container's limit."""
    available_bytes: int
    place: str
    """The folder whose disk was looked at: the run's, or the nearest one above it that exists."""
    writable: bool
    free_disk_bytes: int
    max_open_files: int
    unix_time_s: float
    file_time_offset_s: float
    """The file system's clock less this machine's, seen on a file written just now."""
    clock_synchronized: bool | None
    """What the kernel says; None where it says nothing."""


class PackageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One requirement of the installation."""

    name: str
    needed: str
    """The range, as in pyproject.toml; empty: any."""
    found: str
    """Its version; empty: not installed."""
    fits: bool
    extra: str = ""
    """The extra that wants it; empty: the base install."""


class PortFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A port that the config fixes."""

    key: str
    """Where the config sets it."""
    host: str
    port: int
    error: str
    """Why it can't be bound; empty: it is free."""


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a process with torch in it said."""

    version: str = ""
    """Empty: not installed, or it can't be imported."""
    cuda: str = ""
    """The CUDA version that torch was built for; empty: a CPU build."""
    devices: list[str] = []
    """Names of the GPUs that torch can use."""
    config_error: str = ""
    """What the checks that need torch found wrong in the config."""
    error: str = ""
    """Why the process said nothing."""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A server that the config names."""

    key: str
    url: str
    """Without user and password."""
    version: str = ""
    error: str = ""
    """Why it can't be used; empty: it answered."""


class CredentialFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A credential's place: an environment variable or a file. Never its value."""

    key: str
    place: str
    present: bool
    open_to_others: bool = False
    """A file that other users may read."""
