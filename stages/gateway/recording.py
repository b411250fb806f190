"""What is written down of a call, and how a session's forest is made from it again.

An interaction stores only what is new against its parent. `RecordedCall` inside its payload holds the same in messages: for people to
read, and for another gateway to rebuild the session from.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from schemas.arrays import float32, int32, runs_of
from schemas.messages.rollout import FinishReason, InteractionRecorded, InteractionTokens
from schemas.payload import INLINE_LIMIT_BYTES, PayloadRef, inline_ref
from stages.gateway.conversation import Answer, Call, Message, Tool
from stages.gateway.forest import Forest, Match, new_messages, raw_digest
from stages.gateway.generation import Sampled
from stages.gateway.matching import Digest, extend_digest, message_digest, root_digest
from stages.ports import Payloads, TokenIds


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The messages of an interaction that its parent does not hold."""

    model: str = ""
    tools: tuple[Tool, ...] = ()
    """Of a chain's first call."""
    messages: tuple[Message, ...] = ()
    text: str | None = None
    """completions: the new part of a raw prompt; None for conversations and for prompts given as ids."""
    is_raw: bool = False
    answer: Message


_encode: Final = msgspec.json.Encoder()
_decode: Final = msgspec.json.Decoder(RecordedCall)
_pack: Final = msgspec.msgpack.Encoder()
_unpack: Final = msgspec.msgpack.Decoder(InteractionTokens)


def tokens_payload(call: Call, match: Match, *, new_ids: TokenIds, sampled: Sampled, answer: Answer) -> bytes:
    """The payload of an interaction: an encoded `InteractionTokens`."""
    recorded = RecordedCall(
        model=call.model,
        tools=call.tools if match.parent is None else (),
        messages=new_messages(call, match),
        text=call.prompt[match.num_known :] if isinstance(call.prompt, str) else None,
        is_raw=call.prompt is not None,
        answer=answer.message,
    )
    return _pack.encode(
        InteractionTokens(
            prompt_ids=int32(new_ids),
            completion_ids=int32(sampled.ids()),
            logprobs=float32(sampled.logprobs()),
            versions=runs_of(sampled.versions),
            messages_json=_encode.encode(recorded),
        )
    )


async def store_payload(payloads: Payloads, data: bytes) -> PayloadRef:
    """Small payloads ride inside their message, which saves a round trip; others are stored first."""
    return inline_ref(data) if len(data) <= INLINE_LIMIT_BYTES else await payloads.put(data)


def interaction(
    *,
    session: str,
    ordinal: int,
    call: Call,
    match: Match,
    new_ids: TokenIds,
    sampled: Sampled,
    answer: Answer,
    tokens: PayloadRef,
    temperature: float,
    untrainable_reason: str,
    choice: int,
) -> InteractionRecorded:
    """The message of one recorded call."""
    versions = [version for version, _ in sampled.versions] or [0]
    reason = untrainable_reason or ("logprobs" if sampled.fault else "")
    finish = FinishReason.TOOL_CALLS if answer.finish == "tool_calls" else sampled.finish
    return InteractionRecorded(
        session=session,
        ordinal=ordinal,
        interaction_id=answer.interaction_id,
        parent=None if match.parent is None else match.parent.ordinal,
        tokens=tokens,
        num_context=0 if match.parent is None else match.parent.end,
        num_prompt=int(new_ids.size),
        num_completion=sampled.num,
        min_version=min(versions),
        max_version=max(versions),
        finish_reason=finish,
        trainable=not reason,
        untrainable_reason=reason,
        temperature=temperature,
        protocol=call.protocol,
        requested_settings_json=_encode.encode(call.requested),
        # The choices of one call with n > 1 have the same input, yet none of them is a retry of another.
        digest=match.before.hex() + (f"/{choice}" if choice else ""),
    )


async def rebuild_forest(
    records: list[InteractionRecorded], payloads: Payloads, stop_token_ids: tuple[int, ...]
) -> Forest:
    """The forest of a session whose gateway died, from the log alone."""
    forest = Forest()
    tools: list[tuple[Tool, ...]] = []
    raw_texts: list[str] = []
    for record in records:
        data = record.tokens.inline if record.tokens.inline is not None else await payloads.get(record.tokens)
        tokens = _unpack.decode(data)
        new_ids, completion = (
            array.as_numpy().astype(np.int32) for array in (tokens.prompt_ids, tokens.completion_ids)
        )
        recorded = _decode.decode(tokens.messages_json)
        parent = None if record.parent is None else forest.nodes[record.parent]
        known_tools = recorded.tools if record.parent is None else tools[record.parent]
        tools.append(known_tools)
        prompt: str | tuple[int, ...] | None = None
        before: Digest
        if recorded.text is not None:
            prompt = ("" if record.parent is None else raw_texts[record.parent]) + recorded.text
            before = raw_digest(b"text", prompt)
        elif recorded.is_raw:
            ids = new_ids if parent is None else np.concatenate((parent.ids(), new_ids))
            prompt = tuple(int(one) for one in ids)
            before = raw_digest(b"ids", ids)
        else:
            before = root_digest(known_tools) if parent is None else parent.after
            by_name = {tool.name: tool for tool in known_tools}
            for message in recorded.messages:
                before = extend_digest(before, message_digest(message, by_name))
        raw_texts.append((prompt if isinstance(prompt, str) else "") + recorded.answer.text)
        forest.add(
            Match(parent=parent, num_known=0, before=before, broken=False),
            Call(protocol="chat_completions", tools=known_tools, prompt=prompt),
            new_ids=new_ids,
            completion=completion,
            answer=recorded.answer,
            ended=bool(completion.size) and int(completion[-1]) in stop_token_ids,
            interaction_id=record.interaction_id,
        )
    return forest
