"""A Slurm batch script: the job's hosts become the nodes of the topology, in its order; `headrace up` runs on each.

The nodes run their NATS servers themselves, with a token out of the keys file, in a folder that all hosts share.
"""

from __future__ import annotations

import shlex

from ops.deploy.plan import Places, config_text, topology_text
from ops.nodes.file import Cluster
from schemas.errors import ConfigError


def render_slurm(cluster: Cluster, places: Places) -> dict[str, str]:
    """File name → text.

    Raises:
        ConfigError: a local Arena, which only its own host could reach.
    """
    nodes = cluster.file.nodes
    if any(node.arena for node in nodes):
        raise ConfigError(
            "the local Arena serves its own machine only: expected arena.url of an Arena that the job's hosts reach"
        )
    control = next(index for index, node in enumerate(nodes) if node.control)
    gpus = max(node.gpus for node in nodes)
    run = cluster.config.run.id
    script = f"""#!/bin/bash
#SBATCH --job-name=headrace-{run}
#SBATCH --nodes={len(nodes)}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{f"#SBATCH --gpus-per-node={gpus}" if gpus else "# no node asks for GPUs"}
#SBATCH --signal=B:TERM@180
#SBATCH --output=%x-%j.log
# Rendered by `headrace deploy render`. Submit it in this folder, which all hosts share: sbatch headrace.sbatch
# The same command resumes the run. More options (account, partition, time) may follow `sbatch`.
set -euo pipefail
umask 077

headrace={shlex.quote(places.headrace)}
names=({" ".join(shlex.quote(node.name) for node in nodes)})
control={control}
mapfile -t hosts < <(scontrol show hostnames "${{SLURM_JOB_NODELIST:?submit it with sbatch}}")

addresses=()
for i in "${{!names[@]}}"; do
  addresses+=(--address "${{names[$i]}}=${{hosts[$i]}}")
done

pids=()
up() {{ # the node with this place
  srun --nodes=1 --ntasks=1 --nodelist="${{hosts[$1]}}" --kill-on-bad-exit=0 \\
    "$headrace" up topology.toml --node "${{names[$1]}}" "${{addresses[@]}}" &
  pids+=($!)
}}

leave() {{ # the job ends soon, or somebody cancels it: end in good order
  for pid in "${{pids[@]}}"; do
    kill -TERM "$pid" 2>/dev/null || true
  done
}}
trap leave TERM INT

up "$control"
until [[ -s secrets.json ]]; do # made by the control node
  kill -0 "${{pids[0]}}" || exit 1
  sleep 1
done
for i in "${{!names[@]}}"; do
  if [[ "$i" -ne "$control" ]]; then
    up "$i"
  fi
done

status=0
wait "${{pids[0]}}" || status=$?
while kill -0 "${{pids[0]}}" 2>/dev/null; do # a signal ended the wait, not the node
  status=0
  wait "${{pids[0]}}" || status=$?
done
leave
wait || true
exit "$status"
"""
    return {
        "headrace.sbatch": script,
        "topology.toml": topology_text(cluster, nodes, [], secrets="secrets.json"),
        "config.toml": config_text(cluster),
    }
