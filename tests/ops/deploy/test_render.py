from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from broker.embedded import find_binary
from ops.cli import main
from ops.deploy.plan import Places
from ops.deploy.render import TARGETS, render, write_all
from ops.nodes.file import load_cluster, rank_group
from schemas.errors import ConfigError

ROOT = Path(__file__).parents[3]
TOPOLOGY = f"""
config = "{ROOT / "examples" / "smoke.toml"}"
set = ['run.id="of_three"', 'arena.url="http://arena.example:8000"']

[[nodes]]
name = "head"
address = "10.0.0.1"
control = true
broker = true
fan_out = 1
rewards = 1

[[nodes]]
name = "store-1"
address = "10.0.0.2"
broker = true

[[nodes]]
name = "gpu_1"
address = "10.0.0.3"
broker = true
trainer = true
gpus = 8

[[nodes]]
name = "rollout-1"
address = "rollout-1.example"
launchers = 2
gateways = 2
"""


@pytest.fixture
def cluster(tmp_path: Path):
    (tmp_path / "three.toml").write_text(TOPOLOGY)
    return load_cluster(tmp_path / "three.toml")


def words(*command: str | Path) -> str:
    """What a checker says; it must find nothing wrong."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_rendered_topologies_are_read_again_with_the_same_nodes(cluster, tmp_path, target: str) -> None:
    files = render(cluster, target, Places())
    if target == "kubernetes":
        texts = [json.loads(text) for text in files["nodes.yaml"].split("---\n") if text.strip()]
        files = next(document["data"] for document in texts if document["kind"] == "ConfigMap")
    write_all(files, tmp_path / "there")
    again = load_cluster(tmp_path / "there" / "topology.toml")
    shares = {node.name: (node.control, node.trainer, node.launchers, node.gateways) for node in again.file.nodes}
    for node in cluster.file.nodes:
        if node.name != "store-1":
            assert shares[node.name] == (node.control, node.trainer, node.launchers, node.gateways)
    assert again.config.sampling == cluster.config.sampling
    assert again.config.broker.replicas == 3
    assert again.config.broker.url.count(",") == 2
    if target != "slurm":
        assert again.config.broker.url.startswith("tls://")
        assert again.config.broker.inbox_prefix == "_INBOX.operator"


@pytest.mark.parametrize("target", TARGETS)
def test_no_rendered_file_holds_a_password(cluster, target: str) -> None:
    for name, text in render(cluster, target, Places()).items():
        for found in re.findall(r"password:\s*(\S+)", text):
            assert found.strip(",").startswith("$HEADRACE_"), (name, found)


def test_secrets_of_the_config_itself_are_told_by_their_places(tmp_path, capsys) -> None:
    given = TOPOLOGY.replace("set = [", """set = ['arena.task_envs={DB_PASS = "x-1"}', """)
    (tmp_path / "three.toml").write_text(given)
    assert main(["deploy", "render", str(tmp_path / "three.toml"), "--to", "systemd", "-o", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().err
    assert "arena.task_envs.DB_PASS" in told
    assert "x-1" not in told


@pytest.mark.parametrize("target", ["slurm", "kubernetes"])
def test_a_local_arena_can_t_be_reached_from_other_hosts(tmp_path, target: str) -> None:
    cluster = load_cluster(ROOT / "examples" / "cluster.toml")
    with pytest.raises(ConfigError, match="the local Arena serves its own machine only"):
        render(cluster, target, Places())


def test_places_must_be_writable_in_all_formats(cluster) -> None:
    with pytest.raises(ConfigError, match="expected an absolute path without spaces"):
        render(cluster, "systemd", Places(etc="/etc/head race"))


@pytest.fixture
def split(tmp_path: Path):
    """The same with a trainer over two nodes."""
    text = TOPOLOGY.replace(
        'name = "store-1"\naddress = "10.0.0.2"\n', 'name = "gpu_0"\naddress = "10.0.0.2"\ntrainer = true\nranks = 2\n'
    )
    text = text.replace("trainer = true\ngpus = 8", "trainer = true\nranks = 6\ngpus = 8")
    settings = 'training.ranks=8", "training.backend=torch", "training.checkpoint_dir=/mnt/shared'
    (tmp_path / "split.toml").write_text(text.replace("set = [", f'set = ["{settings}", '))
    return load_cluster(tmp_path / "split.toml")


@pytest.mark.parametrize("target", TARGETS)
def test_a_trainer_over_several_nodes_keeps_its_ranks(split, tmp_path, target: str) -> None:
    files = render(split, target, Places())
    if target == "kubernetes":
        texts = [json.loads(text) for text in files["nodes.yaml"].split("---\n") if text.strip()]
        jobs = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in texts if one["kind"] == "Job"}
        mounts = {
            name: [mount["mountPath"] for mount in job["containers"][0]["volumeMounts"]] for name, job in jobs.items()
        }
        place = "/var/lib/headrace-checkpoints"
        assert [name for name, places in mounts.items() if place in places] == ["of-three-gpu-0", "of-three-gpu-1"]
        (claim,) = [one for one in texts if one["metadata"]["name"] == "of-three-checkpoints"]
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        files = next(document["data"] for document in texts if document["kind"] == "ConfigMap")
    if target == "systemd":
        assert "RequiresMountsFor=/mnt/shared\n" in files["gpu_1/headrace.service"]
        assert "RequiresMountsFor=/mnt/shared\n" not in files["head/headrace.service"]
    write_all(files, tmp_path / "there")
    again = load_cluster(tmp_path / "there" / "topology.toml")
    group = rank_group(again, again.node("gpu_1"))
    assert (group.first_rank, group.num_ranks, group.world_size, group.leader) == (2, 6, 8, "gpu_0")
    assert again.config.training.checkpoint_dir == (
        "/var/lib/headrace-checkpoints" if target == "kubernetes" else "/mnt/shared"
    )


@pytest.mark.resources
def test_the_batch_script_passes_bash_and_shellcheck(cluster, tmp_path) -> None:
    write_all(render(cluster, "slurm", Places()), tmp_path)
    words("bash", "-n", tmp_path / "headrace.sbatch")
    words("shellcheck", tmp_path / "headrace.sbatch")


@pytest.mark.resources
def test_units_pass_systemd_analyze(cluster, tmp_path) -> None:
    places = Places(headrace="/bin/true", nats_server=str(find_binary()))  # it wants commands that are there
    units = [path for path in write_all(render(cluster, "systemd", places), tmp_path) if path.suffix == ".service"]
    assert len(units) == 6
    for unit in units:
        assert words("systemd-analyze", "verify", "--man=no", unit) == ""


@pytest.mark.resources
def test_manifests_have_the_schemas_of_kubernetes(cluster) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    files = render(cluster, "kubernetes", Places())
    documents = [
        json.loads(text) for name in ("nats.yaml", "nodes.yaml") for text in files[name].split("---\n") if text.strip()
    ]
    kinds = [document["kind"] for document in documents]
    assert (kinds.count("StatefulSet"), kinds.count("Job"), kinds.count("PersistentVolumeClaim")) == (1, 3, 3)
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.mark.resources
def test_nats_takes_every_server_s_configuration(cluster, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_OF_THREE_OPERATOR_PASSWORD", "a")
    monkeypatch.setenv("HEADRACE_OF_THREE_READER_PASSWORD", "b")
    monkeypatch.setenv("HEADRACE_OF_THREE_ROLLOUT_PASSWORD", "c")
    folder = tmp_path / "etc" / "tls"
    folder.mkdir(parents=True)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(folder / "tls.key"))
    words("openssl", "req", "-x509", *key, "-subj", "/CN=nats", "-days", "2", "-out", folder / "tls.crt")
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    files = render(cluster, "systemd", Places(etc=str(tmp_path / "etc"), state=str(tmp_path / "state")))
    configs = [path for path in write_all(files, tmp_path / "out") if path.name == "nats.conf"]
    assert len(configs) == 3
    for config in configs:
        assert "is valid" in words(find_binary(), "-t", "-c", config)
