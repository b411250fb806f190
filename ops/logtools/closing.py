"""`headrace publish close STREAM`: what was published into an open stream, by any client, becomes the rows of that stream.

    prompt.published.<stream>.* in the order of the log ──▶ one list ──▶ stream.listed.<stream>

Sampling draws from listed streams, so its plan depends on the log alone. It must not know where prompts came from.
"""

from __future__ import annotations

import msgspec

from broker.api import Broker
from broker.errors import BrokerError
from pipeline.log import RunPayloads
from schemas.errors import DecodeError
from schemas.ids import encode_token
from schemas.messages.sampling import StreamListed, StreamRow
from schemas.payload import INLINE
from schemas.topics import PROMPT_PUBLISHED, STREAM_LISTED


class CloseError(BrokerError):
    """The stream can't be closed; the text says why."""


class CloseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream was closed with."""

    stream: str
    rows: int
    undecodable: int
    """Messages of a foreign client that are no prompts: left out."""
    stood_already: bool
    """It was closed before with the same rows."""


async def close_stream(broker: Broker, stream: str, *, weight: float) -> CloseFigures:
    """List a stream with all prompts that stand on the log now.

    Raises:
        CloseError: nothing was published into it, or it is listed already with other rows or another weight.
    """
    payloads = RunPayloads(broker)
    rows: dict[str, StreamRow] = {}
    undecodable = 0
    prefix = PROMPT_PUBLISHED.filter(broker.run).removesuffix(">")
    async with broker.read([f"{prefix}{encode_token(stream)}.>"], follow=False) as records:
        async for record in records:
            try:
                message = PROMPT_PUBLISHED.decode(record.data)
            except DecodeError:
                undecodable += 1
                continue
            ref = message.prompt
            if ref.store == INLINE and ref.inline is not None:
                ref = await payloads.put(ref.inline)
            rows.setdefault(message.data_id, StreamRow(data_id=message.data_id, tags=message.tags, payload=ref))
    if not rows:
        raise CloseError(f"stream {stream!r}: expected prompts on the log of run {broker.run!r}, found none")
    listed = StreamListed(
        stream=stream,
        rows=await payloads.put(msgspec.msgpack.encode(list(rows.values()))),
        num_rows=len(rows),
        weight=weight,
    )
    done = await broker.publish(STREAM_LISTED.subject(broker.run, listed), STREAM_LISTED.encode(listed))
    if done.standing is not None:
        raise CloseError(
            f"stream {stream!r} is listed already with other rows or another weight (sequence {done.sequence}): a stream "
            "is listed once for a run; choose another name"
        )
    return CloseFigures(stream=stream, rows=len(rows), undecodable=undecodable, stood_already=not done.created)
