"""Log-probs and entropies of given tokens at the temperature they were sampled with, from logits or from hidden states.

From hidden states the logits exist for one chunk of tokens at a time, forwards and backwards: what is kept between the passes is one
number per token (two with entropy). Cost: the chunk's logits are computed twice. Knows no model beyond its output matrix.

Shapes: T = tokens, D = hidden size, V = vocabulary, C = tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Logits of a chunk take this many bytes at the most (float32); two or three times as much exists for a moment. On a CPU a chunk should
# stay in the cache (4 to 16 MiB are fastest, 64 MiB half as fast); an accelerator needs tall matrices to be busy.
CPU_CHUNK_BYTES = 8 * 2**20
ACCELERATOR_CHUNK_BYTES = 256 * 2**20


def logprobs_from_logits(
    logits_TV: Tensor, labels_T: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, float32 or better: two [T], with gradient.

    Args:
        logits_TV: logits, for whoever has them whole already.
        labels_T: int64, the token whose log-prob is asked.
        temperature: what it was sampled with: one number or one per token [T]. Greedy (0) is no distribution and is refused.
    """
    scaled_TV = _wide(logits_TV) / _temperatures(temperature, labels_T, _wide_dtype(logits_TV)).unsqueeze(-1)
    log_TV = scaled_TV.log_softmax(-1)
    entropy_T = -(log_TV.exp() * log_TV.clamp(min=torch.finfo(log_TV.dtype).min)).sum(-1)
    return log_TV.gather(-1, labels_T.unsqueeze(-1)).squeeze(-1), entropy_T


def logprobs_from_hidden(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same from the last hidden states and the output matrix, without the whole logits.

    Args:
        hidden_TD: states of the positions that predict `labels_T` (select them first: prompts and padding cost as much).
        weight_VD: output matrix.
        labels_T: int64.
        temperature: one number or one per token.
        chunk_bytes: bound of the chunk's float32 logits; None: what suits the device.
    """
    temperature_T = _temperatures(temperature, labels_T, _wide_dtype(hidden_TD))
    if chunk_bytes is None:
        chunk_bytes = CPU_CHUNK_BYTES if hidden_TD.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    chunk = max(1, chunk_bytes // (4 * weight_VD.shape[0]))
    found: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(hidden_TD, weight_VD, labels_T, temperature_T, chunk)
    return found


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = h·Wᵀ/τ, p = softmax(z), H = entropy: ∂logp/∂z = 1_label − p, ∂H/∂z = −p·(log p + H)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, temperature_T: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logp_T = torch.empty(len(labels_T), dtype=_wide_dtype(hidden_TD), device=hidden_TD.device)
        entropy_T, norm_T = torch.empty_like(logp_T), torch.empty_like(logp_T)
        for part in _chunks(len(labels_T), chunk):
            logits_CV = _logits(hidden_TD[part], weight_VD, temperature_T[part])
            norm_T[part] = logits_CV.logsumexp(-1)
            logp_T[part] = logits_CV.gather(-1, labels_T[part].unsqueeze(-1)).squeeze(-1) - norm_T[part]
            p_CV = (logits_CV - norm_T[part].unsqueeze(-1)).exp_()
            entropy_T[part] = norm_T[part] - p_CV.mul_(_finite(logits_CV)).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, temperature_T, norm_T, entropy_T)
        ctx.chunk = chunk  # pyright: ignore[reportAttributeAccessIssue] - torch's context takes any attribute
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes the context by position
        ctx: Any,  # torch has no type for what a context saved
        *grad_outputs: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        grad_logp_T, grad_entropy_T = grad_outputs
        hidden_TD, weight_VD, labels_T, temperature_T, norm_T, entropy_T = ctx.saved_tensors
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(norm_T)
        grad_hidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=norm_T.dtype) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(labels_T), ctx.chunk):
            log_CV = _logits(hidden_TD[part], weight_VD, temperature_T[part]).sub_(norm_T[part].unsqueeze(-1))
            p_CV = log_CV.exp()
            grad_CV = p_CV * -grad_logp_T[part].unsqueeze(-1)
            if grad_entropy_T is not None:
                pull_CV = _finite(log_CV).add_(entropy_T[part].unsqueeze(-1)).mul_(grad_entropy_T[part].unsqueeze(-1))
                grad_CV.addcmul_(p_CV, pull_CV, value=-1)
            grad_CV.scatter_add_(-1, labels_T[part].unsqueeze(-1), grad_logp_T[part].unsqueeze(-1))
            grad_CV.div_(temperature_T[part].unsqueeze(-1))
            if grad_hidden_TD is not None:
                grad_hidden_TD[part] = grad_CV.to(weight_VD.dtype) @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.to(hidden_TD.dtype).T @ hidden_TD[part]
        return grad_hidden_TD, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None, None, None


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor) -> Tensor:
    return _wide(hidden_CD @ weight_VD.T) / temperature_C.unsqueeze(-1)


def _finite(x: Tensor) -> Tensor:
    """−∞ (a forbidden token) made the lowest number, so that p·log p is 0 and not NaN."""
    return x.clamp(min=torch.finfo(x.dtype).min)


def _temperatures(temperature: float | Tensor, labels_T: Tensor, dtype: torch.dtype) -> Tensor:
    given = torch.as_tensor(temperature, dtype=dtype, device=labels_T.device)
    if isinstance(temperature, (int, float)) and temperature <= 0:
        raise ValueError(
            f"temperature is {temperature}, expected > 0: greedy tokens have no distribution and can't be trained"
        )
    return given.expand(labels_T.shape)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]
