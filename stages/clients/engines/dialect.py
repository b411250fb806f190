"""What differs between kinds of servers: paths, bodies, events, and the calls of a weight swap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from schemas.messages.rollout import FinishReason
from stages.clients.engines.http import Server
from stages.clients.engines.labels import VersionSpan
from stages.ports import EngineUnavailableError, GenerateRequest, SwapMode

T = TypeVar("T")
_NO_NUMBER: Final = -9000.0
"""vLLM writes -9999 where a log-prob is no number, as the ones of NaN weights."""
_START_LABEL: Final = "default"
"""What both servers call the weights that they were started with."""


class Event(msgspec.Struct, frozen=True):
    """What one event of a stream tells."""

    ids: list[int]
    """New ones only."""
    logprobs: list[float]
    version: int | None = None
    """These tokens and all before were sampled by this version or older ones; None: the server must be asked."""
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    spans: list[VersionSpan] | None = None
    """With a finish: the versions of the whole answer."""


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself."""

    version: int
    max_context: int
    model_folder: str
    """As the server's machine sees it."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a server is, with requests of whoever."""

    version: int
    num_running: int
    num_waiting: int


class Dialect(Protocol):
    """How one kind of server is spoken to. All calls raise the port's errors."""

    @property
    def generate_path(self) -> str: ...

    def generate_body(self, request: GenerateRequest, request_id: str, cache_salt: str) -> dict[str, object]:
        """Args:
        request: what is asked, ids and settings checked.
        request_id: unique at the server.
        cache_salt: prefixes are shared among requests of the same salt only.
        """
        ...

    def read(self, event: bytes, num_before: int) -> Event:
        """Read one event; `num_before` tokens came before."""
        ...

    async def info(self, server: Server) -> ServerInfo: ...
    async def version(self, server: Server) -> int: ...
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


def version_of(label: str, initial_version: int) -> int:
    """A server's label as a version.

    Raises:
        EngineUnavailableError: Something else than headrace has labelled the weights.
    """
    if label == _START_LABEL:
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
