"""Runs all checks of a machine, checks whether it suits a profile, and describes it as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from envbuild.doctor import envbuild_versions, gpu_checks, system_checks
from envbuild.doctor.check_result import Check, counted
from envbuild.doctor.model import Host
from envbuild.doctor.profile_requirements import Need
from envbuild.facts import database

VERSION = 1
PROFILE = "profile"
"""The id of the check that `--for` adds."""


def check_machine(host: Host, needs: Sequence[Need]) -> list[Check]:
    """Every check, those of the engine first. `needs`: the needs of all profiles, or of the requested one."""
    around = {check.id: check for check in system_checks.check_system(host, needs)}
    first = [around.pop("engine"), around.pop("buildx")]
    return [*first, *gpu_checks.check_gpus(host, needs), *around.values()]


def suits(host: Host, need: Need, checks: Sequence[Check]) -> Check:
    """Checks whether the image can be built and tested here: yes, or no with every reason.

    Checks of GPUs do not count for a CPU profile, nor checks of the network where nothing has to be fetched.
    """
    found = list(_missing(host, need)) if need.gpus else []
    failed = [check for check in relevant(need, checks) if check.status == "fail"]
    found += [(f"{check.id}: {check.detail}", check.remedy or "") for check in failed]
    if not found:
        return Check(PROFILE, "ok", f"yes: this machine suits {need.profile}")
    reasons, remedies = (list(dict.fromkeys(item[place] for item in found)) for place in (0, 1))
    return Check(PROFILE, "fail", f"no: {'; '.join(reasons)}", "; ".join(filter(None, remedies)))


def relevant(need: Need, checks: Sequence[Check]) -> list[Check]:
    spared: set[str] = set() if need.pulls else {"registry"}
    if need.fetched == 0 and not need.pulls:
        spared |= {"index", "proxy"}
    return [c for c in checks if c.id not in spared and (need.gpus or not c.id.startswith("gpu."))]


def _missing(host: Host, need: Need) -> Iterator[tuple[str, str]]:
    """The GPU requirements of the profile that the machine does not meet and no other check reports, each with its
    remedy."""
    here = host.driver.cards
    known = [(card, database.gpu_by_name(card.name)) for card in here]
    fitting = [card for card, gpu in known if gpu and gpu.id in need.gpus]
    wanted = " or ".join(gpu.names[0] for gpu in need.models)
    there = f"on the machine with the GPU: envbuild doctor --for {need.asked or need.profile}"
    if not here:
        yield f"it needs {wanted}, and this machine has no GPU", there
    elif not fitting:
        own = f"{there}; `envbuild show` lists the profiles and their GPUs"
        yield f"it needs {wanted}, and this machine has {counted(card.name for card in here)}", own
    elif len(fitting) < need.gpu_count:
        held = counted(card.name for card in fitting)
        fewer = f"run it on a machine with {need.gpu_count}, or lower gpu_count in the profile"
        yield f"it needs {need.gpu_count} of {wanted} together, and this machine has {held}", fewer
    sliced = [f"GPU {card.index}" for card in fitting if card.mig and card.mig.enabled]
    if sliced:
        yield f"it needs whole GPUs, and MIG is on for {', '.join(sliced)}", "turn MIG off: nvidia-smi -mig 0"


def document(host: Host, checks: Sequence[Check]) -> dict[str, Any]:
    """The description of the machine. Sizes are bytes; `time` is UTC by its own clock; addresses contain no secrets.

    {"version", "envbuild", "host", "engine", "driver", "gpus", "software", "rdma", "shm", "disks", "checks"}
    """
    found = host.driver
    return {
        "version": VERSION,
        "envbuild": envbuild_versions.document(),
        "host": {"name": host.name, "time": host.time, **asdict(host.machine)},
        "engine": {
            "host": host.engine.host or None,
            "version": host.engine.version,
            "buildx": host.engine.buildx,
            "runtimes": list(host.engine.runtimes),
        },
        "driver": {"version": found.version, "cuda": found.cuda, "fault": found.fault},
        "gpus": [
            {**asdict(card), "driver": found.version, "mig": bool(card.mig and card.mig.enabled),
             "mig_slices": card.mig.slices if card.mig else 0}
            for card in found.cards
        ],
        "software": dict(host.software),
        "rdma": [asdict(port) for port in host.rdma or ()],
        "shm": host.shm,
        "disks": [{"role": item.role, "folder": item.folder, "free": item.free} for item in host.disks],
        "checks": [asdict(check) for check in checks],
    }  # fmt: skip
