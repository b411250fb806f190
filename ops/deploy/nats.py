"""Configuration of the NATS servers under a run: one cluster, TLS for clients and among servers, an account and users for the run.

Passwords are named by environment variables of the server; no file holds one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from broker.rights import User, account_config
from ops.deploy.plan import USERS, Places, password_env, user_permissions

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


def nats_config(
    run: str,
    places: Places,
    *,
    name: str,
    host: str,
    port: int,
    cluster_port: int,
    routes: Sequence[str],
    max_store_bytes: int,
) -> str:
    """One server's configuration.

    Args:
        run: whose account it has.
        name: the server's, its own in the cluster; `$NAME` is taken from its environment.
        host: where it listens.
        routes: host:port of every other server of the cluster, or of all where they share one configuration (their first start then
            waits for all of them); one or none: it is a server alone.
    """
    users = [
        User(
            name=role.value,
            password="",
            password_env=password_env(run, role),
            permissions=user_permissions(role, run),
        )
        for role in USERS
    ]
    tls = f'cert_file: "{places.etc}/tls/tls.crt", key_file: "{places.etc}/tls/tls.key", ca_file: "{places.etc}/tls/ca.crt"'
    lines = [
        "# Rendered by `headrace deploy render`. Passwords come from the server's environment; a value that could be read as a",
        "# number or holds spaces stands in double quotes there.",
        f"server_name: {name if name.startswith('$') else json.dumps(name)}",
        f"listen: {json.dumps(f'{host}:{port}')}",
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        "write_deadline: 10s",
        f"tls {{ {tls} }}",
        "jetstream {",
        f"  store_dir: {json.dumps(f'{places.state}/nats')}",
        f"  max_file: {max_store_bytes}",
        "}",
    ]
    if len(routes) > 1:
        lines += [
            "cluster {",
            "  name: headrace",
            f"  listen: {json.dumps(f'{host}:{cluster_port}')}",
            "  no_advertise: true",
            f"  tls {{ {tls}, verify: true }}  # a server of this cluster shows a certificate of the same authority",
            f"  routes: [{', '.join(json.dumps(f'nats://{route}') for route in routes)}]",
            "}",
        ]
    return "\n".join(lines) + "\naccounts {\n" + account_config(run, users) + "}\n"
