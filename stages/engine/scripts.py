"""Scripts for the scripted engine: what to answer without a model. For tests of a pipeline, and for chaos."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stages.ports import TokenIds

_END = 258
"""<|im_end|> of the byte-level tokenizer."""
_FIRST_LETTER = 64
"""The id of `a` in the byte-level alphabet: ids follow the sorted printable stand-ins of the bytes."""

_TAIL_SIGMA = math.log(10) / 2.326
"""Of a log-normal distribution whose p99 is ten times its median."""


def random_letters(prompt_ids: TokenIds, number: int) -> Sequence[int]:
    """Three to five letters, by the prompt and the number of the request: some right, most wrong."""
    random = np.random.default_rng([number, len(prompt_ids), int(prompt_ids.sum())])
    length = int(random.integers(3, 6))
    return [*(_FIRST_LETTER + int(letter) for letter in random.integers(0, 26, length)), _END]


def long_tailed_letters(prompt_ids: TokenIds, number: int) -> Sequence[int]:
    """Letters whose number is log-normal, the hundredth longest ten times the median of six: with a delay between chunks
    (`engine.script_chunk_s`) a long-tailed generator.
    """
    random = np.random.default_rng([number, len(prompt_ids), int(prompt_ids.sum())])
    length = max(1, round(6 * float(np.exp(_TAIL_SIGMA * random.standard_normal()))))
    return [*(_FIRST_LETTER + int(letter) for letter in random.integers(0, 26, length)), _END]
