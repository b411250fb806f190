"""Critic losses of all references as settings of one function."""

from collections.abc import Callable

import pytest
import torch
from check_policy_losses_verl import verl_row_weights
from golden_case import Case, array, assert_close
from loss_cases import Layout, layout, maybe, number, weights_of
from torch import Tensor

from stages.learning.losses.critic import CriticConfig, value_loss
from stages.learning.losses.errors import LossConfigError

Weigh = Callable[[Layout, Tensor], Tensor]
"""Row weights from the layout and the mask."""


def _token_mean(at: Layout, mask_T: Tensor) -> Tensor:
    return weights_of(at, mask_T, "token_mean")


def _mean_over_all_rows(at: Layout, mask_T: Tensor) -> Tensor:
    """The mean of row means divided by all rows, empty ones included; this project divides by the active ones."""
    return weights_of(at, mask_T, "seq_mean") * (at.rows.count(mask_T) > 0).to(at.dtype).mean()


def _run(case: Case, config: CriticConfig, weigh: Weigh) -> tuple[Tensor, Tensor]:
    at = layout(case, like="values")
    given = case.inputs.get("loss_mask")
    mask_T = torch.ones(len(at.rows.row_T), dtype=torch.bool) if given is None else at.mask(given)
    values_T = at.floats(case.inputs["values"]).requires_grad_()
    old_T, returns_T = at.floats(case.inputs["old_values"]), at.floats(case.inputs["returns"])
    loss_T, stats = value_loss(values_T, old_T, returns_T, mask_T, config)
    loss = (at.rows.spread(weigh(at, mask_T)) * loss_T).sum()
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
    loss_T, mask = _run(case, config, _token_mean)
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
    _run(case, CriticConfig(value_clip=maybe(case.params, "value_clip")), _mean_over_all_rows)


def check_verl(case: Case) -> None:
    mode = case.params["loss_agg_mode"]
    config = CriticConfig(value_clip=number(case.params, "cliprange_value"))
    _run(case, config, lambda at, mask_T: verl_row_weights(at, mask_T, mode))


def check_slime(case: Case) -> None:
    """No factor ½ there; a mean over tokens, and one of row means over all rows, as with its policy losses."""
    at, expected = layout(case, like="values"), case.expected
    mask_T = at.mask(case.inputs["loss_mask"])
    values_T = at.floats(case.inputs["values"]).requires_grad_()
    old_T, returns_T = at.floats(case.inputs["old_values"]), at.floats(case.inputs["returns"])
    config = CriticConfig(value_clip=maybe(case.params, "value_clip"))
    loss_T = 2 * value_loss(values_T, old_T, returns_T, mask_T, config)[0]
    found: dict[str, Tensor] = {}
    for mode, weigh in {"token_mean": _token_mean, "seq_mean": _mean_over_all_rows}.items():
        loss = (at.rows.spread(weigh(at, mask_T)) * loss_T).sum()
        (grad_T,) = torch.autograd.grad(loss, values_T, retain_graph=True)
        found |= {f"loss_{mode}": loss.detach(), f"grad_values_{mode}": at.back(grad_T)}
    found["loss_seq_mean_over_all_rows"] = found["loss_seq_mean"]
    outside_T = (values_T - old_T).detach().abs() > (torch.inf if config.value_clip is None else config.value_clip)
    found |= {"per_token_loss": at.back(loss_T), "clipfrac_mask": at.back(outside_T)}
    where = at.back(mask_T)
    for key in expected:
        kind = key.partition("_")[0]
        quantity = {"grad": "gradient", "loss": "loss"}.get(kind, "token")
        assert_close(found[key], expected[key], case, quantity, key, where=where if quantity == "token" else None)


def check_error(case: Case) -> None:
    assert case.expected["error"]
    with pytest.raises(LossConfigError, match="form"):
        CriticConfig(form=str(case.params["loss_fn_type"]))


CHECKS: dict[str, Callable[[Case], None]] = {
    "areal_critic": check_areal,
    "skyrl_critic": check_skyrl,
    "verl_critic": check_verl,
    "slime_critic": check_slime,
    "error": check_error,
}
