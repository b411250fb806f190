"""Command lines of servers, as data."""

import msgspec
import pytest
import yaml

from ops.engines.commands import ServerSettings, key_file_text, server_command
from schemas.config import EngineKind
from schemas.errors import ConfigError


def value_after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_vllm_answers_with_ids_and_log_probs_at_the_requests_temperature():
    argv, env = server_command(EngineKind.VLLM, ServerSettings(model="/m", port=7001, max_context=256, python="py"))
    assert argv[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert value_after(argv, "--logprobs-mode") == "processed_logprobs"
    assert "--enable-scale-out" in argv
    assert value_after(argv, "--max-model-len") == "256"
    assert (value_after(argv, "--host"), value_after(argv, "--port")) == ("127.0.0.1", "7001")
    assert env["VLLM_SERVER_DEV_MODE"] == env["HF_HUB_OFFLINE"] == env["OMP_NUM_THREADS"] == "1"


def test_sglang_without_gpu_kernels_finds_its_stubs_first():
    argv, env = server_command(EngineKind.SGLANG, ServerSettings(model="/m", port=7001, stubs="/s"))
    assert value_after(argv, "--device") == "cpu"
    assert (env["PYTHONPATH"], env["SGLANG_USE_CPU_ENGINE"]) == ("/s/sglang", "1")


def test_vllm_on_cpus_has_the_extension_that_packs_tied_heads_again():
    argv, env = server_command(EngineKind.VLLM, ServerSettings(model="/m", port=7001, stubs="/s"))
    assert value_after(argv, "--worker-extension-cls") == "headrace_vllm.WholeReload"
    assert env["PYTHONPATH"] == "/s/vllm"
    argv, env = server_command(EngineKind.VLLM, ServerSettings(model="/m", port=7001, stubs="/s", device="cuda"))
    assert "--worker-extension-cls" not in argv
    assert "PYTHONPATH" not in env


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG])
def test_a_gpu_server_sees_its_own_devices_and_no_cpu_flags(kind):
    settings = ServerSettings(model="/m", port=7001, device="cuda", gpu_ids=("2", "3"), dtype="bfloat16")
    argv, env = server_command(kind, settings)
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert value_after(argv, "--tensor-parallel-size" if kind is EngineKind.VLLM else "--tp-size") == "2"
    assert not {"--enforce-eager", "--device", "--kv-cache-memory-bytes", "--max-total-tokens"} & set(argv)
    assert "SGLANG_USE_CPU_ENGINE" not in env


def test_a_launcher_and_more_arguments_take_their_places():
    settings = ServerSettings(
        model="/m",
        port=7001,
        launcher=("vllm", "serve"),
        extra_args=("--seed", "3"),
        extra_env={"OMP_NUM_THREADS": "4"},
    )
    argv, env = server_command(EngineKind.VLLM, settings)
    assert (argv[:3], argv[-2:]) == (["vllm", "serve", "--model"], ["--seed", "3"])
    assert env["OMP_NUM_THREADS"] == "4"


def test_vllms_key_stays_out_of_its_command_line():
    argv, env = server_command(EngineKind.VLLM, ServerSettings(model="/m", port=7001, api_key="k-123"))
    assert env["VLLM_API_KEY"] == "k-123"
    assert "k-123" not in " ".join(argv)


def test_sglangs_key_stays_out_of_its_command_line():
    settings = ServerSettings(model="/m", port=7001, stubs="/s", api_key="k: #123", key_file="/run/engine-1.key.yaml")
    argv, env = server_command(EngineKind.SGLANG, settings)
    assert argv[argv.index("--config") + 1] == "/run/engine-1.key.yaml"
    assert "k: #123" not in " ".join([*argv, *env.values()])
    assert yaml.safe_load(key_file_text("k: #123")) == {"api-key": "k: #123"}
    with pytest.raises(ConfigError, match="a file that holds it"):
        server_command(EngineKind.SGLANG, msgspec.structs.replace(settings, key_file=""))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (EngineKind.BUILTIN, ServerSettings(model="/m", port=1), "vllm, sglang"),
        (EngineKind.VLLM, ServerSettings(model="/m", port=1, device="tpu"), "cpu or cuda"),
        (EngineKind.VLLM, ServerSettings(model="/m", port=1, gpu_ids=("0",)), "device cpu"),
    ],
)
def test_what_cannot_be_started_is_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        server_command(kind, settings)


@pytest.mark.parametrize(("kind", "flag"), [("vllm", "--enable-sleep-mode"), ("sglang", "--enable-memory-saver")])
def test_a_server_that_shares_an_accelerator_with_a_trainer_is_started_so_that_it_can_sleep(kind, flag):
    for can_sleep in (True, False):
        argv, _ = server_command(
            EngineKind(kind), ServerSettings(model="m", port=1, device="cuda", gpu_ids=("0",), can_sleep=can_sleep)
        )
        assert (flag in argv) is can_sleep


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG])
def test_a_server_takes_adapters_only_where_it_is_to(kind):
    argv, _ = server_command(kind, ServerSettings(model="/m", port=7001))
    assert "--enable-lora" not in argv


def test_vllm_keeps_twice_the_adapters_that_it_computes_with_and_rounds_the_rank_up():
    settings = ServerSettings(model="/m", port=7001, adapter_rank=12, adapter_targets=("q_proj",))
    argv, env = server_command(EngineKind.VLLM, settings)
    assert value_after(argv, "--max-lora-rank") == "16"
    assert int(value_after(argv, "--max-cpu-loras")) == 2 * int(value_after(argv, "--max-loras"))
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with pytest.raises(ConfigError, match=r"up to rank 512, found 513"):
        server_command(EngineKind.VLLM, ServerSettings(model="/m", port=7001, adapter_rank=513))


def test_sglang_is_told_which_matrices_get_adapters_and_computes_them_without_gpu_kernels_on_cpus():
    settings = ServerSettings(model="/m", port=7001, adapter_rank=12, adapter_targets=("q_proj", "up_proj"))
    argv, _ = server_command(EngineKind.SGLANG, settings)
    at = argv.index("--lora-target-modules")
    assert argv[at : at + 4] == ["--lora-target-modules", "q_proj", "up_proj", "--max-loras-per-batch"]
    assert value_after(argv, "--max-lora-rank") == "12"
    assert value_after(argv, "--lora-backend") == "torch_native"
    argv, _ = server_command(EngineKind.SGLANG, msgspec.structs.replace(settings, device="cuda"))
    assert "--lora-backend" not in argv
