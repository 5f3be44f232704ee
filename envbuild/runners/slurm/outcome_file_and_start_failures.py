"""Parses the file `outcome` that a job's script writes at its end, and detects jobs whose self-test never started.
Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from envbuild.runners.runner_interface import RunnerError
from envbuild.runners.slurm import batch_script, multi_node_script
from envbuild.runners.slurm.slurm_settings import SlurmSite
from envbuild.testrun.run_result import RunLocation
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import EngineError, NetworkError, NotProved, printable


@dataclass(frozen=True)
class JobOutcome:
    """The outcome that a script wrote at its end. `stage`: the last stage that the script reached: gpu, program, image,
    network or run. `exit`: the exit code of that stage. `size` and `sha256`: of the file `stdout`. `parts`: for several
    nodes, the exit code of each node and the size of its part of `stdout`, in bytes. `fabric`: whether each node has
    InfiniBand devices."""

    stage: str
    exit: int
    seconds: float
    oom: bool
    job: str
    node: str
    gpus: str
    engine: str
    image: str
    size: int
    sha256: str
    parts: tuple[tuple[int, int], ...] = ()
    fabric: tuple[bool, ...] = ()


_SHAPE = {
    "stage": "program|image|gpu|network|run", "exit": "[0-9]{1,3}", "seconds": "[0-9]{1,7}", "oom": "true|false",
    "job": "[0-9]{1,12}", "node": "[A-Za-z0-9._,-]{0,16000}",
    "gpus": "[A-Za-z0-9,:/_.-]{0,1000}", "engine": "[A-Za-z0-9._ -]{0,80}",
    "image": "[ -~]{0,500}", "bytes": "[0-9]{1,12}", "sha256": "[0-9a-f]{64}",
    "parts": "([0-9]{1,3}:[0-9]{1,12}( |$)){0,64}", "fabric": "((yes|no)( |$)){0,64}",
}  # fmt: skip


def parse_outcome(text: str) -> JobOutcome | None:
    """Parses the text of a file `outcome`; None if its format is invalid."""
    found = dict(line.partition("=")[::2] for line in text.splitlines())
    if set(found) != set(_SHAPE) or not all(re.fullmatch(_SHAPE[key], value) for key, value in found.items()):
        return None
    return JobOutcome(
        stage=found["stage"],
        exit=int(found["exit"]),
        seconds=float(found["seconds"]),
        oom=found["oom"] == "true",
        job=found["job"],
        node=found["node"],
        gpus=found["gpus"],
        engine=found["engine"].strip(),
        image=found["image"],
        size=int(found["bytes"]),
        sha256=found["sha256"],
        parts=tuple((int(code), int(size)) for code, _, size in (one.partition(":") for one in found["parts"].split())),
        fabric=tuple(word == "yes" for word in found["fabric"].split()),
    )


_RAN = (0, 5, 124, 137)  # exit codes of a self-test that started, even if it wrote nothing
_NO_CARD = ("nvidia", "device driver", "cdi device")
# pyxis fetches the image when the container starts, and prints this message on failure.
_NOT_FETCHED = "pyxis: failed to import docker image"


def location(outcome: JobOutcome, site: SlurmSite, job: Job) -> RunLocation:
    """Where the job ran, for the evidence."""
    lacks = tuple(batch_script.UNCONFINED[site.container])
    found = RunLocation(
        runner="slurm",
        job=outcome.job,
        node=outcome.node,
        gpus=outcome.gpus,
        engine=outcome.engine,
        image=outcome.image,
        unconfined=lacks,
    )
    if job.nodes == 1:
        return found
    lacks += tuple(multi_node_script.unconfined(site, outcome.fabric))
    more = {"unconfined": lacks, "interface": site.interface, "infiniband": outcome.fabric}
    return found.model_copy(update=more)


def require_started(outcome: JobOutcome, site: SlurmSite, image: str, words: str) -> None:
    """Raises an error if the self-test never started, because such a job says nothing about the image. `words`: the end
    of the job's stderr."""
    node, stderr = outcome.node or "the node", printable(words.strip()[-600:])
    if outcome.stage == "gpu" and outcome.gpus:
        raise NotProved(
            f"Slurm assigned {outcome.gpus} on {node}, which is not a whole GPU",
            hint="slurm: {gres: {MODEL: NAME}} sets the name of a whole GPU",
        )
    if outcome.stage == "gpu":
        raise NotProved(f"Slurm assigned no GPU on {node}", hint="is File= set for the node's GPUs in gres.conf?")
    if outcome.stage == "network":
        raise RunnerError(
            f"{node} has no IPv4 address on {site.interface}",
            ending="refused",
            hint=f"--slurm interface=NAME\n{stderr}",
        )
    if outcome.stage == "program":
        program = site.program or site.container
        raise EngineError(
            f"{node} has no program {program}",
            hint="slurm: {program: PATH} sets its path on the nodes; {container: NAME} selects a different program",
        )
    fetches = outcome.stage == "image" or (outcome.size == 0 and _NOT_FETCHED in words)
    if fetches and site.registry:
        raise NetworkError(f"{node} cannot fetch {image}", hint=f"{stderr}\nis the registry reachable from the node?")
    if fetches:
        hint = "slurm: {registry: HOST/NAME} sets where to fetch the image"
        raise EngineError(f"{node} has no image {image}", hint=f"{hint}\n{stderr}" if stderr else hint)
    for code, size in outcome.parts or ((outcome.exit, outcome.size),):
        if code != 125 and (size or code in _RAN):
            continue
        if any(sign in stderr.lower() for sign in _NO_CARD):
            raise NotProved(f"containers on {node} have no GPU", hint=stderr)
        raise EngineError(f"{outcome.engine or site.container} on {node} cannot start the image", hint=stderr)
