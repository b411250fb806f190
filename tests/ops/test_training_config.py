"""[training]: what is refused before anything starts, and what the backends are made from."""

from __future__ import annotations

import pytest

from ops.config import assembly_settings, decode_config
from ops.training_checks import publishes_adapter
from ops.workers.torch_trainer import check_learning, model_settings, optimizer_settings
from schemas.errors import ConfigError
from stages.learning.update import learning_rate


def config(training=None, **sections):
    return decode_config({"streams": [{"name": "a", "stream_id": "a"}], "training": training or {}, **sections})


GAE = {"assembly": {"estimator": {"name": "gae"}}}


@pytest.mark.parametrize(
    ("training", "sections", "words"),
    [
        ({"dtype": "float16"}, {}, r"training\.dtype: expected one of 'float32', 'bfloat16'"),
        ({"fsdp2": {"compute_type": "bfloat16"}}, {}, r"training\.fsdp2\.compute_type: unknown key; did you mean"),
        ({"schedule": "cosine"}, {}, r"training\.total_steps: schedule cosine expected more than warmup_steps"),
        ({"critic": {"enabled": True}}, {}, r"only estimator gae uses a critic"),
        ({}, GAE, r"gae needs a critic: set training\.critic\.enabled"),
        ({"megatron": {"tensor_parallel": 2}}, {}, r"expected backend = megatron, found torch"),
        ({"megatron": {"pipeline_parallel": 2}}, {}, r"pipeline_parallel: expected backend = megatron, found torch"),
        ({"megatron": {"pipeline_parallel": 0}}, {}, r"megatron\.pipeline_parallel: expected at least 1, found 0"),
        (
            {"backend": "megatron", "ranks": 3, "megatron": {"tensor_parallel": 2}},
            {},
            r"training\.ranks: expected a multiple of megatron\.tensor_parallel \(2\) · pipeline_parallel \(1\), found 3",
        ),
        (
            {
                "backend": "megatron",
                "ranks": 2,
                "megatron": {"tensor_parallel": 2},
                "lora": {"enabled": True, "dropout": 0.1},
            },
            {},
            r"training\.lora\.dropout: expected 0 where megatron\.tensor_parallel is 2 .*, found 0\.1",
        ),
        ({"lora": {"rank": 0}}, {}, r"training\.lora\.rank: expected at least 1"),
        ({"lora": {"publish": "both"}}, {}, r"training\.lora\.publish: expected one of 'auto', 'adapter', 'merged'"),
    ],
)
def test_what_can_not_work_is_refused_without_torch(training, sections, words):
    with pytest.raises(ConfigError, match=words):
        config(training, **sections)


@pytest.mark.parametrize(
    ("training", "loss", "words"),
    [
        ({"advantages": {"discont": 1.0}}, {}, r"training\.advantages\.discont: unknown key; did you mean 'discount'"),
        ({"advantages": {"discount": 2.0}}, {}, r"training\.advantages: discount: expected 0 to 1"),
        (
            {"advantages": {"kl_reward": {"coef": -1.0}}},
            {},
            r"training\.advantages\.kl_reward: .*kl_penalty\.coef is -1",
        ),
        ({"reference": "x"}, {}, r"training\.reference: neither loss\.kl_penalty nor"),
        ({"teacher": "x"}, {}, r"loss\.distillation: distillation needs a teacher"),
        ({}, {"distillation": {"coef": 1.0}}, r"training\.teacher: distillation needs a teacher"),
    ],
)
def test_what_only_torch_can_judge_is_refused_before_the_run_starts(training, loss, words):
    with pytest.raises(ConfigError, match=words):
        check_learning(config(training, loss=loss))


def test_a_whole_ppo_run_can_be_configured():
    found = config(
        {
            "backend": "fsdp2",
            "fsdp2": {"compute_dtype": "bfloat16"},
            "critic": {"enabled": True, "learning_rate": 1e-5, "value_clip": 0.0},
            "lora": {"enabled": True, "rank": 8},
            "advantages": {"unit": "turn", "gae_lambda": {"value": 0.95}, "normalisation": {}},
        },
        **GAE,
    )
    check_learning(found)
    models = model_settings(found)
    assert models.fsdp2 is not None
    assert (models.fsdp2.compute_dtype, models.fsdp2.reduce_dtype) == ("bfloat16", "float32")
    assert models.critic is not None
    assert models.critic.loss.value_clip is None
    assert models.critic.optimizer.lr == 1e-5
    assert models.lora is not None
    assert models.lora.rank == 8
    assert models.advantages.unit == "turn"


@pytest.mark.parametrize(
    ("publish", "engine", "alone"),
    [
        ("auto", {"kind": "builtin"}, True),
        ("adapter", {"kind": "builtin"}, True),
        ("merged", {"kind": "builtin"}, False),
        ("auto", {"kind": "vllm"}, True),
        ("auto", {"kind": "sglang"}, True),
        ("merged", {"kind": "vllm"}, False),
        ("auto", {"kind": "vllm", "urls": ["http://h:1"]}, False),
        ("adapter", {"kind": "vllm", "urls": ["http://h:1"]}, True),
    ],
)
def test_an_adapter_is_published_alone_where_the_engine_takes_it(publish, engine, alone):
    found = config({"lora": {"enabled": True, "publish": publish}}, engine=engine)
    assert publishes_adapter(found.training, found.engine) is alone


def test_an_adapter_of_a_rank_that_vllm_does_not_take_is_refused_before_the_run_starts_or_merged():
    found = config({"lora": {"enabled": True, "publish": "adapter", "rank": 1024}}, engine={"kind": "vllm"})
    with pytest.raises(ConfigError, match=r"vLLM takes adapters up to rank 512, found training\.lora\.rank = 1024"):
        check_learning(found)
    found = config({"lora": {"enabled": True, "rank": 1024}}, engine={"kind": "vllm"})
    assert not publishes_adapter(found.training, found.engine)


def test_reusing_the_updates_own_logprobs_makes_one_mini_batch_of_a_step():
    found = config(assembly={"mini_batch_groups": 2}, loss={"proximal": "reuse_train"}, sampling={"groups_per_step": 8})
    check_learning(found)
    assert not assembly_settings(found).mini_batch_groups


def test_the_schedule_is_the_configured_one():
    settings = optimizer_settings(
        config({"learning_rate": 1.0, "schedule": "linear", "warmup_steps": 2, "total_steps": 6, "min_lr_ratio": 0.5})
    )
    assert [learning_rate(settings, update) for update in (0, 2, 6)] == [0.5, 1.0, 0.5]
