"""`headrace publish prompts`: rows of a source become prompts of a stream, each created once.

    rows ──checked, with line numbers──▶ prompts ──(rate)──▶ prompt.published.<stream>.<id>, many in flight

The same file twice publishes nothing new. An interrupted command goes on where it was: its position is kept beside the
log, and what stands already is met by its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from broker.api import Broker
from broker.errors import BrokerError
from ops.logtools.prompts import Prompt
from pipeline.log import RunPayloads
from schemas.ids import encode_token
from schemas.messages.sampling import PromptPublished, StreamListed, StreamRow
from schemas.payload import PayloadRef
from schemas.topics import PROMPT_PUBLISHED, STREAM_LISTED

_IN_FLIGHT: Final = 64
_SAVE_EVERY: Final = 1000


class PromptConflictError(BrokerError):
    """Another prompt stands under a row's id."""


class PublishSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are published."""

    stream: str
    tags: tuple[str, ...] = ()
    """Added to each row's own."""
    per_second: float = 0.0
    """0 = as fast as the broker takes them."""
    list_stream: bool = False
    """Then list the stream with these rows, which closes it: sampling draws from listed streams."""
    weight: float = 1.0
    """Sampling weight of a stream that is listed."""


class PublishFigures(msgspec.Struct, kw_only=True):
    """What was done so far."""

    rows: int = 0
    published: int = 0
    standing: int = 0
    """Rows that were published before, the same."""
    skipped: int = 0
    """Rows that the position of an interrupted command says are done."""
    listed: bool = False
    left_out: dict[str, int] = {}
    """Fields that no prompt has → rows that had them."""


class _Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far a source is published: kept as a last value beside the log."""

    source: str
    rows: int


class Publishing:
    """One source into one stream."""

    def __init__(self, broker: Broker, settings: PublishSettings, *, source: str = "") -> None:
        """Args:
        source: identifies the source's content, so that an interrupted command can go on; empty = it can't.
        """
        self.figures: Final = PublishFigures()
        self._broker: Final = broker
        self._payloads: Final = RunPayloads(broker)
        self._settings: Final = settings
        self._source: Final = source
        self._done: Final[set[int]] = set()
        self._contiguous = 0
        self._rows: Final[list[tuple[int, StreamRow]]] = []

    async def run(self, prompts: Iterable[Prompt], *, on_row: Callable[[], None] | None = None) -> PublishFigures:
        """Publish all prompts, and list the stream if that was asked for.

        Raises:
            PromptConflictError: another prompt stands under a row's id.
            RowError: from `prompts`, where they are checked on the way.
        """
        start = 0 if self._settings.list_stream else await self._load_position()
        send, receive = anyio.create_memory_object_stream[tuple[int, Prompt]](max_buffer_size=_IN_FLIGHT)
        async with anyio.create_task_group() as tasks:
            for _ in range(_IN_FLIGHT):
                tasks.start_soon(self._publish_all, receive.clone(), on_row)
            receive.close()
            async with send:
                await self._feed(iter(prompts), start, send, on_row)
        if self._settings.list_stream:
            await self._list()
        await self.save_position()
        return self.figures

    async def _feed(
        self,
        prompts: Iterator[Prompt],
        start: int,
        send: anyio.abc.ObjectSendStream[tuple[int, Prompt]],
        on_row: Callable[[], None] | None,
    ) -> None:
        due_s = anyio.current_time()
        number = 0
        while (prompt := await anyio.to_thread.run_sync(next, prompts, None)) is not None:
            self.figures.rows += 1
            if number < start:
                self.figures.skipped += 1
                self._settle(number)
                if on_row is not None:
                    on_row()
            else:
                if self._settings.per_second > 0:
                    await anyio.sleep(max(0.0, due_s - anyio.current_time()))
                    due_s = max(due_s, anyio.current_time() - 1.0) + 1.0 / self._settings.per_second
                await send.send((number, prompt))
            number += 1

    async def _publish_all(
        self, receive: anyio.abc.ObjectReceiveStream[tuple[int, Prompt]], on_row: Callable[[], None] | None
    ) -> None:
        async with receive:
            async for number, prompt in receive:
                await self._publish(number, prompt)
                self._settle(number)
                if on_row is not None:
                    on_row()
                if self._contiguous and self._contiguous % _SAVE_EVERY == 0:
                    await self.save_position()

    async def _publish(self, number: int, prompt: Prompt) -> None:
        ref = await self._payloads.hold(prompt.prompt)
        message = PromptPublished(
            stream=self._settings.stream,
            data_id=prompt.data_id,
            prompt=ref,
            tags=[*prompt.tags, *self._settings.tags],
        )
        subject = PROMPT_PUBLISHED.subject(self._broker.run, message)
        done = await self._broker.publish(subject, PROMPT_PUBLISHED.encode(message))
        if done.standing is not None and not _same(PROMPT_PUBLISHED.decode(done.standing), message):
            raise PromptConflictError(
                f"{prompt.place}: another prompt stands under the id {prompt.data_id!r} of stream "
                f"{self._settings.stream!r} (sequence {done.sequence}): give the row another id"
            )
        if done.created:
            self.figures.published += 1
        else:
            self.figures.standing += 1
        if self._settings.list_stream:
            listed = await self._payloads.put(prompt.prompt)
            self._rows.append((number, StreamRow(data_id=prompt.data_id, tags=message.tags, payload=listed)))

    def _settle(self, number: int) -> None:
        self._done.add(number)
        while self._contiguous in self._done:
            self._done.discard(self._contiguous)
            self._contiguous += 1

    async def _list(self) -> None:
        rows: dict[str, StreamRow] = {}
        for _, row in sorted(self._rows, key=lambda pair: pair[0]):
            rows.setdefault(row.data_id, row)
        ref: PayloadRef = await self._payloads.put(msgspec.msgpack.encode(list(rows.values())))
        message = StreamListed(stream=self._settings.stream, rows=ref, num_rows=len(rows), weight=self._settings.weight)
        subject = STREAM_LISTED.subject(self._broker.run, message)
        done = await self._broker.publish(subject, STREAM_LISTED.encode(message))
        if done.standing is not None:
            raise PromptConflictError(
                f"stream {self._settings.stream!r} is listed already with other rows or another weight (sequence "
                f"{done.sequence}): a stream is listed once for a run; choose another name"
            )
        self.figures.listed = True

    @property
    def _key(self) -> str:
        return f"publish.{encode_token(self._settings.stream)}.{self._source}"

    async def _load_position(self) -> int:
        if not self._source:
            return 0
        found = await self._broker.load_state(self._key)
        return 0 if found is None else msgspec.msgpack.decode(found[0], type=_Position).rows

    async def save_position(self) -> None:
        """Keep how far everything is published, for a command that goes on later."""
        if self._source:
            position = _Position(source=self._source, rows=self._contiguous)
            await self._broker.save_state(self._key, msgspec.msgpack.encode(position))


def _same(standing: PromptPublished, wanted: PromptPublished) -> bool:
    """Whether two messages publish the same prompt: where its bytes ride does not matter."""
    return (standing.prompt.id, standing.tags) == (wanted.prompt.id, wanted.tags)
