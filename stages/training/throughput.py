"""How much arithmetic a step was, and what share of the hardware's peak it used.

FLOPs of a step = (6·weights that multiply + 12·layers·attention width·mean context) a token: forward 2, backward 4 per
weight; the output matrix only for trained tokens. Recomputed activations don't count (model FLOPs, not hardware FLOPs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

# Dense bf16 peaks of the makers' data sheets, TFLOP/s; the longest name that a device's name holds counts.
_PEAK_TFLOPS: Final[Mapping[str, float]] = {
    "A100": 312.0,
    "A800": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "RTX 4090": 165.0,
}


def peak_flops(device: torch.device, configured_tflops: float = 0.0) -> float | None:
    """Peak of one device in FLOP/s: as configured, else known by name, else None."""
    if configured_tflops > 0:
        return configured_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in _PEAK_TFLOPS if key in name]
    return _PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


def step_flops(
    shapes: Mapping[str, list[int]],
    num_tokens_R: npt.NDArray[np.generic],
    num_trained_R: npt.NDArray[np.generic],
    *,
    attention_width: int,
    num_layers: int,
) -> float:
    """Model FLOPs of forward and backward over these rows.

    Args:
        shapes: of the weights by HF name.
        num_tokens_R: length of each row.
        num_trained_R: trained tokens of each row.
        attention_width: query heads times head size.
        num_layers: blocks.
    """
    inner = sum(int(np.prod(shape)) for name, shape in shapes.items() if len(shape) >= 2 and ".layers." in name)
    output = shapes.get("lm_head.weight") or shapes.get("model.embed_tokens.weight") or [0, 0]
    tokens = num_tokens_R.astype(np.float64)
    attention = 6.0 * num_layers * attention_width * float((tokens**2).sum())  # causal: half of 12·L·width·T per token
    return (
        6.0 * inner * float(tokens.sum())
        + 6.0 * output[0] * output[1] * float(num_trained_R.astype(np.float64).sum())
        + attention
    )
