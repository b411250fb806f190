"""A run on several machines: who runs what (TOPOLOGY.toml), each node's share, and what a person asks of a node."""
