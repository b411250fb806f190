"""Whether a run's streams and durables stand on its broker as its config declares. Nothing is changed."""

from __future__ import annotations

import msgspec

from broker.connect import open_admin
from broker.errors import BrokerError
from ops.config import RunConfig
from ops.connection import broker_login
from ops.doctor.checks import Finding, ok, warning
from ops.run_folder import RunFolder
from ops.topology import declared_topology


async def check_topology(config: RunConfig) -> list[Finding]:
    """Nothing for an embedded broker: the run makes and checks its own."""
    if not config.broker.url.startswith(("nats://", "tls://")):
        return []
    login = broker_login(config.broker, RunFolder(config.run.dir))
    try:
        async with open_admin(config.broker.url, msgspec.structs.replace(login, connect_deadline_s=5.0)) as admin:
            lines = await admin.diff(declared_topology(config))
    except BrokerError as error:
        return [warning("topology", str(error), "see that the broker answers and that these credentials may ask it")]
    if not lines:
        return [ok("topology", f"streams and durables of run {config.run.id!r} stand as declared")]
    if all(line.endswith(": missing") for line in lines):
        return [
            ok(
                "topology",
                f"{len(lines)} streams and durables are made when the run starts, or by headrace broker apply",
            )
        ]
    fix = "headrace broker apply CONFIG --update changes it; or take another run.id"
    return [warning("topology", line, fix) for line in lines if not line.endswith(": missing")]
