"""`headrace deploy render | keys`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

from ops.cli.failing import plain_errors
from ops.cli.output import console, write_json
from ops.deploy.plan import Places
from ops.deploy.render import render as render_files
from ops.deploy.render import write_all
from ops.nodes.file import load_cluster
from ops.redaction import masked_places
from ops.secrets import make_secrets

app = cyclopts.App(name="deploy", help="Files that run a topology under Slurm, systemd or Kubernetes.")
_DEFAULT = Places()


@app.command
def render(
    topology: str,
    /,
    *,
    to: Literal["slurm", "systemd", "kubernetes"],
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    headrace: str = _DEFAULT.headrace,
    nats_server: str = _DEFAULT.nats_server,
    etc: str = _DEFAULT.etc,
    state: str = _DEFAULT.state,
    image: str = _DEFAULT.image,
    json: bool = False,
) -> int:
    """Write the files that run a topology: job script, units or manifests, with the NATS servers' configuration. Secrets are
    named in them, by file or variable; a config that holds some itself is copied as it is, and that is told.

    Examples:
        headrace deploy render cluster.toml --to slurm -o deploy
        headrace deploy render cluster.toml --to kubernetes -o deploy --image registry.example/headrace:1

    Parameters
    ----------
    topology
        A topology file (TOML).
    to
        What runs them.
    output
        Folder for the files; its README.md says what goes where.
    headrace
        slurm, systemd: path of the command on the machines.
    nats_server
        systemd: path of nats-server on the machines.
    etc
        systemd, kubernetes: folder of topology, config, certificates and passwords there.
    state
        systemd, kubernetes: folder of what the run writes there.
    image
        kubernetes: an image that has headrace.
    json
        One JSON object: files, plain (places of the copied config that hold what looks secret).
    """
    places = Places(headrace=headrace, nats_server=nats_server, etc=etc, state=state, image=image)
    with plain_errors(OSError):
        cluster = load_cluster(topology)
        written = write_all(render_files(cluster, to, places), output)
    plain = masked_places(cluster.config)
    if plain:
        sys.stderr.write(
            f"headrace: config.toml is copied as it is, and holds in plain what looks secret: {', '.join(plain)}. "
            "Whoever reads these files reads it: keep them so, or give the streams by arena.streams_env\n"
        )
    if json:
        write_json({"files": [str(path) for path in written], "plain": plain})
    else:
        for path in written:
            console().print(str(path), markup=False)
    return 0


@app.command
def keys(file: Path, /) -> int:
    """Make the keys that all nodes of a topology share: copy the file to each of them. An existing file is left as it is.

    Parameters
    ----------
    file
        Where they are written (mode 0600): what the topology names as `secrets`.
    """
    with plain_errors(OSError):
        made = make_secrets(file)
    console().print(f"{file}: {'made' if made else 'stands there already'}", markup=False)
    return 0
