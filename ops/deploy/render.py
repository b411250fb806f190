"""A topology as files of a system that runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ops.deploy.kubernetes import render_kubernetes
from ops.deploy.plan import USERS, Places, checked_place, password_env
from ops.deploy.slurm import render_slurm
from ops.deploy.systemd import render_systemd
from ops.nodes.file import Cluster
from schemas.errors import ConfigError

TARGETS: Final = ("slurm", "systemd", "kubernetes")


def render(cluster: Cluster, target: str, places: Places) -> dict[str, str]:
    """File name → text, with a README that says what goes where and which secrets are made by hand.

    Raises:
        ConfigError: a target that is not known, or a topology that it can't run.
    """
    for place in (places.headrace, places.nats_server, places.etc, places.state):
        checked_place(place)
    match target:
        case "slurm":
            return {**render_slurm(cluster, places), "README.md": _SLURM.format(run=cluster.config.run.id)}
        case "systemd":
            files = render_systemd(cluster, places)
            return {**files, "README.md": _SYSTEMD.format(**_words(cluster, places))}
        case "kubernetes":
            files = render_kubernetes(cluster, places)
            return {**files, "README.md": _KUBERNETES.format(**_words(cluster, places))}
        case _:
            raise ConfigError(f"--to {target}: expected one of {', '.join(TARGETS)}")


def write_all(files: dict[str, str], folder: Path) -> list[Path]:
    """Write rendered files; no secret is among them.

    Raises:
        OSError: the folder can't be written.
    """
    written: list[Path] = []
    for name, text in sorted(files.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _words(cluster: Cluster, places: Places) -> dict[str, str]:
    run = cluster.config.run.id
    return {
        "run": run,
        "etc": places.etc,
        "names": ", ".join(f"{password_env(run, role)}=…" for role in USERS),
    }


_SLURM = """# Run {run} under Slurm

Put this folder where all hosts of the job see it, with the folders that the config names, then in it:

    sbatch headrace.sbatch

A trainer over several nodes writes its checkpoints to `training.checkpoint_dir`, which all hosts must see. Certificates that the topology's
`[broker]` names lie where it says, relative to this folder.

The control node makes `secrets.json` (mode 0600). The same command resumes the run; `scancel --signal=TERM --batch JOB` ends it in
good order.
"""

_SYSTEMD = """# Run {run} under systemd

Every machine: a user `headrace`, headrace installed, and in `{etc}` (owned by root, group headrace, mode 0750):

- `topology.toml`, `config.toml` from here
- `secrets.json`: made once with `headrace deploy keys secrets.json`, the same on all (mode 0640)
- `passwords/USER` (mode 0640): the password of the node's NATS user, which topology.toml names (`broker_user`): `operator` where the run is
  controlled or trained, `rollout` elsewhere; `reader` is for people who only look
- `tls/ca.crt`: the authority of the NATS servers' certificates
- `NODE/headrace.service` goes to /etc/systemd/system

Machines that share a trainer's ranks: `training.checkpoint_dir` on a file system that all of them mount; the unit waits for it. Their
firewalls let each other through, on all ports: the ranks' own connections have any.

Machines with a NATS server, too:

- `NODE/nats.conf` to `{etc}/nats.conf`, `NODE/headrace-nats.service` to /etc/systemd/system
- `nats.env` (mode 0600): {names}; the same on all
- `tls/tls.crt`, `tls/tls.key`: a certificate for the machine's address, for server and client use

Then `systemctl enable --now headrace-nats` on those, and `systemctl enable --now headrace` everywhere. `systemctl stop headrace` lets a
node leave; `headrace down {etc}/topology.toml` ends the run.
"""

_KUBERNETES = """# Run {run} on Kubernetes

The image holds headrace and runs as user 1000. Secrets, once in the namespace:

    headrace deploy keys secrets.json
    kubectl create secret generic headrace-keys --from-file=secrets.json
    kubectl create secret generic headrace-nats-passwords --from-literal=operator=… --from-literal=rollout=… --from-literal=reader=…
    kubectl create secret generic headrace-nats-tls --from-file=ca.crt --from-file=tls.crt --from-file=tls.key
    kubectl create secret generic headrace-environment --from-env-file=node.env    # credentials of the Arena; optional

The certificate is for `*.headrace-nats`, for server and client use. Then:

    kubectl apply -f nats.yaml -f nodes.yaml

Nodes take part as soon as most of the NATS servers are there, and their Jobs end with the run. A node leaves with `kubectl delete job NAME` and
comes back with `kubectl apply`; its volume stays. A trainer over several nodes needs a storage class with ReadWriteMany for its
checkpoints. 50 GiB a volume: change that to what the policy's checkpoints need.
"""
