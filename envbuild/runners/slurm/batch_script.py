"""Renders the Slurm batch script of a job. Pure: the same job, site and folder give the same text.

The script runs the container and writes its output to the files `stdout` and `stderr` in a folder of the attempt. At
its end it writes the file `outcome`, which is renamed into place, so that it is always complete. A job that was stopped
leaves no `outcome`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from shlex import quote

from envbuild.registry.image_reference_patterns import require_digest
from envbuild.runners.slurm.slurm_settings import PATH, SlurmSite
from envbuild.testrun.run_result import MAX_STDOUT
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import UsageError

MAX_STDERR = 64 << 10  # bytes of the end of stderr that are kept
_AROUND = 15  # minutes to fetch the image, added to the self-test's time limit
_CLIENT_MEMORY = 1 << 10  # MiB for the container runtime's client, added to the container's memory
# Checks first that the container program exists: without this check, its absence would look like a fault of the image.
THERE = """command -v "$program" >/dev/null || finish program 127 # not on this node
"""
# For each container runtime, the restrictions of the local runner's container that it lacks; the evidence lists them.
UNCONFINED = {
    "docker": (),
    "podman": (),
    "apptainer": ("memory and processes are bounded by Slurm alone", "runs as the job's user"),
    "pyxis": ("the network is open", "capabilities are the job's", "memory and processes are bounded by Slurm alone",
              "runs as the job's user", "/tmp is the container's own"),
}  # fmt: skip
_JOB_NAME = re.compile(r"envbuild-[A-Za-z0-9._-]{1,100}")


def render(job: Job, site: SlurmSite, folder: PurePosixPath, name: str, names: Sequence[str]) -> str:
    """The script for sbatch. `folder`: the folder of the job, shared with the node, which contains the file `payload`;
    `name`: the job's name.

    `names`: image references with digest under which the node's container runtime may have the image; the script uses
    the first that exists there. Raises UsageError for a value that a script must not contain, and if the job needs GPUs
    of several models.
    """
    require_plain_values(folder, name, names)
    image = fetched(site, names[0]) if site.registry else image_lookup(names)
    parts = [sbatch_options(job, site, folder, name), _head(job, folder), _runtime(job, site), image, TAIL]
    return "\n".join(parts)


def require_plain_values(folder: PurePosixPath, name: str, names: Sequence[str]) -> None:
    """Raises UsageError for values that a script must not contain."""
    for one in names:
        require_digest(one)
    if not re.fullmatch(PATH, str(folder)) or not _JOB_NAME.fullmatch(name):
        raise UsageError(f"invalid job name {name!r} or output folder {str(folder)!r}",
                         hint="set a folder with slurm: {folder: ...}; only letters, digits and ._-+@=~")  # fmt: skip


def sbatch_options(job: Job, site: SlurmSite, folder: PurePosixPath, name: str) -> str:
    """The #SBATCH lines. Each value is in double quotes, which sbatch interprets; no value contains a double quote or a
    `#`."""
    memory = f"{(job.limits.memory >> 20) + _CLIENT_MEMORY}M"
    options = {
        "job-name": name,
        "output": f"{folder}/slurm.log",
        "open-mode": "append",
        "nodes": str(job.nodes),
        "ntasks": str(job.nodes),
        "ntasks-per-node": "1" if job.nodes > 1 else None,
        "cpus-per-task": site.cpus_per_task,
        "mem": site.mem or memory,
        "time": site.time or str(math.ceil(job.limits.timeout / 60) + _AROUND),
        "export": "HOME,LOGNAME,PATH,USER",  # others may contain secrets: do not send them to the controller
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "reservation": site.reservation,
        "constraint": site.constraint,
        "gres": _gres(job, site),
    }
    lines = [f'#SBATCH --{key}="{value}"' for key, value in options.items() if value]
    return "\n".join(["#!/bin/bash", *lines, f"#SBATCH --{'' if site.requeue else 'no-'}requeue"])


def _gres(job: Job, site: SlurmSite) -> str | None:
    if not job.gpus:
        return None
    if len(job.models) != 1:
        raise UsageError("a job can request only one GPU model", hint=f"--gpu {' or --gpu '.join(job.models)}")
    return site.gres_of(job.models[0], job.count)


def _head(job: Job, folder: PurePosixPath) -> str:
    return f"""{script_begin(folder)}
{FINISH}
{FUNCTIONS}
{TRAPPED}
limit={math.ceil(job.limits.timeout)}
"""


def script_begin(folder: PurePosixPath) -> str:
    return f"""set -u
