"""Log-probs and entropies where each tensor-parallel rank has the output matrix's rows of its part of the vocabulary.

As `stages.learning.logprobs`: chunk by chunk, logits never whole; here maxima, sums and the label's logit are reduced over the
ranks. Shapes: N trained tokens, C tokens of a chunk, D hidden size, V this rank's vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

_CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}


class VocabularyPart:
    """Which rows of the output matrix this rank has."""

    def __init__(self, group: dist.ProcessGroup, *, first: int, size: int, vocabulary: int) -> None:
        self.group = group
        self.first = first
        self.num_valid = max(0, min(size, vocabulary - first))
        """Rows that stand for tokens; the rest is padding."""

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Over the ranks that share the vocabulary, in place."""
        if self.group.size() > 1:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor


def parallel_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, temperature: float, part: VocabularyPart
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy, float32 [N], the same on all ranks. The gradient to `hidden_ND` is this rank's share."""
    found: tuple[Tensor, Tensor] = _ParallelLogprobs.apply(hidden_ND, weight_VD, labels_N, temperature, part)
    return found


class _ParallelLogprobs(torch.autograd.Function):
    """With z = h·Wᵀ/τ, p = softmax(z), H = entropy: ∂logp/∂z = 1_label − p, ∂H/∂z = −p·(log p + H)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        temperature: float,
        part: VocabularyPart,
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, _CHUNK_BYTES[hidden_ND.device.type] // (4 * weight_VD.shape[0]))
        logp_N = torch.empty(len(labels_N), dtype=torch.float32, device=hidden_ND.device)
        entropy_N, norm_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
        for start in range(0, len(labels_N), chunk):
            piece = slice(start, start + chunk)
            z_CV = _logits(hidden_ND[piece], weight_VD, temperature, part)
            top_C = part.reduce(z_CV.amax(-1), dist.ReduceOp.MAX)
            e_CV = (z_CV - top_C.unsqueeze(-1)).exp()
            sums_C3 = torch.stack(
                [e_CV.sum(-1), (e_CV * _finite(z_CV)).sum(-1), _label_logit(z_CV, labels_N[piece], part)], dim=-1
            )
            total_C, weighted_C, label_C = part.reduce(sums_C3).unbind(-1)
            norm_N[piece] = top_C + total_C.log()
            logp_N[piece] = label_C - norm_N[piece]
            entropy_N[piece] = norm_N[piece] - weighted_C / total_C
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, norm_N, entropy_N)
        ctx.settings = (temperature, part, chunk)  # pyright: ignore[reportAttributeAccessIssue] - torch's context takes any attribute
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes the context by position
        ctx: Any,  # torch has no type for what a context saved
        *grad_outputs: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        grad_logp_N, grad_entropy_N = grad_outputs
        hidden_ND, weight_VD, labels_N, norm_N, entropy_N = ctx.saved_tensors
        temperature, part, chunk = ctx.settings
        if grad_logp_N is None:
            grad_logp_N = torch.zeros_like(norm_N)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for start in range(0, len(labels_N), chunk):
            piece = slice(start, start + chunk)
            log_CV = _logits(hidden_ND[piece], weight_VD, temperature, part) - norm_N[piece].unsqueeze(-1)
            p_CV = log_CV.exp()
            grad_CV = p_CV * -grad_logp_N[piece].unsqueeze(-1)
            if grad_entropy_N is not None:
                pull_CV = _finite(log_CV) + entropy_N[piece].unsqueeze(-1)
                grad_CV = grad_CV - p_CV * pull_CV * grad_entropy_N[piece].unsqueeze(-1)
            place_C, here_C = _places(labels_N[piece], part)
            grad_CV.scatter_add_(-1, place_C.unsqueeze(-1), (grad_logp_N[piece] * here_C).unsqueeze(-1))
            grad_CV = grad_CV / temperature
            grad_hidden_ND[piece] = grad_CV.to(weight_VD.dtype) @ weight_VD
            grad_weight_VD += grad_CV.to(hidden_ND.dtype).T @ hidden_ND[piece]
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, part: VocabularyPart) -> Tensor:
    z_CV = (hidden_CD @ weight_VD.T).float() / temperature
    z_CV[:, part.num_valid :] = -torch.inf
    return z_CV


def _finite(x: Tensor) -> Tensor:
    """−∞ (padding) made the lowest number, so that p·log p is 0 and not NaN."""
    return x.clamp(min=torch.finfo(x.dtype).min)


def _places(labels_C: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Where each label lies in this rank's rows, and whether it does."""
    local_C = labels_C - part.first
    here_C = (local_C >= 0) & (local_C < part.num_valid)
    return torch.where(here_C, local_C, 0), here_C


def _label_logit(z_CV: Tensor, labels_C: Tensor, part: VocabularyPart) -> Tensor:
    place_C, here_C = _places(labels_C, part)
    return torch.where(here_C, z_CV.gather(-1, place_C.unsqueeze(-1)).squeeze(-1), 0)
