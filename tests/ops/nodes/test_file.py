from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ops.config import load_config
from ops.nodes.file import is_topology, load_cluster, node_config, this_node
from ops.running.site import site_of
from schemas.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples"
HEAD = """
[[nodes]]
name = "head"
address = "127.0.0.2"
control = true
broker = true
arena = true
trainer = true
fan_out = 1
rewards = 1
launchers = 1
gateways = 1
"""


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
        assert changed == {"run.id", "run.dir", "broker.url", "gateway.host", "engine.host", "engine.count"}


def test_three_nodes_with_servers_are_one_cluster_with_three_replicas(tmp_path) -> None:
    more = "".join(f'\n[[nodes]]\nname = "b{n}"\naddress = "10.0.0.{n}"\nbroker = true\n' for n in (1, 2))
    cluster = cluster_of(tmp_path, HEAD + more, "[broker]\nport = 4300")
    assert cluster.config.broker.url == "nats://127.0.0.2:4300,nats://10.0.0.1:4300,nats://10.0.0.2:4300"
    assert cluster.config.broker.replicas == 3
    server = site_of(cluster, "b1").server
    assert server is not None
    assert (server.host, server.port, server.route_port) == ("10.0.0.1", 4300, 6222)
    assert server.routes == ("nats://127.0.0.2:6222", "nats://10.0.0.1:6222", "nats://10.0.0.2:6222")
    assert server.server_name != site_of(cluster, "b2").server.server_name


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("control = true", "", "control = true on 0 nodes; expected 1"),
        ("trainer = true", "", "trainer = true on 0 nodes; expected 1"),
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
