"""What a job that came to an end of its own left: whether its self-test began at all, and where it ran. Pure."""

from __future__ import annotations

from typing import Any

from envbuild.errors import EngineError, NetworkError, NotProved, printable
from envbuild.proof.job import Job
from envbuild.proof.runners.protocol import RunnerError
from envbuild.proof.runners.slurm import nodes, script
from envbuild.proof.runners.slurm.site import Site
from envbuild.proof.runners.slurm.states import Outcome

_RAN = (0, 5, 124, 137)  # exit codes with which a self-test ends that wrote nothing
_NO_CARD = ("nvidia", "device driver", "cdi device")
_NOT_FETCHED = "pyxis: failed to import docker image"  # pyxis fetches as it starts; its own words


def where(outcome: Outcome, site: Site, job: Job) -> dict[str, Any]:
    """For the evidence."""
    lacks = list(script.UNCONFINED[site.container])
    found: dict[str, Any] = {
        "job": outcome.job,
        "node": outcome.node,
        "gpus": outcome.gpus,
        "engine": outcome.engine,
        "image": outcome.image,
        "unconfined": lacks,
    }
    if job.nodes > 1:
        lacks += nodes.unconfined(site, outcome.fabric)
        found |= {"interface": site.interface, "infiniband": list(outcome.fabric)}
    return found


def require_started(outcome: Outcome, site: Site, image: str, words: str) -> None:
    """Raises where the self-test never began, which says nothing of the image. `words`: the end of its stderr."""
    node, said = outcome.node or "the node", printable(words.strip()[-600:])
    if outcome.stage == "gpu" and outcome.gpus:
        raise NotProved(
            f"Slurm handed out {outcome.gpus} on {node}, which is no whole card",
            hint="slurm: {gres: {MODEL: NAME}} says what a whole one is called",
        )
    if outcome.stage == "gpu":
        raise NotProved(f"Slurm handed out no GPU on {node}", hint="is File= set for it in gres.conf?")
    if outcome.stage == "network":
        raise RunnerError(
            f"{node} has no IPv4 address on {site.interface}", ending="refused", hint=f"--slurm interface=NAME\n{said}"
        )
    if outcome.stage == "program":
        program = site.program or site.container
        raise EngineError(
            f"{node} has no program {program}",
            hint="slurm: {program: PATH} says where it is on the nodes, {container: NAME} names another",
        )
    fetches = outcome.stage == "image" or (outcome.size == 0 and _NOT_FETCHED in words)
    if fetches and site.registry:
        raise NetworkError(f"{node} cannot fetch {image}", hint=f"{said}\nis the registry reachable from there?")
    if fetches:
        hint = "slurm: {registry: HOST/NAME} says where to fetch it"
        raise EngineError(f"{node} has no image {image}", hint=f"{hint}\n{said}" if said else hint)
    for code, size in outcome.parts or ((outcome.exit, outcome.size),):
        if code != 125 and (size or code in _RAN):
            continue
        if any(sign in said.lower() for sign in _NO_CARD):
            raise NotProved(f"{node} gives containers no GPU", hint=said)
        raise EngineError(f"{outcome.engine or site.container} on {node} does not start the image", hint=said)
