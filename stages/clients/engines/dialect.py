"""What differs between kinds of servers: paths, bodies, events, and the calls of a weight swap."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from schemas.messages.rollout import FinishReason
from stages.clients.engines.http import Server
from stages.clients.engines.labels import VersionSpan
from stages.ports import EngineUnavailableError, GenerateRequest, SwapMode
from stages.weight_files.adapter_layout import AdapterLimits

T = TypeVar("T")
_NO_NUMBER: Final = -9000.0
"""vLLM writes -9999 where a log-prob is no number, as the ones of NaN weights."""
_ADAPTER_NAME: Final = "lora"
_START_LABEL: Final = "default"
"""What both servers call the weights that they were started with."""


class Event(msgspec.Struct, frozen=True):
    """What one event of a stream tells."""

    ids: list[int]
    """New ones only."""
    logprobs: list[float]
    version: int | None = None
    """These tokens and all before were sampled by this version of whole weights or older ones; None: the server must be asked.
    """
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    spans: list[VersionSpan] | None = None
    """With a finish: the versions of whole weights that sampled the answer. An answer that was asked of an adapter is all of the
    adapter's version, whatever the server says.
    """


class Served(msgspec.Struct, frozen=True):
    """What new requests are to be sampled with."""

    version: int
    adapter: str = ""
    """Name at the server of the LoRA adapter of this version; empty: whole weights."""

    @property
    def label(self) -> str:
        """As the server is told."""
        return self.adapter or str(self.version)

    @property
    def cache_salt(self) -> str:
        """Prefixes are shared among requests of the same weights only."""
        return self.adapter or f"w{self.version}"


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself."""

    served: Served
    max_context: int
    model_folder: str
    """As the server's machine sees it."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a server is, with requests of whoever."""

    served: Served
    num_running: int
    num_waiting: int


class Dialect(Protocol):
    """How one kind of server is spoken to. All calls raise the port's errors."""

    @property
    def generate_path(self) -> str: ...

    def generate_body(self, request: GenerateRequest, request_id: str, served: Served) -> dict[str, object]:
        """Args:
        request: what is asked, ids and settings checked.
        request_id: unique at the server.
        served: what is to sample it.
        """
        ...

    def read(self, event: bytes, num_before: int) -> Event:
        """Read one event; `num_before` tokens came before."""
        ...

    async def info(self, server: Server) -> ServerInfo: ...
    async def served(self, server: Server) -> Served: ...
    async def label(self, server: Server, served: Served) -> None: ...
    async def load(self, server: Server) -> Load: ...
    async def abort(self, server: Server, request_id: str) -> None: ...
    async def pause(self, server: Server) -> None: ...
    async def resume(self, server: Server) -> None: ...
    async def sleep(self, server: Server) -> None: ...
    async def wake(self, server: Server) -> None: ...

    async def check_swaps(self, server: Server) -> None:
        """Whether this server can take new weights at all.

        Raises:
            WeightsRefusedError: It would serve a mixture of old and new ones.
        """
        ...

    async def hold(self, server: Server, mode: SwapMode, drain_timeout_s: float) -> None:
        """Stop sampling, as a swap in this mode wants it; `resume` ends it.

        Raises:
            TimeoutError: Running requests did not end in time; sampling goes on.
        """
        ...

    async def swap(self, server: Server, directory: str, version: int, mode: SwapMode, timeout_s: float) -> None:
        """Load a folder's weights into a server on hold and label them; nothing cached before is used for new requests."""
        ...

    async def adapter_limits(self, server: Server) -> AdapterLimits:
        """Which adapters this server takes.

        Raises:
            WeightsRefusedError: None: it was not started for them.
        """
        ...

    async def adapters(self, server: Server) -> list[str]:
        """Names of the adapters that requests may ask for."""
        ...

    async def load_adapter(self, server: Server, name: str, directory: str, timeout_s: float) -> None:
        """Make an adapter known under a name; nothing else changes."""
        ...

    async def drop_adapter(self, server: Server, name: str, wait_s: float | None) -> None:
        """Forget an adapter after the requests that run with it.

        Args:
        wait_s: the longest that they may take; None: there are none.

        Raises:
            TimeoutError: They take longer.
        """
        ...


def adapter_name(version: int) -> str:
    """A name that no other load of a version has: prefixes are cached under it, and it is the server's label."""
    return f"{_ADAPTER_NAME}-{version}-{secrets.token_hex(4)}"


def is_adapter_name(name: str) -> bool:
    """Whether `adapter_name` made it."""
    kind, _, rest = name.partition("-")
    version, _, tag = rest.partition("-")
    return kind == _ADAPTER_NAME and version.isascii() and version.isdigit() and bool(tag)


def adapter_version(name: str) -> int:
    """The version of an adapter by its name."""
    return int(name.split("-")[1])


def served_of(label: str, initial_version: int) -> Served:
    """What a server's label says is served.

    Raises:
        EngineUnavailableError: Something else than headrace has labelled the weights.
    """
    if is_adapter_name(label):
        return Served(adapter_version(label), label)
    return Served(version_of(label, initial_version))


def version_of(label: str, initial_version: int) -> int:
    """A server's label as the version of the whole weights in it: adapters lie on those that it started with.

    Raises:
        EngineUnavailableError: Something else than headrace has labelled the weights.
    """
    if label == _START_LABEL or is_adapter_name(label):
        return initial_version
    if not (label.isascii() and label.isdigit()):
        raise EngineUnavailableError(f"expected a number as the weights' version, found {label[:40]!r}")
    return int(label)


def finite(logprobs: Sequence[float | None]) -> list[float]:
    """Log-probs that are numbers.

    Raises:
        EngineUnavailableError: One is none: the engine is at fault.
    """
    found = [value for value in logprobs if value is not None and math.isfinite(value) and value > _NO_NUMBER]
    if len(found) != len(logprobs):
        raise EngineUnavailableError(
            f"{len(logprobs) - len(found)} of {len(logprobs)} log-probs are no numbers: the engine's weights are damaged"
        )
    return found


def decode(answer: bytes, kind: type[T]) -> T:
    """An answer's body.

    Raises:
        EngineUnavailableError: It is something else: the server is not of the kind or version that is expected.
    """
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineUnavailableError(
            f"expected {kind.__name__.strip('_')} from the server, found {answer[:120]!r}: {error}"
        ) from error
