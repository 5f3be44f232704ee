"""What was read of a machine: plain values, for the checks to judge. Sizes are bytes, None is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from envbuild.doctor.cpu_memory_and_os import Machine
from envbuild.util import url_redaction
from envbuild.util.errors import printable

MAX_TEXT = 200


def clean(text: str, most: int = MAX_TEXT) -> str:
    """One line for a terminal and a document, whoever wrote it: a driver, a kernel log, another host."""
    line = " ".join(printable(text[: 4 * most]).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def short_address(address: str) -> str:
    """An address without its secrets, on a bounded line."""
    return clean(url_redaction.redact_url(address))


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a card; `name` is "" where the process cannot be seen from here."""

    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Mig:
    """`pending`: what a reset of the card will make it; `slices`: how many instances there are."""

    enabled: bool
    pending: bool
    slices: int


@dataclass(frozen=True)
class Ecc:
    """Faults of a card's memory. `enabled`, `uncorrected` (errors since the driver was loaded): None where not told.
    `pending`: a bad row or page waits for a reset. `failed`: no spare row was left."""

    enabled: bool | None = None
    uncorrected: int | None = None
    pending: bool = False
    failed: bool = False


@dataclass(frozen=True)
class GpuReading:
    """A GPU as NVML tells of it. `fabric`: its registration with the NVSwitch fabric: "none" (it has none),
    "not started", "in progress", "completed", or the error it ended with."""

    index: int
    name: str
    uuid: str
    bus_id: str
    compute_capability: str
    memory_total: int | None
    memory_free: int | None
    mig: Mig | None
    ecc: Ecc
    compute_mode: str | None
    fabric: str | None
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True)
class DriverReading:
    """NVIDIA's driver through NVML. `fault`: why it cannot be asked. `lost`: what it says of cards that do not answer.
    `cuda`: the newest CUDA it serves, "12.4"."""

    version: str | None = None
    cuda: str | None = None
    cards: tuple[GpuReading, ...] = ()
    lost: tuple[str, ...] = ()
    fault: str | None = None


@dataclass(frozen=True)
class EngineReading:
    """`fault`, `buildx_fault`: why there is none. `local`: on this machine. `hooks`: NVIDIA's programs found here that
    give containers GPUs. `cdi`: GPUs that the engine knows as CDI devices. `data`: the folder of its images."""

    host: str = ""
    version: str | None = None
    buildx: str | None = None
    fault: str | None = None
    buildx_fault: str | None = None
    local: bool = True
    runtimes: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    data: str | None = None
    mirrors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Xid:
    """An error that the driver wrote to the kernel's log; `card`: its PCI bus id."""

    number: int
    card: str
    text: str


@dataclass(frozen=True)
class KernelLog:
    """The kernel's log since this boot. `fault`: why it cannot be read."""

    xids: tuple[Xid, ...] = ()
    fault: str | None = None


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device, "mlx5_0/1"; state, link and rate as the kernel names them."""

    name: str
    state: str
    link: str
    rate: str


Role = Literal["cache", "engine"]


@dataclass(frozen=True)
class Disk:
    """A folder and what is free on its file system; `device` is equal for folders on one. `fault`: why it cannot be
    used."""

    role: Role
    folder: str
    free: int = 0
    device: int = 0
    fault: str | None = None


@dataclass(frozen=True)
class Answer:
    """A place that was asked. `status`: of HTTP. `fault`: it gave no answer. `ahead`: how many seconds this machine's
    clock is ahead of the one that answered."""

    address: str
    status: int | None = None
    fault: str | None = None
    ahead: float | None = None


@dataclass(frozen=True)
class Proxy:
    """`variables`: the environment's names for it. `fault`: it is not an address, or nothing listens there."""

    variables: tuple[str, ...]
    address: str
    fault: str | None


@dataclass(frozen=True)
class Authorities:
    """A file or folder of certificates that a variable or pip names; `certificates`: how many a file holds."""

    variable: str
    path: str
    certificates: int | None = None
    expired: int = 0
    fault: str | None = None


@dataclass(frozen=True)
class SiteReading:
    """The site's settings: their file, what they set, what is wrong in them with file and line, and what is known."""

    file: str
    names: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True)
class Host:
    """All of a machine. `pci`: NVIDIA's cards on its bus. `switches`: it has NVSwitches. `fabric_manager`: whether that
    runs, None where the host's processes are not seen. `shm`: 0 where there is no /dev/shm. `software`: toolkit, nccl,
    torch -> version. `late`: what did not answer in time; its parts are None, or the defaults."""

    name: str
    time: str
    machine: Machine
    driver: DriverReading = DriverReading()
    pci: int | None = None
    switches: bool | None = None
    fabric_manager: bool | None = None
    engine: EngineReading = EngineReading()
    log: KernelLog | None = None
    shm: int | None = None
    rdma: tuple[Port, ...] | None = None
    memlock: int | None = None
    disks: tuple[Disk, ...] = ()
    indexes: tuple[Answer, ...] = ()
    registries: tuple[Answer, ...] = ()
    mirrors: tuple[Answer, ...] = ()
    proxies: tuple[Proxy, ...] = ()
    authorities: tuple[Authorities, ...] | None = None
    site: SiteReading | None = None
    software: Mapping[str, str] = field(default_factory=dict)
    late: tuple[str, ...] = ()
