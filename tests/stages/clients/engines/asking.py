"""Requests of the tests of this folder, and what came of them."""

from __future__ import annotations

from contextlib import aclosing

import numpy as np

from stages.ports import GenerateRequest, InferenceEngine, SamplingSettings, TokenChunk, TokenIds


def ask(name: str = "a", n: int = 12, prompt=range(10), min_version: int = 0, **settings) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.array(list(prompt), dtype=np.int32),
        settings=SamplingSettings(max_new_tokens=n, **settings),
        min_version=min_version,
    )


async def collect(engine: InferenceEngine, request: GenerateRequest) -> list[TokenChunk]:
    async with aclosing(engine.generate(request)) as chunks:
        return [chunk async for chunk in chunks]


def ids_of(chunks: list[TokenChunk]) -> TokenIds:
    return np.concatenate([chunk.token_ids for chunk in chunks])


def versions_of(chunks: list[TokenChunk]) -> list[int]:
    return [chunk.version for chunk in chunks for _ in chunk.token_ids]
