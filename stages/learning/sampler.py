"""Continuous batching: requests join and leave between decode steps; weights are swapped between them.

A plain state machine driven by one thread; it knows no clock, no queue and no event loop. Shapes: see the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.learning.draw import draw
from stages.learning.qwen3 import KvCache, Weights, forward


class Finish(StrEnum):
    """Why a request left."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to sample."""

    request_id: str
    prompt_ids: npt.NDArray[np.int32]
    """[P], at least one token."""
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    seed: int


class Sampled(msgspec.Struct, frozen=True):
    """One token of one request, or its end without a token."""

    request_id: str
    token_id: int
    """-1 when the request ended without a further token (abort)."""
    logprob: float
    version: int
    finish: Finish | None
    """The stop token itself is part of the completion."""


class _Running:
    """A request in its slot."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.tokens: list[int] = [int(i) for i in request.prompt_ids]
        self.num_cached = 0
        self.num_new = 0
        self.uniforms = np.random.default_rng(request.seed)


class Sampler:
    """Slots 0 … n-1 hold the running requests without gaps."""

    def __init__(self, weights: Weights, *, num_slots: int, version: int = 0, prefill_tokens: int = 4096) -> None:
        self._weights = weights
        self._cache = KvCache(weights.shape, num_slots)
        self._running: list[_Running] = []
        self._joining: list[_Running] = []
        self._prefill_tokens = prefill_tokens
        self.version = version
        self.num_slots = num_slots

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running) + len(self._joining)

    @property
    def num_free(self) -> int:
        """Requests that may be added now."""
        return self.num_slots - self.num_running

    def add(self, request: SampleRequest) -> None:
        """Let a request join at the next step.

        Raises:
            ValueError: No slot is free, or the prompt is empty.
        """
        if self.num_free <= 0:
            raise ValueError(f"expected a free slot of {self.num_slots}, found none: wait for a request to end")
        if not request.prompt_ids.size:
            raise ValueError("expected a prompt of at least one token, found none")
        self._joining.append(_Running(request))

    def abort(self, request_id: str) -> list[Sampled]:
        """End a request; its end, or nothing when it isn't here."""
        for row in [*self._running, *self._joining]:
            if row.request.request_id == request_id:
                self._leave(row)
                return [Sampled(request_id, -1, 0.0, self.version, Finish.ABORT)]
        return []

    def abort_all(self) -> list[Sampled]:
        """End every request."""
        rows = [*self._running, *self._joining]
        self._running.clear()
        self._joining.clear()
        return [Sampled(row.request.request_id, -1, 0.0, self.version, Finish.ABORT) for row in rows]

    def swap(self, weights: Weights, version: int, *, recompute: bool) -> None:
        """Sample with these weights from the next step on; `recompute` rebuilds the KV cache of running requests."""
        self._weights = weights
        self.version = version
        if recompute:
            for row in self._running:
                row.num_cached = 0

    def step(self) -> list[Sampled]:
        """One token for each request."""
        self._running += self._joining
        self._joining = []
        if not self._running:
            return []
        with torch.inference_mode():
            self._prefill()
            hidden_BD = self._decode()
            ids, logprobs = self._draw(hidden_BD)
        return self._advance(ids, logprobs)

    def _prefill(self) -> None:
        """Cache all but the last token of every request, in batches of adjacent slots of at most `prefill_tokens`."""
        first = 0
        while first < len(self._running):
            if len(self._running[first].tokens) - 1 <= self._running[first].num_cached:
                first += 1
                continue
            last, width = first, 0
            while last < len(self._running):
                todo = len(self._running[last].tokens) - 1 - self._running[last].num_cached
                wider = max(width, todo)
                if todo <= 0 or (last > first and wider * (last + 1 - first) > self._prefill_tokens):
                    break
                last, width = last + 1, wider
            self._prefill_rows(self._running[first:last], first, width)
            first = last

    def _prefill_rows(self, rows: Sequence[_Running], first_slot: int, width: int) -> None:
        # a long prompt goes in pieces, so that the attention scores of one call stay small
        piece = max(1, self._prefill_tokens // len(rows))
        for offset in range(0, width, piece):
            ids_BT = torch.zeros(len(rows), min(piece, width - offset), dtype=torch.int64)
            starts = [min(row.num_cached, len(row.tokens) - 1) for row in rows]
            for i, row in enumerate(rows):
                part = row.tokens[starts[i] : min(len(row.tokens) - 1, starts[i] + ids_BT.shape[1])]
                ids_BT[i, : len(part)] = torch.tensor(part, dtype=torch.int64)
                row.num_cached = starts[i] + len(part)
            forward(self._weights, self._cache, ids_BT, torch.tensor(starts), first_slot)

    def _decode(self) -> Tensor:
        ids_B1 = torch.tensor([[row.tokens[-1]] for row in self._running])
        start_B = torch.tensor([len(row.tokens) - 1 for row in self._running])
        hidden = forward(self._weights, self._cache, ids_B1, start_B, 0)[:, -1]
        for row in self._running:
            row.num_cached = len(row.tokens)
        return hidden

    def _draw(self, hidden_BD: Tensor) -> tuple[list[int], list[float]]:
        requests = [row.request for row in self._running]
        uniform_B = torch.tensor([row.uniforms.random() for row in self._running], dtype=torch.float64)
        top_p = torch.tensor([r.top_p for r in requests]) if any(r.top_p < 1 for r in requests) else None
        top_k = torch.tensor([r.top_k for r in requests]) if any(r.top_k > 0 for r in requests) else None
        logits_BV = torch.nn.functional.linear(hidden_BD, self._weights.head_VD)
        temperature_B = torch.tensor([r.temperature for r in requests])
        ids_B, logprobs_B = draw(logits_BV, temperature_B, top_p, top_k, uniform_B)
        return ids_B.tolist(), logprobs_B.tolist()

    def _advance(self, ids: list[int], logprobs: list[float]) -> list[Sampled]:
        sampled: list[Sampled] = []
        ended: list[_Running] = []
        for row, token, logprob in zip(self._running, ids, logprobs, strict=True):
            row.tokens.append(token)
            row.num_new += 1
            finish = None
            if token in row.request.stop_token_ids:
                finish = Finish.STOP
            elif row.num_new >= row.request.max_new_tokens:
                finish = Finish.LENGTH
            if finish:
                ended.append(row)
            sampled.append(Sampled(row.request.request_id, token, logprob, self.version, finish))
        for row in ended:
            self._leave(row)
        return sampled

    def _leave(self, row: _Running) -> None:
        """Free the slot; the last request moves into it, so that slots stay without gaps."""
        if row in self._joining:
            self._joining.remove(row)
            return
        slot = self._running.index(row)
        last = self._running.pop()
        if last is not row:
            self._cache.move(len(self._running), slot, last.num_cached)
            self._running[slot] = last
