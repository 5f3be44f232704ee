"""Types for the data read from a machine, which the checks judge. Sizes are bytes; None means unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from envbuild.doctor.cpu_memory_and_os import Machine
from envbuild.util import url_redaction
from envbuild.util.errors import printable

MAX_TEXT = 200


def clean(text: str, most: int = MAX_TEXT) -> str:
    """Returns untrusted text as one printable line of at most `most` characters. The text may come from a driver, a
    kernel log or another host."""
    line = " ".join(printable(text[: 4 * most]).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def short_address(address: str) -> str:
    """Returns an address without its secrets, and of limited length."""
    return clean(url_redaction.redact_url(address))


@dataclass(frozen=True)
class Holder:
    """A process that uses memory of a GPU. `name`: "" if the process is not visible here, as in another container."""

    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Mig:
    """MIG of a GPU. `pending`: the setting after the next reset of the GPU; `slices`: the number of MIG instances."""

    enabled: bool
    pending: bool
    slices: int


@dataclass(frozen=True)
class Ecc:
    """Errors of a GPU's memory. `enabled`: whether ECC is on. `uncorrected`: the number of errors since the driver was
    loaded. Both are None if NVML does not report them. `pending`: a bad row or page will be replaced at the next reset.
    `failed`: a bad row could not be replaced, because no spare row was left."""

    enabled: bool | None = None
    uncorrected: int | None = None
    pending: bool = False
    failed: bool = False


@dataclass(frozen=True)
class GpuReading:
    """A GPU as NVML describes it. `fabric`: its registration with the NVSwitch fabric: "none" (not supported), "not
    started", "in progress", "completed", or the error that ended the registration."""

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
    """NVIDIA's driver as NVML describes it. `fault`: why NVML cannot be used. `lost`: the errors of GPUs that do not
    answer. `cuda`: the newest CUDA version that the driver supports, "12.4"."""

    version: str | None = None
    cuda: str | None = None
    cards: tuple[GpuReading, ...] = ()
    lost: tuple[str, ...] = ()
    fault: str | None = None


@dataclass(frozen=True)
class EngineReading:
    """The Docker Engine and buildx. `fault`, `buildx_fault`: why they are missing. `local`: the engine is on this
    machine. `hooks`: which of nvidia-container-runtime-hook and nvidia-cdi-hook, which give containers GPUs, are
    installed on a local engine's machine. `cdi`: GPUs that the engine knows as CDI devices. `data`: the folder of its
    images."""

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
    """An error that the driver wrote to the kernel's log. `card`: the GPU's PCI bus id."""

    number: int
    card: str
    text: str


@dataclass(frozen=True)
class KernelLog:
    """The kernel's log since this boot. `fault`: why it cannot be read. `partial`: its newest messages are
    missing."""

    xids: tuple[Xid, ...] = ()
    fault: str | None = None
    partial: bool = False


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
    """A folder and the free space on its file system; `device` is equal for folders on the same file system. `fault`:
    why the folder cannot be used."""

    role: Role
    folder: str
    free: int = 0
    device: int = 0
    fault: str | None = None


@dataclass(frozen=True)
class Answer:
    """The response of a server. `status`: the HTTP status. `fault`: why the server did not respond. `ahead`: the
    seconds by which this machine's clock is ahead of the server's."""

    address: str
    status: int | None = None
    fault: str | None = None
    ahead: float | None = None


@dataclass(frozen=True)
class Proxy:
    """A proxy. `variables`: the environment variables that set it. `fault`: its address is invalid, or nothing listens
    there."""

    variables: tuple[str, ...]
    address: str
    fault: str | None


@dataclass(frozen=True)
class Authorities:
    """A file or folder of CA certificates, named by an environment variable or by pip's configuration (`variable`).
    `certificates`: their number in a file; None for a folder."""

    variable: str
    path: str
    certificates: int | None = None
    expired: int = 0
    fault: str | None = None


@dataclass(frozen=True)
class SiteReading:
    """The site's settings: their file, the names that are set, the errors with file and line, a hint, the clusters
    whose registry is set, and why the folder of the shared cache of extensions cannot be used."""

    file: str
    names: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    hint: str | None = None
    clusters_with_registry: tuple[str, ...] = ()
    cache_fault: str | None = None


@dataclass(frozen=True)
class Host:
    """All data read from a machine. `pci`: the number of NVIDIA GPUs on its PCI bus. `switches`: whether it has
    NVSwitches. `fabric_manager`: whether the fabric manager runs; None if the host's processes are not visible. `shm`:
    the size of /dev/shm, 0 if it is missing. `memlock`: the bytes that a process may lock; None: no limit, or unknown.
    `software`: short name (torch, nccl, nccl-system, toolkit) -> version. `late`: the parts of the reading that were
    not completed in time; their fields are None or the defaults."""

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
