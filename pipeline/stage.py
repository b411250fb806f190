"""A stage: a plain async function from one message to the messages that follow from it.

    @stage(consumes=GROUP_ISSUED, produces=(EPISODE_REQUESTED,))
    async def fan_out(issued: GroupIssued) -> list[EpisodeRequested]: ...

It is called as such in its tests. Delivery, retry, metrics and publishing are the runner's (`pipeline.runner`); ports
are given by keyword with `bind`. This module must not know brokers or clocks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

import msgspec

from pipeline.delivery import RetryPolicy
from schemas.subjects import Topic

M = TypeVar("M", bound=msgspec.Struct)
P = ParamSpec("P")
Outputs = Sequence[msgspec.Struct]
AnyTopic = Topic[Any]  # Any: Topic is invariant in its message; a list of topics only encodes and decodes
GaveUp = Callable[[M, str], Outputs]
"""What follows when a message is given up: it and the reason → messages, so that nobody waits for it in vain."""


class StageDefinition(Generic[M, P]):
    """What `@stage` declares. Call it like the function it wraps; `bind` it to run it."""

    def __init__(
        self,
        function: Callable[Concatenate[M, P], Awaitable[Outputs]],
        *,
        name: str,
        consumes: Topic[M],
        produces: tuple[AnyTopic, ...],
        policy: RetryPolicy,
        concurrency: int,
        gave_up: GaveUp[M] | None,
    ) -> None:
        self.function: Final = function
        self.name: Final = name
        self.consumes: Final = consumes
        self.produces: Final = produces
        self.policy: Final = policy
        self.concurrency: Final = concurrency
        self.gave_up: Final = gave_up
        functools.update_wrapper(self, function)

    async def __call__(self, message: M, *args: P.args, **ports: P.kwargs) -> Outputs:
        """The plain function."""
        return await self.function(message, *args, **ports)


class BoundStage(msgspec.Struct, Generic[M], frozen=True, kw_only=True):
    """A stage with its ports: what the runner runs."""

    name: str
    consumes: Topic[M]
    topics: Mapping[type[msgspec.Struct], AnyTopic]
    """Message type → the topic it goes to."""
    handle: Callable[[M], Awaitable[Outputs]]
    policy: RetryPolicy
    concurrency: int
    gave_up: GaveUp[M] | None = None


def stage(
    *,
    consumes: Topic[M],
    produces: tuple[AnyTopic, ...] = (),
    policy: RetryPolicy | None = None,
    concurrency: int = 64,
    gave_up: GaveUp[M] | None = None,
) -> Callable[[Callable[Concatenate[M, P], Awaitable[Outputs]]], StageDefinition[M, P]]:
    """Declare an async function as a stage.

    Args:
        consumes: the one topic whose messages it is called with.
        produces: the topics of the messages it may return; another type is an error of the stage.
        policy: retries of this stage.
        concurrency: how many messages one worker handles at once.
        gave_up: messages that follow when one of its inputs is given up.
    """

    def declare(function: Callable[Concatenate[M, P], Awaitable[Outputs]]) -> StageDefinition[M, P]:
        if len({topic.message for topic in produces}) != len(produces):
            raise TypeError(f"stage {function.__name__}: two of its topics carry the same message type")
        return StageDefinition(
            function,
            name=function.__name__,
            consumes=consumes,
            produces=produces,
            policy=policy or RetryPolicy(),
            concurrency=concurrency,
            gave_up=gave_up,
        )

    return declare


def bind(definition: StageDefinition[M, P], *args: P.args, **ports: P.kwargs) -> BoundStage[M]:
    """Give a stage its ports, checked by the type checker and again here.

    Raises:
        TypeError: a port is missing or unknown.
    """
    signature = inspect.signature(definition.function)
    try:
        signature.bind(None, *args, **ports)
    except TypeError as error:
        raise TypeError(f"stage {definition.name}: {error}; it takes {signature}") from error

    def handle(message: M) -> Awaitable[Outputs]:
        return definition.function(message, *args, **ports)

    return BoundStage(
        name=definition.name,
        consumes=definition.consumes,
        topics={topic.message: topic for topic in definition.produces},
        handle=handle,
        policy=definition.policy,
        concurrency=definition.concurrency,
        gave_up=definition.gave_up,
    )
