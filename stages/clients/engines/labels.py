"""Which weight version sampled which token. Pure.

Servers tell the versions of an answer's tokens when it ends, not with each token. But versions only grow: where the
server was at version v when the request was sent, and still was after a token had arrived, v sampled the token. Tokens
are handed out as soon as that is known; those around a swap wait for the answer's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from schemas.messages.rollout import FinishReason
from stages.ports import EngineUnavailableError, TokenChunk


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of an answer were sampled by one version."""

    version: int
    start: int
    end: int


class Labeller:
    """The tokens of one answer on their way from the server to the caller."""

    def __init__(self, lowest: int) -> None:
        """Args:
        lowest: a version that the server had confirmed before the request was sent.
        """
        self._lowest: Final = lowest
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._num_out = 0

    @property
    def num_received(self) -> int:
        """Tokens that came so far."""
        return self._num_out + len(self._ids)

    @property
    def num_waiting(self) -> int:
        """Tokens that came and were not handed out."""
        return len(self._ids)

    def add(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens came."""
        self._ids += ids
        self._logprobs += logprobs

    def confirm(self, num_tokens: int, version: int) -> TokenChunk | None:
        """The first `num_tokens` of the answer were sampled by this version or an older one: what can be handed out now.

        Raises:
            EngineUnavailableError: The server went back to an older version: it is not the one that was asked.
        """
        if version < self._lowest:
            raise EngineUnavailableError(
                f"expected weights of version {self._lowest} or newer, found {version}: the server was started anew"
            )
        num_ready = num_tokens - self._num_out
        if version > self._lowest or num_ready <= 0:
            return None
        return self._take(num_ready, version)

    def finish(
        self, spans: Sequence[VersionSpan], finish: FinishReason, stop_reason: str | int | None
    ) -> list[TokenChunk]:
        """The rest, one chunk a version; the last one says why the answer ended.

        Raises:
            EngineUnavailableError: The spans are not those of this answer.
        """
        spans = _joined(spans)
        self._check(spans)
        chunks = [self._take(span.end - self._num_out, span.version) for span in spans if span.end > self._num_out] or [
            self._take(0, spans[-1].version if spans else self._lowest)
        ]
        last = chunks[-1]
        if last.token_ids.size and finish is FinishReason.STOP and stop_reason is None:
            stop_reason = int(last.token_ids[-1])
        chunks[-1] = msgspec.structs.replace(last, finish_reason=finish, stop_reason=stop_reason)
        return chunks

    def _check(self, spans: Sequence[VersionSpan]) -> None:
        end = 0
        for span in spans:
            if span.start != end or span.end < end:
                raise EngineUnavailableError(f"expected version spans one after the other, found {list(spans)}")
            end = span.end
        if end != self.num_received:
            raise EngineUnavailableError(f"expected versions of {self.num_received} tokens, found those of {end}")
        if self._num_out and (spans[0].version != self._lowest or spans[0].end < self._num_out):
            raise EngineUnavailableError(
                f"{self._num_out} tokens were known to be of version {self._lowest}, the server says {list(spans)}"
            )

    def _take(self, num_tokens: int, version: int) -> TokenChunk:
        ids, self._ids = self._ids[:num_tokens], self._ids[num_tokens:]
        logprobs, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        self._num_out += len(ids)
        return TokenChunk(
            token_ids=np.array(ids, dtype=np.int32), logprobs=np.array(logprobs, dtype=np.float32), version=version
        )


def _joined(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Neighbours of one version as one: the labels of two adapters stand for the same weights below them."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and (joined[-1].version, joined[-1].end) == (span.version, span.start):
            joined[-1] = VersionSpan(span.version, joined[-1].start, span.end)
        else:
            joined.append(span)
    return joined
