"""Reads a machine's PCI bus, RDMA, shared memory, disks and installed software.

It never raises for something that is missing or not readable.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from envbuild.doctor.machine_readings import Disk, Port, Role, clean
from envbuild.util import user_folders

_NVIDIA, _DISPLAY, _3D = "0x10de", "0x0300", "0x0302"  # PCI vendor, and the two device classes of its GPUs
_FABRIC_MANAGER = "nv-fabricmanage"  # the kernel cuts process names after 15 characters


def pci(root: Path) -> int | None:
    """The number of NVIDIA GPUs on the PCI bus; None where the kernel does not list the bus."""
    folder = root / "sys" / "bus" / "pci" / "devices"
    if not folder.is_dir():
        return None
    kinds = ((_word(device / "vendor"), _word(device / "class")[:6]) for device in folder.iterdir())
    return sum(vendor == _NVIDIA and kind in (_DISPLAY, _3D) for vendor, kind in kinds)


def switches(root: Path) -> bool:
    """Whether the driver has NVSwitches."""
    return any(root.glob("dev/nvidia-nvswitch[0-9]*")) or any(root.glob("proc/driver/nvidia-nvswitch/devices/*"))


def fabric_manager(root: Path) -> bool | None:
    """Whether the fabric manager runs; None where the host's processes are not visible, as in a container."""
    if _word(root / "proc" / "2" / "comm") != "kthreadd":
        return None
    return any(_word(file) == _FABRIC_MANAGER for file in root.glob("proc/[0-9]*/comm"))


def rdma_ports(root: Path) -> Iterator[Port]:
    """The ports of RDMA devices, with state "ACTIVE" and link "InfiniBand" or "Ethernet", for example."""
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*"))[:64]:
        state = _word(port / "state").rpartition(": ")[2]
        name = clean(f"{port.parents[1].name}/{port.name}")
        yield Port(name, clean(state), clean(_word(port / "link_layer")), clean(_word(port / "rate")))


def memlock() -> int | None:
    """The number of bytes that a process may lock, which RDMA requires; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def shm_bytes(root: Path) -> int:
    """The size of /dev/shm in bytes; 0 if missing."""
    try:
        found = os.statvfs(root / "dev" / "shm")
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def disks(engine: str | None) -> Iterator[Disk]:
    """The disk of the cache folder, and the engine's disk where it is on this machine."""
    try:
        yield _disk("cache", user_folders.cache_folder("wheels"))
    except OSError as error:
        yield Disk("cache", clean(str(error.filename)), fault=clean(error.strerror or "unusable"))
    if engine:
        with contextlib.suppress(OSError):
            yield _disk("engine", Path(engine))


def _disk(role: Role, folder: Path) -> Disk:
    found = os.statvfs(folder)
    return Disk(role, str(folder), found.f_bavail * found.f_frsize, folder.stat().st_dev)


def software(root: Path) -> dict[str, str]:
    """Versions by short name, read from files only: the CUDA toolkit in /usr/local, the system's NCCL, and torch and
    NCCL of the active environment (else of the one that runs envbuild)."""
    found: dict[str, str] = {}
    toolkit = re.search(r'"cuda"\s*:\s*{[^}]*"version"\s*:\s*"([0-9.]+)"', _text(root / "usr/local/cuda/version.json"))
    if toolkit:
        found["toolkit"] = toolkit[1]
    for pattern in ("usr/lib/*/libnccl.so.2.*", "usr/lib64/libnccl.so.2.*", "usr/local/lib/libnccl.so.2.*"):
        for file in sorted(root.glob(pattern)):
            found["nccl-system"] = clean(file.name.removeprefix("libnccl.so."), 40)
    folder = Path(os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or sys.prefix)
    for name, pattern in (("torch", "torch-*"), ("nccl", "nvidia_nccl_cu*-*")):
        for info in sorted(folder.glob(f"lib/python*/site-packages/{pattern}.dist-info")):
            found[name] = clean(info.name.removesuffix(".dist-info").partition("-")[2], 40)
    return found


def _word(file: Path) -> str:
    return _text(file).strip()


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(64 << 10).decode("utf-8", "replace")
    except OSError:
        return ""
