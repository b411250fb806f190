"""What the stand-in trainer's weights must be after each step, from manifests and tokens alone: lost, doubled or reordered
updates show in the digest. Written beside the trainer, not with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

_WIDTH: Final = 64
_DECAY: Final = 0.999
_TYPES: Final[Mapping[str, str]] = {"int32": "<i4", "float64": "<f8", "int64": "<i8", "float32": "<f4", "uint8": "u1"}


class ExpectedWeights:
    """The weights after the steps that were applied."""

    def __init__(self) -> None:
        self.weights: npt.NDArray[np.float64] = np.zeros(_WIDTH)

    def apply(self, manifest: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
        """One step; the digest of the weights after it.

        Args:
            manifest: as its payload says it.
            rows: the row's token payloads, in the manifest's order.
        """
        advantage, weight = array(manifest["advantage"]), array(manifest["loss_weight"])
        for number, row in enumerate(rows):
            sampled = array(row["token_ids"])[mask(row["loss_mask"])].astype(np.int64) % _WIDTH
            np.add.at(self.weights, sampled, float(advantage[number]) * float(weight[number]))
        self.weights *= _DECAY
        return xxhash.xxh3_64_hexdigest(self.weights.tobytes())


def array(encoded: Sequence[Any]) -> npt.NDArray[Any]:
    """An encoded array: [dtype, bytes] → [n]."""
    return np.frombuffer(encoded[1], dtype=_TYPES[encoded[0]])


def mask(encoded: Sequence[Any]) -> npt.NDArray[np.bool_]:
    """An encoded mask: [length, bits] → [n]."""
    return np.unpackbits(np.frombuffer(encoded[1], dtype=np.uint8), count=encoded[0]).astype(bool)
