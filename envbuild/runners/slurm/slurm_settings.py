"""The settings of a Slurm site: the `slurm:` mapping of the settings file, overridden by the command line. Pure.

Each value becomes part of a batch script or a command line, so only the characters that it needs are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envbuild.registry.image_reference_patterns import REGISTRY
from envbuild.util.errors import Fault, UsageError, printable, unknown

CONTAINERS = ("docker", "podman", "apptainer", "pyxis")
_PULLED = ("apptainer", "pyxis")  # these have no image store, so they always pull


@dataclass(frozen=True)
class SlurmSite:
    """The settings of a Slurm site. `folder`: the folder for jobs, shared with the nodes; None: the user's state
    folder. `gres`: GPU id -> Slurm's gres name of the GPU, such as gpu:nvidia_h20 for h20; default: gpu:h20.

    `mem`: memory on a node; None: the limit of the self-test's container plus a margin. `program`: the path of the
    container runtime on the nodes, if it is not on PATH there. `requeue`: queue the job again after a node failure or a
    preemption. `queue`: minutes that the job may wait; None: unlimited, but the wait ends if Slurm reports that the job
    can never start. `grace`: seconds after which files from another machine are certainly visible here; network file
    systems may delay them. `interface`: the network interface between nodes, for jobs on several nodes; containers of
    other jobs have no network.
    """

    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    time: str | None = None
    qos: str | None = None
    reservation: str | None = None
    cpus_per_task: str | None = None
    mem: str | None = None
    container: str = "docker"
    program: str | None = None
    registry: str | None = None
    folder: str | None = None
    interface: str | None = None
    requeue: bool = False
    queue: int | None = None
    grace: int = 20
    gres: Mapping[str, str] = field(default_factory=dict)

    def gres_of(self, model: str, count: int) -> str:
        """The gres request for `count` GPUs of a model: gpu:h20:1, unless the site has another name for it."""
        return f"{self.gres.get(model, f'gpu:{model}')}:{count}"


_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.,+-]{0,99}"
PATH = r"/[A-Za-z0-9_./+@=~-]{1,300}"  # no %, which Slurm expands in file names, and no shell metacharacters
# sbatch(1): a time of zero means no time limit
_TIME = r"(?=.*[1-9])([0-9]{1,3}-[0-9]{1,2}(:[0-9]{2}){0,2}|[0-9]{1,5}(:[0-9]{2}){0,2})"
_SHAPES = {
    "partition": (_NAME, "a partition's name"),
    "account": (_NAME, "an account's name"),
    "qos": (_NAME, "a QOS's name"),
    "reservation": (_NAME, "a reservation's name"),
    # sbatch(1): features joined by & | and brackets, counts by *
    "constraint": (r"[A-Za-z0-9_(\[][A-Za-z0-9_.:=&|,*()\[\]-]{0,199}", "features, as in h20&nvlink"),
    "cpus_per_task": ("[1-9][0-9]{0,3}", "a number of processors"),
    "mem": ("0|[1-9][0-9]{0,8}[KMGT]?", "megabytes, a size such as 64G, or 0 for all memory of the node"),
    "time": (_TIME, "minutes, or [D-]HH:MM:SS, and more than 0"),
    "container": ("|".join(CONTAINERS), " or ".join(CONTAINERS)),
    "program": (PATH, "an absolute path without spaces"),
    "registry": REGISTRY,
    "folder": (PATH, "an absolute path without spaces"),
    "interface": (r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}", "a network interface's name, as in ib0"),
    "requeue": ("yes|no", "yes or no"),
    "queue": ("[0-9]{1,6}", "minutes"),
    "grace": ("[0-9]{1,3}", "seconds"),
}
_KNOWN = (*_SHAPES, "gres")
_NUMBERS = ("queue", "grace", "time", "account", "cpus_per_task", "mem")
_GRES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,60})?")


def parse(settings: Mapping[str, Any], given: Mapping[str, str], knows: Callable[[str], bool]) -> SlurmSite:
    """Merges the settings with values from the command line, which take precedence. On the command line, gres.h20=...
    sets the name of one GPU.

    `knows`: tests whether a GPU id exists. Raises UsageError with every error.
    """
    listed = given.get("gres", settings.get("gres", {}))
    gres: dict[str, Any] = dict(listed) if isinstance(listed, Mapping) else {}
    gres |= {key[5:]: value for key, value in given.items() if key.startswith("gres.")}
    plain = {key: value for key, value in settings.items() if key != "gres"}
    plain |= {key: value for key, value in given.items() if key.partition(".")[0] != "gres"}
    plain = {key: _as_text(key, value) for key, value in plain.items()}
    faults = [_fault(key, value) for key, value in plain.items()]
    faults += [] if isinstance(listed, Mapping) else [_no_gres(listed, "gres" in given)]
    faults += [_gres_fault(model, value, knows) for model, value in gres.items()]
    found = [fault for fault in faults if fault]
    container = plain.get("container", SlurmSite.container)
    if container in _PULLED and not plain.get("registry"):
        found.append(Fault(f"{container} needs a registry to take images from: set one", field="registry"))
    if found:
        raise UsageError("invalid slurm settings", faults=found, hint=f"known: {', '.join(_KNOWN)}")
    queue, grace = plain.get("queue"), plain.get("grace", SlurmSite.grace)
    exact = {"requeue": plain.get("requeue") == "yes", "queue": int(queue) if queue else None, "grace": int(grace)}
    return SlurmSite(**{**plain, **exact}, gres=gres)


def _as_text(key: str, value: object) -> object:
    """Converts a value that YAML parsed as a boolean or an integer back to text."""
    if key == "requeue" and isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if key in _NUMBERS and type(value) is int else value


def _fault(key: str, value: object) -> Fault | None:
    if key not in _SHAPES:
        return Fault(unknown(str(key), _KNOWN), field=printable(str(key)[:100]))
    pattern, wanted = _SHAPES[key]
    if isinstance(value, str) and re.fullmatch(pattern, value):
        return None
    return Fault(f"must be {wanted}, not {printable(str(value)[:100])!r}", field=key)


def _no_gres(value: object, on_command_line: bool) -> Fault:
    here, there = "gres.GPU=NAME, as in gres.h20=gpu:h20", "a mapping of GPU to name, as in {h20: gpu:h20}"
    wanted = here if on_command_line else there
    return Fault(f"must be {wanted}, not {printable(str(value)[:100])!r}", field="gres")


def _gres_fault(model: object, value: object, knows: Callable[[str], bool]) -> Fault | None:
    if not isinstance(model, str) or not knows(model):
        return Fault(f"{printable(str(model)[:60])!r} is not the id of a GPU", field="gres")
    if not isinstance(value, str) or not _GRES.fullmatch(value):
        return Fault(f"must be a name, as in gpu:{model}, not {printable(str(value)[:100])!r}", field=f"gres.{model}")
    return None
