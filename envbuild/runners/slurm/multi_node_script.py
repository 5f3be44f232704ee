"""Renders the batch script of a job on several nodes. Pure.

The script calls itself on each node with srun: first to fetch the image, then to run the container. The container uses
the node's network, and InfiniBand if the node has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from shlex import quote

from envbuild.runners.slurm import batch_script
from envbuild.runners.slurm.slurm_settings import SlurmSite
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import UsageError

_RUNTIMES = ("docker", "podman")


def unconfined(site: SlurmSite, fabric: Sequence[bool]) -> list[str]:
    """The permissions of the containers that a local container does not have, for the evidence. `fabric`: whether each
    node has InfiniBand."""
    lacks = [f"dist.nodes: the nodes' network, by {site.interface}"]
    return [*lacks, "dist.nodes: /dev/infiniband, and memory that it may lock"] if any(fabric) else lacks


def network(site: SlurmSite) -> str:
    """The network interface between the nodes. Raises UsageError if the container runtime cannot use the node's
    network, or if no interface is set."""
    if site.container not in _RUNTIMES:
        raise UsageError(f"--nodes is not possible with {site.container}", hint=f"container: {' or '.join(_RUNTIMES)}")
    if not site.interface:
        raise UsageError("ranks on several nodes need a network between the nodes, but no interface is set",
                         hint="--slurm interface=NAME, as in ib0; list them with: ip address")  # fmt: skip
    return site.interface


def render(job: Job, site: SlurmSite, folder: PurePosixPath, name: str, names: Sequence[str]) -> str:
    """Like batch_script.render, for `job.nodes` nodes. Also raises the errors of `network`."""
    batch_script.require_plain_values(folder, name, names)
    interface = network(site)
    image = batch_script.fetched(site, names[0]) if site.registry else batch_script.image_lookup(names)
    parts = [
        batch_script.sbatch_options(job, site, folder, name),
        batch_script.script_begin(folder),
        f"limit={math.ceil(job.limits.timeout)}\ninterface={quote(interface)}\ncount={job.nodes}",
        batch_script.FUNCTIONS,
        _PART_BEGIN,
        batch_script.TRAPPED,
        (batch_script.GPU[site.container] if job.gpus else "") + batch_script.engine_command(job, site, _NETWORK),
        _PART_IMAGE,
        image,
        _PART_RUN,
        batch_script.TAIL,
        "}",
        _WHOLE.replace("FOLDER", quote(str(folder))),
    ]
    return "\n".join(parts)


_NETWORK = """host ${fabric[@]+"${fabric[@]}"} --env ENVBUILD_NODE="$SLURM_NODEID" \\
        --env ENVBUILD_MEETING="$meeting" --env ENVBUILD_INTERFACE="$interface\""""
# The part of the script that srun runs on each node, with the argument `image`, then with `run HOST:PORT`. It writes
# files that the main part reads.
_PART_BEGIN = """part() { # arguments: image, or run HOST:PORT
at="$at/node-$SLURM_NODEID"
name="$name-$SLURM_NODEID"
meeting=${2:-}
SLURM_JOB_GPUS=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}
mkdir -p "$at"
finish() { # STAGE EXIT
    printf '%s %s\\n' "$1" "$2" >"$at/ended.part"
    mv "$at/ended.part" "$at/ended"
    exit 0
}
fabric=()
[ ! -d /dev/infiniband ] || fabric=(--device /dev/infiniband --ulimit memlock=-1:-1)"""
_PART_IMAGE = """if [ "$1" = image ]; then"""
_PART_RUN = """printf '%s\\n' "${SLURMD_NODENAME:-}" >"$at/node"
printf '%s\\n' "$engine" >"$at/engine"
printf '%s\\n' "$image" >"$at/image"
[ ${#fabric[@]} = 0 ] || : >"$at/fabric"
exit 0
fi
image=$(cat "$at/image")"""
_WHOLE = f"""case ${{1:-}} in image | run)
    part "$@"
    exit 0
    ;;
esac

{batch_script.FINISH}
each() {{
    srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --mpi=none --quiet bash FOLDER/job.sh "$@"
}}
node() {{ # NUMBER FILE: the first line of a file that node NUMBER wrote
    head -n 1 "$at/node-$1/$2" 2>/dev/null
}}
clean() {{ :; }}
{batch_script.TRAPPED}
address=$(ip -4 -o address show dev "$interface" 2>"$at/stderr" | sed -nE 's/.* inet ([0-9.]+).*/\\1/p' | head -n 1)
[ -n "$address" ] || finish network 1
each image &
wait $!
nodes=
for ((number = 0; number < count; number++)); do
    SLURMD_NODENAME=$(node "$number" node)
    if [ -z "$SLURMD_NODENAME" ]; then # this node did not get the image
        SLURMD_NODENAME=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$((number + 1))p")
        cat "$at/node-$number/stderr" >"$at/stderr" 2>/dev/null
        read -r stage code <"$at/node-$number/ended" && finish "$stage" "$code"
        exit 1
    fi
    nodes="$nodes${{nodes:+,}}$SLURMD_NODENAME"
done
SLURMD_NODENAME=$nodes engine=$(node 0 engine) image=$(node 0 image)
begin=$(clock)
each run "$address:$((20000 + SLURM_JOB_ID * 160 % 12000))" & # 160 ports for each job; at most 130 stages need one
wait $!
seconds=$(($(clock) - begin))
worst=0
for ((number = 0; number < count; number++)); do
    read -r stage code <"$at/node-$number/ended" || exit 1 # the node was lost
    [ "$stage" = run ] || finish "$stage" "$code"
    [ ! -e "$at/node-$number/oom" ] || oom=true
    [ "$code" -le "$worst" ] || worst=$code
    parts="$parts${{parts:+ }}$code:$(wc -c <"$at/node-$number/stdout")"
    fabric="$fabric${{fabric:+ }}$(if [ -e "$at/node-$number/fabric" ]; then echo yes; else echo no; fi)"
    cat "$at/node-$number/stdout" >>"$at/stdout"
    cat "$at/node-$number/stderr" >>"$at/stderr"
done
finish run "$worst"
"""
