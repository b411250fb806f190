from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from topologies import ROLLS_OUT, head

from ops.config import load_config
from ops.logtools.recorded import config_of
from ops.nodes.file import is_topology, load_cluster, node_config, this_node
from ops.running.site import site_of
from schemas.errors import ConfigError
from schemas.messages.sampling import RunStarted

EXAMPLES = Path(__file__).parents[3] / "examples"
HEAD = head(*ROLLS_OUT)


def cluster_of(tmp_path: Path, nodes: str = HEAD, more: str = "", **options):
    file = tmp_path / "topology.toml"
    file.write_text(f'config = "{EXAMPLES / "smoke.toml"}"\n{more}\n{nodes}')
    return load_cluster(file, **options)


def paths_of(tree: object, path: str = "") -> dict[str, object]:
    if isinstance(tree, dict):
        return {key: value for name, child in tree.items() for key, value in paths_of(child, f"{path}.{name}").items()}
    return {path.removeprefix("."): tree}


def test_nodes_of_the_example_have_the_quickstart_s_config_but_for_addresses_counts_and_names() -> None:
    cluster = load_cluster(EXAMPLES / "cluster.toml")
    alone = paths_of(msgspec.to_builtins(load_config(EXAMPLES / "quickstart.toml")))
    for node in cluster.file.nodes:
        told = paths_of(msgspec.to_builtins(node_config(cluster, node)))
        changed = {path for path in alone.keys() | told.keys() if alone.get(path) != told.get(path)}
        assert changed == {"run.id", "run.dir", "broker.url", "gateway.host", "engine.host"}


def test_every_node_s_config_can_be_read_again_from_the_run_s_log() -> None:
    cluster = load_cluster(EXAMPLES / "cluster.toml")
    for node in cluster.file.nodes:
        config = node_config(cluster, node)
        started = RunStarted(ordinal=0, config_json=msgspec.json.encode(config), config_digest="", headrace_version="")
        assert config_of(started) == config


