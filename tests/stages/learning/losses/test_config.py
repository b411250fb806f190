"""Settings that exclude each other are refused by name, before anything starts."""

from dataclasses import replace

import msgspec
import pytest

from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import Distillation, LossConfig, settle
from stages.learning.losses.dppo import Dppo
from stages.learning.losses.errors import LossConfigError, LossInputError
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.importance import Filter
from stages.learning.losses.minibatch import only_rank, prepare_minibatch
from stages.learning.losses.policy import policy_loss
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.reinforce import Likelihood
from stages.learning.losses.sapo import Sapo

REFUSED = {
    "dual_clip": lambda: Ppo(dual_clip=1.0),
    "eps_clip": lambda: Ppo(eps_clip=-0.1),
    "advantage": lambda: Gspo(advantage="rows"),
    "eps_clip_higher": lambda: Cispo(eps_clip_higher=None),
    "tau_pos": lambda: Sapo(tau_pos=0.0),
    "trust region": lambda: Dppo(threshold_low=None, threshold_high=None),
    "filter.upper of metric ratio": lambda: Filter(upper=1.0),
    "filter.lower of metric ratio": lambda: Filter(upper=2.0, lower=0.0),
    "lower 0.2 is above": lambda: Filter(metric="kl_k1", upper=0.1, lower=0.2),
    "use metric ratio": lambda: Filter(action="clamp", metric="kl_k2", upper=0.1),
    "lets everything through": lambda: Filter(upper=None),
    "filter.level": lambda: Filter(level="prompt", upper=2.0),
    "every ratio is 1": lambda: LossConfig(behaviour_weight="token"),
    "filters with proximal = rollout": lambda: LossConfig(proximal="rollout", filters=(Filter(upper=2.0),)),
    "behaviour_weight = none: set one": lambda: LossConfig(
        proximal="recompute", filters=(Filter(action="zero", upper=2.0),)
    ),
    "nothing to normalise": lambda: LossConfig(normalise_weight=True),
    "normalise_weight takes a mean": lambda: LossConfig(
        proximal="loglinear", behaviour_weight="token", normalise_weight=True
    ),
    "m2po_threshold needs proximal = recompute": lambda: LossConfig(m2po_threshold=0.04),
    "entropy_coef": lambda: LossConfig(entropy_coef=float("nan")),
    "distillation with method likelihood": lambda: LossConfig(method=Likelihood(), distillation=Distillation(coef=1.0)),
    "proximal is 'recomputed'": lambda: LossConfig(proximal="recomputed"),
}


@pytest.mark.parametrize(("words", "make"), REFUSED.items(), ids=list(REFUSED))
def test_a_combination_without_meaning_is_refused_by_name(words, make):
    with pytest.raises(LossConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_a_method_takes_the_settings_of_one_method_only():
    with pytest.raises(msgspec.ValidationError, match="tau_pos"):
        msgspec.convert({"method": {"kind": "cispo", "eps_clip_higher": 4.0, "tau_pos": 1.0}}, LossConfig)


def test_settings_come_back_from_their_own_serialised_form(any_config):
    assert msgspec.convert(msgspec.to_builtins(any_config), LossConfig) == any_config


def test_reuse_train_forces_one_mini_batch_and_says_so():
    found = settle(LossConfig(proximal="reuse_train"), aggregation="token_mean", num_minibatches=4)
    assert found.num_minibatches == 1
    assert "instead of 4" in found.warnings[0]


def test_a_distillation_term_needs_the_token_mean():
    with pytest.raises(LossConfigError, match="seq_mean"):
        settle(LossConfig(distillation=Distillation(coef=0.1)), aggregation="seq_mean", num_minibatches=1)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("decoupled", "prox_logp_T"),
        ("kl penalty", "ref_logp_T"),
        ("kdrl", "teacher_logp_T"),
        ("entropy", "entropy_T"),
        ("loglinear", "versions_T"),
    ],
)
def test_a_missing_input_is_named(configs, make_batch, name, field):
    logp_T, batch = make_batch()
    without = replace(batch, **{field: None, "prox_logp_T": None})
    with pytest.raises(LossInputError, match=field):
        policy_loss(logp_T, without, configs[name])


@pytest.mark.parametrize("name", ["m2po", "kl_cov", "normalised"])
def test_a_rule_over_the_mini_batch_must_have_run(configs, make_batch, name):
    logp_T, batch = make_batch()
    with pytest.raises(LossInputError, match="prepare_minibatch"):
        policy_loss(logp_T, batch, configs[name])
    policy_loss(logp_T, prepare_minibatch([batch], configs[name], only_rank)[0], configs[name])
