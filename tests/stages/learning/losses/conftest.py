"""A small mini-batch with everything that any loss can ask for."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import Distillation, LossConfig
from stages.learning.losses.dppo import Dppo
from stages.learning.losses.dro import Dro
from stages.learning.losses.gmpo import Gmpo
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.importance import Filter, OffPolicySequenceMask
from stages.learning.losses.kl import KlPenalty
from stages.learning.losses.kl_cov import KlCov
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.reinforce import Likelihood, Reinforce
from stages.learning.losses.sapo import Sapo
from stages.learning.losses.vespo import Vespo
from stages.learning.rows import Rows

MakeBatch = Callable[..., tuple[Tensor, LossBatch]]

_FILTERS = (Filter(upper=1.5, lower=0.5), Filter(level="sequence", metric="kl_k2", aggregation="max", upper=0.5))
_CAPS = (
    Filter(action="clamp", upper=1.2),
    Filter(level="sequence", action="zero", upper=3.0, lower=0.2, aggregation="sum"),
)
_DECOUPLED = {"proximal": "recompute", "behaviour_weight": "token"}

CONFIGS = {
    "ppo": LossConfig(),
    "dual clip": LossConfig(method=Ppo(dual_clip=1.5)),
    "decoupled": LossConfig(**_DECOUPLED),
    "filtered": LossConfig(**_DECOUPLED, filters=_FILTERS),
    "capped": LossConfig(**_DECOUPLED, filters=_CAPS),
    "row weight": LossConfig(proximal="recompute", behaviour_weight="sequence_geometric"),
    "row product": LossConfig(proximal="recompute", behaviour_weight="sequence_product", normalise_weight=True),
    "normalised": LossConfig(**_DECOUPLED, normalise_weight=True),
    "loglinear": LossConfig(proximal="loglinear"),
    "linear": LossConfig(proximal="linear"),
    "reuse_train": LossConfig(proximal="reuse_train", behaviour_weight="token"),
    "m2po": LossConfig(proximal="recompute", m2po_threshold=0.05),
    "gspo": LossConfig(method=Gspo(eps_clip=0.05, eps_clip_higher=0.08)),
    "gspo token": LossConfig(method=Gspo(eps_clip=0.05, eps_clip_higher=None, advantage="token", gradient="token")),
    "cispo": LossConfig(method=Cispo(eps_clip_higher=0.5)),
    "sapo": LossConfig(method=Sapo()),
    "sapo row": LossConfig(method=Sapo(level="sequence")),
    "dppo": LossConfig(method=Dppo(kl_tau=1e-3)),
    "dppo kl": LossConfig(method=Dppo(divergence="binary_kl", threshold_low=0.05, threshold_high=0.05, ratio_cap=2.0)),
    "ipo": LossConfig(method=Dppo(applies="always", threshold_low=0.1, threshold_high=0.1)),
    "reinforce": LossConfig(method=Reinforce()),
    "likelihood": LossConfig(method=Likelihood()),
    "dro": LossConfig(method=Dro(beta=0.1)),
    "gmpo": LossConfig(method=Gmpo()),
    "vespo": LossConfig(method=Vespo()),
    "kl_cov": LossConfig(method=KlCov(fraction=0.2, coef=0.1), proximal="recompute"),
    "sequence mask": LossConfig(off_policy_sequence_mask=OffPolicySequenceMask(delta=0.02)),
    "clamped": LossConfig(log_ratio_clamp=20.0),
    "kl penalty": LossConfig(kl_penalty=KlPenalty(coef=0.1)),
    "kl penalty k2+": LossConfig(
        kl_penalty=KlPenalty(coef=0.1, estimator="k3", gradient_of_k2=True, importance_weighted=True)
    ),
    "entropy": LossConfig(entropy_coef=0.01),
    "kdrl": LossConfig(distillation=Distillation(coef=0.1)),
    "kd": LossConfig(distillation=Distillation(coef=0.1, rl_weight=0.0)),
    "kd m2po": LossConfig(proximal="recompute", m2po_threshold=0.05, distillation=Distillation(coef=0.1)),
    "kd advantage": LossConfig(method=Reinforce(), distillation=Distillation(form="advantage", coef=0.5)),
}


@pytest.fixture(params=CONFIGS.values(), ids=list(CONFIGS))
def any_config(request: pytest.FixtureRequest) -> LossConfig:
    return request.param


@pytest.fixture
def configs() -> dict[str, LossConfig]:
    return CONFIGS


@pytest.fixture
def make_batch() -> MakeBatch:
    return build_batch


def build_batch(
    lengths: Sequence[int] = (5, 3, 1, 6), *, seed: int = 0, spread: float = 0.3, dtype: torch.dtype = torch.float64
):
    """Log-probs and a batch: old, proximal, reference and teacher differ from the current policy by noise of `spread`."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    logp_T = (-1.5 + noise(0.7)).clamp(max=-0.05)
    near = lambda: (logp_T + noise(spread)).clamp(max=-1e-3)  # noqa: E731 - a name for a draw
    mask_T = torch.rand(sum(lengths), generator=generator) < 0.8
    batch = LossBatch(
        rows=Rows.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0)),
        loss_mask_T=mask_T,
        advantages_T=noise(1.0).to(dtype),
        old_logp_T=near().to(dtype),
        prox_logp_T=near().to(dtype),
        ref_logp_T=near().to(dtype),
        teacher_logp_T=near().to(dtype),
        entropy_T=noise(1.0).abs().to(dtype),
        versions_T=torch.randint(3, 7, (sum(lengths),), generator=generator),
        current_version=7,
    )
    return logp_T.to(dtype), batch
