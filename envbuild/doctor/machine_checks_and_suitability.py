"""Runs all checks of a machine, checks whether the machine suits a profile, and describes the machine as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from envbuild.doctor import engine_disk_and_network_checks, envbuild_versions, gpu_checks
from envbuild.doctor.check_result import Check, CheckRow, CheckState, check_rows, counted, worst_state
from envbuild.doctor.envbuild_versions import Versions
from envbuild.doctor.machine_readings import Ecc, GpuReading, Holder, Host, Port, Role
from envbuild.doctor.profile_hardware_needs import Need
from envbuild.facts import database

VERSION = 1
PROFILE = "profile"
"""The id of the check that `--for` adds."""


def check_machine(host: Host, needs: Sequence[Need]) -> list[Check]:
    """Returns all checks, those of the engine and buildx first. `needs`: of all profiles, or of the requested one."""
    around = {check.id: check for check in engine_disk_and_network_checks.check_system(host, needs)}
    first = [around.pop("engine"), around.pop("buildx")]
    return [*first, *gpu_checks.check_gpus(host, needs), *around.values()]


def suits(host: Host, need: Need, checks: Sequence[Check]) -> Check:
    """Checks whether a profile's image can be built and tested here: yes, or no with every reason.

    Checks of GPUs do not count for a CPU profile. Checks of the network do not count if nothing has to be fetched.
    """
    found = list(_missing(host, need)) if need.gpus else []
    failed = [check for check in relevant(need, checks) if check.status == "fail" or _lacks_engine(check)]
    found += [(f"{check.id}: {check.detail}", check.remedy or "") for check in failed]
    if not found:
        return Check(PROFILE, "ok", f"yes: this machine suits {need.profile}")
    reasons, remedies = (list(dict.fromkeys(item[place] for item in found)) for place in (0, 1))
    return Check(PROFILE, "fail", f"no: {'; '.join(reasons)}", "; ".join(filter(None, remedies)))


def _lacks_engine(check: Check) -> bool:
    """Whether the check warns that this machine cannot receive images, and only the registry of a cluster can."""
    return check.id in ("engine", "buildx") and check.status == "warn"


def relevant(need: Need, checks: Sequence[Check]) -> list[Check]:
    spared: set[str] = set() if need.pulls else {"registry"}
    if need.fetched == 0 and not need.pulls:
        spared |= {"index", "proxy"}
    return [c for c in checks if c.id not in spared and (need.gpus or not c.id.startswith("gpu."))]


def _missing(host: Host, need: Need) -> Iterator[tuple[str, str]]:
    """Yields each GPU requirement of the profile that the machine does not meet, with its fix. Requirements that
    another check reports are left out."""
    here = host.driver.cards
    known = [(card, database.gpu_by_name(card.name)) for card in here]
    fitting = [card for card, gpu in known if gpu and gpu.id in need.gpus]
    wanted = " or ".join(gpu.names[0] for gpu in need.models)
    there = f"on the machine with the GPU: envbuild doctor --for {need.cli_words or need.profile}"
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


@dataclass(frozen=True)
class HostRow:
    """The machine. `time`: UTC, by the machine's own clock. `cores`: logical cores. `memory`: bytes, 0 if unknown.
    `system`: kernel, architecture and C library."""

    name: str
    time: str
    cpu: str
    cores: int
    memory: int
    system: str
    python: str


@dataclass(frozen=True)
class EngineRow:
    host: str | None
    version: str | None
    buildx: str | None
    runtimes: tuple[str, ...]


@dataclass(frozen=True)
class DriverRow:
    version: str | None
    cuda: str | None
    fault: str | None


@dataclass(frozen=True)
class GpuRow:
    """A GPU as NVML describes it. `fabric`: its registration with the NVSwitch fabric. `holders`: the processes that
    use its memory. `driver`: the version of the machine's driver."""

    index: int
    name: str
    uuid: str
    bus_id: str
    compute_capability: str
    memory_total: int | None
    memory_free: int | None
    mig: bool
    mig_slices: int
    ecc: Ecc
    compute_mode: str | None
    fabric: str | None
    holders: tuple[Holder, ...]
    driver: str | None


@dataclass(frozen=True)
class DiskRow:
    role: Role
    folder: str
    free: int


@dataclass(frozen=True)
class MachineDocument:
    """The document of `doctor`: the description of the machine, and its checks. Sizes are bytes; addresses contain no
    secrets. `profile`: the profile given with --for. `state`: the worst state of all checks; with --for, the state of
    the check `profile` alone."""

    version: int
    profile: str | None
    state: CheckState
    envbuild: Versions
    host: HostRow
    engine: EngineRow
    driver: DriverRow
    gpus: tuple[GpuRow, ...]
    software: Mapping[str, str]
    rdma: tuple[Port, ...]
    shm: int | None
    disks: tuple[DiskRow, ...]
    checks: tuple[CheckRow, ...]


def document(host: Host, checks: Sequence[Check], profile: str | None = None) -> MachineDocument:
    found, engine = host.driver, host.engine
    decisive = [check for check in checks if check.id == PROFILE] if profile else checks
    return MachineDocument(
        version=VERSION,
        profile=profile,
        state=worst_state(decisive),
        envbuild=envbuild_versions.document(),
        host=HostRow(host.name, host.time, **vars(host.machine)),
        engine=EngineRow(engine.host or None, engine.version, engine.buildx, engine.runtimes),
        driver=DriverRow(found.version, found.cuda, found.fault),
        gpus=tuple(_gpu_row(gpu, found.version) for gpu in found.cards),
        software=host.software,
        rdma=host.rdma or (),
        shm=host.shm,
        disks=tuple(DiskRow(item.role, item.folder, item.free) for item in host.disks),
        checks=check_rows(checks),
    )


def _gpu_row(gpu: GpuReading, driver: str | None) -> GpuRow:
    slices = gpu.mig.slices if gpu.mig else 0
    values = {**vars(gpu), "mig": bool(gpu.mig and gpu.mig.enabled)}
    return GpuRow(**values, mig_slices=slices, driver=driver)