def test_three_nodes_with_servers_are_one_cluster_with_three_replicas(tmp_path) -> None:
    more = "".join(f'\n[[nodes]]\nname = "b{n}"\naddress = "10.0.0.{n}"\nbroker = true\n' for n in (1, 2))
    cluster = cluster_of(tmp_path, HEAD + more, "[broker]\nport = 4300")
    assert cluster.config.broker.url == "nats://127.0.0.2:4300,nats://10.0.0.1:4300,nats://10.0.0.2:4300"
    assert cluster.config.broker.replicas == 3
    server = site_of(cluster, "b1").server
    assert server is not None
    assert (server.host, server.port, server.route_port) == ("10.0.0.1", 4300, 6222)
    assert server.routes == ("nats://127.0.0.2:6222", "nats://10.0.0.2:6222")
    assert server.server_name != site_of(cluster, "b2").server.server_name


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("control = true", "", "control = true on 0 nodes; expected 1"),
        ("trainer = true", "", "trainer = true on 0 nodes; expected 1 or more"),
        (
            "trainer = true",
            "trainer = true\nranks = 2",
            r"expected 1 \(training.ranks\) over all nodes .* found head 2",
        ),
        ("trainer = true", "ranks = 1", "nodes.ranks of head: expected trainer = true beside it"),
        ("arena = true", "", "arena = true on 0 nodes; expected 1"),
        ("broker = true", "", r"broker = true on 0 nodes; expected 1, 3 or 5 nodes \(broker.url is embedded\)"),
        ("launchers = 1", "", "no node has launchers"),
        ("gateways = 1", "gateways = -1", "nodes.gateways of head: expected 0 or more, found -1"),
        ("gateways = 1", "gateways = 1\nengines = 1", "engine.kind is scripted, which is in each gateway"),
        ('name = "head"', 'name = "he ad"', "nodes.name 'he ad'"),
        ("127.0.0.2", "http://h", "expected a host name or an IP address"),
        ("fan_out = 1", "fanout = 1", "unknown key"),
    ],
)
def test_a_topology_that_can_t_work_is_refused_by_name(tmp_path, old: str, new: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        cluster_of(tmp_path, HEAD.replace(old, new))


def test_nodes_have_names_of_their_own(tmp_path) -> None:
    with pytest.raises(ConfigError, match="'head' stands there twice"):
        cluster_of(tmp_path, HEAD + '[[nodes]]\nname = "head"\naddress = "127.0.0.3"\n')


def test_servers_of_nodes_and_somebody_else_s_broker_exclude_each_other(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"expected none: broker.url is nats://elsewhere:4222"):
        cluster_of(tmp_path, more="""set = ['broker.url="nats://elsewhere:4222"']""")


def test_an_address_may_be_told_when_the_node_starts(tmp_path) -> None:
    cluster = cluster_of(tmp_path, addresses={"head": "10.1.2.3"})
    assert cluster.config.broker.url == "nats://10.1.2.3:4222"
    assert node_config(cluster, cluster.node("head")).gateway.host == "10.1.2.3"
    with pytest.raises(ConfigError, match="--address other=…: expected a node of head"):
        cluster_of(tmp_path, addresses={"other": "10.1.2.3"})


def test_the_node_is_found_by_this_machine_s_address(tmp_path) -> None:
    here = cluster_of(tmp_path, addresses={"head": "127.0.0.1"})
    assert this_node(here).name == "head"
    with pytest.raises(ConfigError, match=r"none of the nodes by its addresses; say which with --node \(head\)"):
        this_node(cluster_of(tmp_path, addresses={"head": "192.0.2.1"}))


def test_a_topology_is_told_from_a_config() -> None:
    assert is_topology(EXAMPLES / "cluster.toml")
    assert not is_topology(EXAMPLES / "quickstart.toml")
    assert not is_topology(EXAMPLES)


TLS = """
[broker]
tls_cert_file = "tls/{node}.crt"
tls_key_file = "tls/{node}.key"
tls_ca_file = "tls/ca.crt"
"""


def test_servers_of_nodes_have_tls_with_certificates_of_their_own(tmp_path) -> None:
    cluster = cluster_of(tmp_path, more=TLS)
    server, config = site_of(cluster, "head").server, site_of(cluster, "head").config
    assert server is not None
    assert server.tls_cert_file == str(tmp_path / "tls" / "head.crt")
    assert config.broker.url == "tls://127.0.0.2:4222"
    assert config.broker.tls_ca_file == str(tmp_path / "tls" / "ca.crt")
    assert config.broker.tls_cert_file == ""
    asked = site_of(cluster_of(tmp_path, more=f"{TLS}tls_verify_clients = true"), "head").config.broker
    assert (asked.tls_cert_file, asked.tls_key_file) == (str(tmp_path / "tls/head.crt"), str(tmp_path / "tls/head.key"))


@pytest.mark.parametrize("left_out", ["tls_cert_file", "tls_key_file", "tls_ca_file"])
def test_tls_is_whole_or_not_there(tmp_path, left_out: str) -> None:
    lines = [line for line in TLS.splitlines() if not line.startswith(left_out)]
    with pytest.raises(
        ConfigError, match=f"TLS needs tls_cert_file, tls_key_file and tls_ca_file; found no {left_out}"
    ):
        cluster_of(tmp_path, more="\n".join(lines))


def trainers(*ranks: int) -> str:
    return HEAD.replace("trainer = true", "") + "".join(
        f'[[nodes]]\nname = "gpu-{n}"\naddress = "10.0.0.{n}"\ntrainer = true\nranks = {count}\n'
        for n, count in enumerate(ranks)
    )


def training(ranks: int, checkpoints: str = "/shared", backend: str = "torch") -> str:
    values = {"ranks": ranks, "checkpoint_dir": f'"{checkpoints}"', "backend": f'"{backend}"'}
    return f"set = {[f'training.{key}={value}' for key, value in values.items()]}"


def test_ranks_of_a_trainer_are_shared_out_over_its_nodes(tmp_path) -> None:
    cluster = cluster_of(tmp_path, trainers(3, 1), training(4))
    assert site_of(cluster, "head").share.ranks is None
    groups = [site_of(cluster, f"gpu-{n}").share.ranks for n in (0, 1)]
    assert [(group.first_rank, group.num_ranks, group.world_size, group.leads) for group in groups] == [
        (0, 3, 4, True),
        (3, 1, 4, False),
    ]
    assert {(group.master, group.port) for group in groups} == {("10.0.0.0", 29500)}
    assert [site_of(cluster, f"gpu-{n}").share.trainer for n in (0, 1)] == [True, False]  # weights come from rank 0's
    even = cluster_of(tmp_path, trainers(0, 0), training(4))
    assert [site_of(even, f"gpu-{n}").share.ranks.num_ranks for n in (0, 1)] == [2, 2]


@pytest.mark.parametrize(
    ("ranks", "settings", "text"),
    [
        ((2, 0), training(4), r"expected 4 \(training.ranks\) over all nodes .*; found gpu-0 2, gpu-1 0"),
        ((2, 1), training(4), "found gpu-0 2, gpu-1 1"),
        ((0, 0), training(3), "training.ranks = 3 can't be shared equally by 2 nodes"),
        ((0, 0), training(2, backend="standin"), "training.backend = standin has one rank"),
        (
            (0, 0),
            training(2, checkpoints=""),
            "training.checkpoint_dir: .* expected a folder that all of gpu-0, gpu-1 share",
        ),
    ],
)
def test_ranks_that_can_t_be_shared_out_are_refused(tmp_path, ranks, settings: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        cluster_of(tmp_path, trainers(*ranks), settings)
