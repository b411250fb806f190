"""Topology files of tests: nodes on loopback addresses of one machine, and the file of a run that they make up."""

from __future__ import annotations

import json

ROLLS_OUT = ("launchers = 1", "gateways = 1")
"""Lines of a node that rolls episodes out."""


def node_table(name: str, address: str, *lines: str) -> str:
    """A node's table."""
    return "\n".join(("", "[[nodes]]", f'name = "{name}"', f'address = "{address}"', *lines, ""))


def head(*lines: str, trainer: bool = True) -> str:
    """The node that controls, with all that a run has one of; without a trainer, where others have its ranks."""
    leads = ("control = true", "broker = true", "arena = true", *(("trainer = true",) if trainer else ()))
    return node_table("head", "127.0.0.2", *leads, "fan_out = 1", "rewards = 1", *lines)


def rollout_node(number: int, *lines: str) -> str:
    """One of the nodes that roll out, from 1 on; with other `lines` it does what they say."""
    return node_table(f"rollout-{number}", f"127.0.0.{number + 2}", *(lines or ROLLS_OUT))


def topology(*tables: str, settings: tuple[str, ...] = (), broker: str = "") -> str:
    """The file of a run, with gaps such as `{port}` that `nodes_case.Nodes` fills.

    Args:
        tables: of the nodes, and what stands beside them.
        settings: more than the run's name, folder and steps.
        broker: more lines of `[broker]`.
    """
    told = json.dumps(['run.id="{run}"', 'run.dir="{folder}/{run}"', "run.steps={steps}", *settings])
    top = f'config = "{{config}}"\nset = {told}\nsecrets = "{{run}}.secrets.json"\n'
    return f"{top}\n[broker]\nport = {{port}}\n{broker}\n{''.join(tables)}"
