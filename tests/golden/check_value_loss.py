"""Critic losses of all references as settings of one function."""

from collections.abc import Callable

import pytest
import torch
from golden_case import Case, array, assert_close
from loss_cases import layout, maybe, number, weights_of
from torch import Tensor

from stages.learning.losses.critic import CriticConfig, value_loss
from stages.learning.losses.errors import LossConfigError


def _run(case: Case, config: CriticConfig, weight: str, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    at = layout(case, like="values")
    given = case.inputs.get("loss_mask")
    mask_T = torch.ones(len(at.rows.row_T), dtype=torch.bool) if given is None else at.mask(given)
    values_T = at.floats(case.inputs["values"]).requires_grad_()
    old_T, returns_T = at.floats(case.inputs["old_values"]), at.floats(case.inputs["returns"])
    loss_T, stats = value_loss(values_T, old_T, returns_T, mask_T, config)
    loss = scale * (at.rows.spread(weights_of(at, mask_T, weight)) * loss_T).sum()
    loss.backward()
    assert values_T.grad is not None
    grad, expected = at.back(values_T.grad), case.expected
    if not case.defect:
        assert_close(float(loss.detach()), expected["loss"], case, "loss", "loss")
        assert_close(grad, expected["grad_values"], case, "gradient", "gradient")
        if expected.get("clip_ratio") is not None:
            assert_close(
                float(stats["value_clip_fraction"].mean()), expected["clip_ratio"], case, "metric", "clip ratio"
            )
    return at.back(loss_T), at.back(mask_T)


def check_areal(case: Case) -> None:
    config = CriticConfig(
        form=str(case.params["loss_fn_type"]),
        value_clip=number(case.params, "value_eps_clip"),
        huber_delta=number(case.params, "huber_delta"),
    )
    loss_T, mask = _run(case, config, "token_mean")
    if case.defect:  # an empty mask divides by 0 there; here it gives 0
        assert not bool(mask.any()), f"unknown defect: {case.note}"
        assert bool((loss_T == 0).all())
        return
    assert_close(loss_T, case.expected["per_token_loss"], case, "token", "per-token loss", where=mask)
    at = layout(case, like="values")
    values, old, returns = (
        torch.as_tensor(array(case.inputs[key]), dtype=at.dtype) for key in ("values", "old_values", "returns")
    )
    assert values.shape == old.shape == returns.shape == mask.shape
    unclipped, _ = value_loss(
        values.reshape(-1),
        None,
        returns.reshape(-1),
        mask.reshape(-1),
        CriticConfig(form=config.form, value_clip=None, huber_delta=config.huber_delta),
    )
    clipped = at.back(unclipped) < loss_T
    want = torch.as_tensor(array(case.expected["clip_mask"])).bool()
    assert torch.equal(clipped[mask], want[mask])


def check_skyrl(case: Case) -> None:
    """It means each row and then divides by all rows, empty ones included; this project by the active ones."""
    mask = torch.as_tensor(array(case.inputs["loss_mask"])).bool()
    share = float(mask.any(-1).double().mean())
    _run(case, CriticConfig(value_clip=maybe(case.params, "value_clip")), "seq_mean", scale=share)


def check_verl(case: Case) -> None:
    modes = {"token-mean": "token_mean", "seq-mean-token-mean": "seq_mean"}
    _run(
        case, CriticConfig(value_clip=number(case.params, "cliprange_value")), modes[str(case.params["loss_agg_mode"])]
    )


def check_error(case: Case) -> None:
    assert case.expected["error"]
    with pytest.raises(LossConfigError, match="form"):
        CriticConfig(form=str(case.params["loss_fn_type"]))


CHECKS: dict[str, Callable[[Case], None]] = {
    "areal_critic": check_areal,
    "skyrl_critic": check_skyrl,
    "verl_critic": check_verl,
    "error": check_error,
}