umask 077
at={quote(str(folder))}/attempt-"${{SLURM_RESTART_COUNT:-0}}"
name=envbuild-"$SLURM_JOB_ID"-"${{SLURM_RESTART_COUNT:-0}}"
payload={quote(str(folder / "payload"))}
seconds=0 oom=false engine= image= parts= fabric="""


FINISH = """mkdir "$at" || exit 1 # fails if this attempt has already started

finish() { # STAGE EXIT
    {
        printf 'stage=%s\\nexit=%s\\nseconds=%s\\noom=%s\\n' "$1" "$2" "$seconds" "$oom"
        printf 'job=%s\\nnode=%s\\ngpus=%s\\n' "$SLURM_JOB_ID" "${SLURMD_NODENAME:-}" "${SLURM_JOB_GPUS:-}"
        printf 'engine=%s\\nimage=%s\\n' "$(printf %s "$engine" | tr -cd '[:alnum:]._ -' | head -c 80)" "$image"
        printf 'parts=%s\\nfabric=%s\\n' "$parts" "$fabric"
        printf 'bytes=%s\\nsha256=%s\\n' "$(wc -c <"$at/stdout")" "$(sha256sum <"$at/stdout" | cut -c1-64)"
    } >"$at/outcome.part"
    sync "$at/stdout" "$at/stderr" "$at/outcome.part"
    mv "$at/outcome.part" "$at/outcome"
    exit 0
}"""
FUNCTIONS = """clock() { # seconds since boot: SECONDS and date jump when the clock is set
    local up
    read -r up _ </proc/uptime
    echo "${up%.*}"
}
guard() { # Slurm does not end the engine's container, so end it when the script ends or the folder is removed
    trap '' TERM
    while kill -0 $$ && [ -e "$payload" ]; do sleep 2; done
    ! kill -TERM $$ || sleep 5
    clean
} >/dev/null 2>&1
stop() {
    trap '' TERM
    clean
    kill 0
    exit 143
}"""
TRAPPED = """trap stop TERM
: >"$at/stdout" 2>"$at/stderr"
gpus=()"""


def _runtime(job: Job, site: SlurmSite) -> str:
    program = quote(site.program or {"pyxis": "srun"}.get(site.container, site.container))
    command = " ".join(map(quote, job.argv[1:]))
    entry = quote(job.argv[0])
    if site.container in ("docker", "podman"):
        return GPU[site.container if job.gpus else ""] + engine_command(job, site)
    check = GPU["other" if job.gpus else ""]
    if site.container == "apptainer":
        nv = "--nv " if job.gpus else ""
        return (
            check
            + f"""program={program}
{THERE}engine=$("$program" --version)
scratch=$(mktemp -d) || exit 1
clean() {{ rm -rf "$scratch"; }}
run() {{
    timeout --foreground -k 10 "$limit" "$program" exec --containall --cleanenv --no-home --pid --ipc --no-privs \\
        --drop-caps all --net --network none --workdir "$scratch" --pwd /tmp {nv}\\
        ${{CUDA_VISIBLE_DEVICES:+--env CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"}} \\
        "$image" {entry} {command} <"$payload"
}}
"""
        )
    return (
        check
        + f"""program={program}
{THERE}engine=$("$program" --version)
clean() {{ :; }}
run() {{
    timeout --foreground -k 10 "$limit" "$program" --nodes=1 --ntasks=1 --quiet --container-image="$image" \\
        --container-readonly --no-container-mount-home --no-container-entrypoint --container-workdir=/tmp \\
        {entry} {command} <"$payload"
}}
"""
    )


_CHECK = """[[ ${SLURM_JOB_GPUS:-} =~ ^[0-9]+(,[0-9]+)*$ ]] || finish gpu 1 # no GPU was assigned
"""
GPU = {
    "": "",
    "other": _CHECK,
    "docker": _CHECK + 'gpus=(--gpus "\\"device=$SLURM_JOB_GPUS\\"")\n',
    "podman": _CHECK + 'for one in ${SLURM_JOB_GPUS//,/ }; do gpus+=(--device "nvidia.com/gpu=$one"); done\n',
}


def engine_command(job: Job, site: SlurmSite, network: str = "none") -> str:
    """The commands that run the container in docker or podman, with the same options as in runners/docker_runner.py,
    which explains them. `network`: the container's network, followed by options for it.

    Before bash 4.4, `set -u` makes the use of an empty array an error; ${a[@]+...} avoids this.
    """
    limits, kind = job.limits, site.container
    program, entry, command = quote(site.program or kind), quote(job.argv[0]), " ".join(map(quote, job.argv[1:]))
    version = "{{.Server.Version}}" if kind == "docker" else "{{.Client.Version}}"
    return f"""program={program}
{THERE}engine="{kind} $("$program" version --format {quote(version)})"
clean() {{ "$program" rm --force --volumes "$name" >/dev/null 2>&1; }}
run() {{
    timeout --foreground -k 10 "$limit" "$program" run --name "$name" --label io.envbuild.slurm="$SLURM_JOB_ID" \\
        --pull never --interactive --init --read-only --network {network} --cap-drop ALL \\
        --security-opt no-new-privileges --memory {limits.memory} --memory-swap {limits.memory} \\
        --shm-size {limits.shm} --pids-limit {limits.pids} --tmpfs /tmp:exec,mode=1777,size={limits.tmp} \\
        --log-driver none --user 65534:65534 --workdir /tmp ${{gpus[@]+"${{gpus[@]}}"}} --entrypoint {entry} \\
        "$image" {command} <"$payload"
    code=$?
    [ "$("$program" inspect --format '{{{{.State.OOMKilled}}}}' "$name" 2>/dev/null)" != true ] || : >"$at/oom"
    return $code
}}
"""


def image_lookup(names: Sequence[str]) -> str:
    """Commands that look the image up in the node's engine. These commands are used if no registry is set."""
    return f"""for one in {" ".join(map(quote, names))}; do
    "$program" image inspect "$one" >/dev/null 2>>"$at/stderr" && image=$one && break
done
[ -n "$image" ] || finish image 1"""


def fetched(site: SlurmSite, name: str) -> str:
    if site.container == "apptainer":
        return f"""image="$scratch/image.sif"
"$program" pull --disable-cache "$image" {quote(f"docker://{name}")} >/dev/null 2>"$at/stderr" || {{
    clean
    finish image 1
}}"""
    if site.container == "pyxis":  # REGISTRY#IMAGE
        host, _, path = name.partition("/")
        return f"image={quote(f'{host}#{path}')}"
    return f"""image={quote(name)}
"$program" image inspect "$image" >/dev/null 2>&1 || "$program" pull --quiet "$image" >/dev/null 2>"$at/stderr" ||
    finish image $?"""


TAIL = f"""
set -m # a process group of its own, so that the guard outlives the script
guard &
guard=$!
disown
set +m
begin=$(clock)
{{
    {{
        run
        echo $? >"$at/exit"
    }} 2>&1 1>&3 3>&- | tail -c {MAX_STDERR} >"$at/stderr" 3>&-
}} 3>&1 | head -c {MAX_STDOUT + 1} >"$at/stdout" &
wait
seconds=$(($(clock) - begin))
[ ! -e "$at/oom" ] || oom=true
clean
kill -KILL "$guard"
finish run "$(cat "$at/exit")"
"""
