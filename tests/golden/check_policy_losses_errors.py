"""Settings that references refuse, and their one defect: all are refused here too, unless this project has what they leave out."""

from collections.abc import Callable

import msgspec
import pytest
from check_policy_losses_verl import rs_filters, verl_weights
from golden_case import Case, Fields
from loss_cases import layout

from stages.learning.losses.config import LossConfig
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.importance import Filter, admit
from stages.learning.rows import Rows


def check_error(case: Case) -> None:
    if case.defect:
        weights = verl_weights(case)
        assert float(weights.abs().sum()) == 0.0
        return
    assert case.expected["error"]
    params, inputs = case.params, case.inputs
    if "old_logprobs" in inputs and _needs_rows(params):
        _check_rows_are_required(case)
    elif "rollout_is" in params:
        with pytest.raises((AssertionError, ValueError)):
            verl_weights(case)
        _all_read(case)
    elif "rollout_rs" in params:
        with pytest.raises((KeyError, ValueError)):
            rs_filters(params)
        _all_read(case)
    elif _offered_here(params):
        _build(params)
    else:
        with pytest.raises((LossConfigError, msgspec.ValidationError)):
            _build(params)
        _all_read(case)


def _offered_here(params: Fields) -> bool:
    """Settings that the reference refuses by choice and this project has: binary KL, and SAPO against a proximal policy."""
    alone = params.get("use_sapo_loss") and not params.get("use_cispo_loss")
    return (params.get("metric") == "binary_kl" and params.get("action") != "clamp") or bool(
        alone and params.get("use_decoupled_loss")
    )


def _needs_rows(params: Fields) -> bool:
    level = params.get("level") or params.get("importance_sampling_level")
    return level == "sequence" or params.get("loss_aggregation") in {"seq_mean", "prompt_mean", "constant"}


def _all_read(case: Case) -> None:
    """Settings were refused: nothing else of the case matters."""
    case.params.without_effect(*case.params)
    case.inputs.without_effect(*case.inputs)


def _build(params: Fields) -> object:
    """The settings of a case without data, as this project would be given them."""
    params.without_effect("use_decoupled_loss")
    if "metric" in params or "level" in params:
        given = {"agg" if key == "aggregation" else key: params[key] for key in params if params.get(key) is not None}
        given["aggregation"] = given.pop("agg", "mean")
        return msgspec.convert({"upper": 2.0} | given, Filter)
    flags = {"cispo": params.get("use_cispo_loss"), "sapo": params.get("use_sapo_loss")}
    kinds = [kind for kind, wanted in flags.items() if wanted]
    if not kinds:
        bare_cispo = "eps_clip_higher" in params and "c_clip" not in params
        kinds = ["sapo" if "tau_pos" in params else "cispo" if bare_cispo else "ppo"]
    fields: dict[str, object] = {}
    for kind in kinds:  # two methods: the settings of both, which no method takes
        fields |= {"kind": kind, **_fields(params, kind)}
    params.without_effect(*params)
    return msgspec.convert({"method": fields}, LossConfig)


def _fields(params: Fields, kind: str) -> dict[str, object]:
    renamed = {
        "c_clip": "dual_clip",
        "clip_ratio_c": "dual_clip",
        "eps_clip_c": "dual_clip",
        "clip_ratio": "eps_clip",
        "importance_sampling_level": "level",
        "sapo_tau_pos": "tau_pos",
        "sapo_tau_neg": "tau_neg",
    }
    found = {renamed.get(key, key): params[key] for key in params if not key.startswith("use_")}
    if kind == "sapo":
        return {"tau_pos": 1.0, "tau_neg": 1.05} | {
            key: found[key] for key in ("tau_pos", "tau_neg", "level") if key in found
        }
    # A cap of None is the error in question; other values that are not given stay away.
    return {
        key: value
        for key, value in found.items()
        if value is not None or (kind == "cispo" and key == "eps_clip_higher")
    }


def _check_rows_are_required(case: Case) -> None:
    """Row-level settings can't run without rows here: a batch has them by construction."""
    _all_read(case)
    at = layout(case)
    mask_T = at.mask(case.inputs["loss_mask"])
    logp_T = at.floats(case.inputs["old_logprobs"])
    with pytest.raises(TypeError, match="rows"):
        admit(logp_T, logp_T, mask_T, filters=(), weight="none")
    with pytest.raises(TypeError, match="num_rows"):
        Rows(row_T=mask_T.long())


CHECKS: dict[str, Callable[[Case], None]] = {"error": check_error}
