from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import arrays
from schemas.errors import DecodeError
from schemas.messages.rollout import InteractionTokens


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_int32_values_survive_the_wire(values: list[int]) -> None:
    array = msgspec.msgpack.decode(msgspec.msgpack.encode(arrays.int32(values)), type=arrays.Array)
    assert array.as_numpy().tolist() == values
    assert array.length == len(values)


@given(st.lists(st.booleans()))
def test_masks_survive_as_bits(mask: list[bool]) -> None:
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(arrays.bits(mask)), type=arrays.Bits)
    assert packed.as_numpy().tolist() == mask
    assert packed.data.nbytes == (len(mask) + 7) // 8


@given(st.lists(st.integers(-1, 5)))
def test_versions_survive_run_length_coding(values: list[int]) -> None:
    coded = arrays.runs(values)
    assert coded.as_numpy().tolist() == values
    assert coded.total == len(values)
    assert coded.values.length <= len(values)


def test_reading_an_array_copies_nothing() -> None:
    tokens = InteractionTokens(
        prompt_ids=arrays.int32(np.arange(1000)),
        completion_ids=arrays.int32([1, 2]),
        logprobs=arrays.float32([-0.5, -0.25]),
        versions=arrays.runs([3, 3]),
    )
    data = msgspec.msgpack.encode(tokens)
    view = msgspec.msgpack.decode(data, type=InteractionTokens).prompt_ids.as_numpy()
    inside = np.frombuffer(data, dtype=np.uint8)
    assert np.shares_memory(view, inside)
    assert not view.flags.writeable


def test_bytes_that_are_no_whole_items_are_refused() -> None:
    with pytest.raises(DecodeError, match="multiple of 4"):
        arrays.Array(dtype="int32", data=memoryview(b"abc")).as_numpy()
    with pytest.raises(DecodeError, match="2 bytes for 9 bits"):
        arrays.Bits(length=9, data=memoryview(b"a")).as_numpy()


def test_runs_that_are_known_already_are_coded_as_they_would_be_from_the_values():
    values = np.repeat(np.array([3, 4, 3], dtype=np.int32), [2, 1, 5])
    assert arrays.runs_of([(3, 2), (4, 1), (3, 5)]).as_numpy().tolist() == values.tolist()
    assert msgspec.msgpack.encode(arrays.runs_of([(3, 2), (4, 1), (3, 5)])) == msgspec.msgpack.encode(
        arrays.runs(values)
    )
    assert arrays.runs_of([]).total == 0
