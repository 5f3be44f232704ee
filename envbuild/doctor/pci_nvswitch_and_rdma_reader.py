"""Reads a machine's PCI bus, NVSwitches, fabric manager, RDMA ports and limit of locked memory.

Nothing is raised if something is missing or cannot be read.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from envbuild.doctor.machine_readings import Port, clean

_NVIDIA, _DISPLAY, _3D = "0x10de", "0x0300", "0x0302"  # NVIDIA's PCI vendor id, and the two device classes of its GPUs
_FABRIC_MANAGER = "nv-fabricmanage"  # the kernel cuts process names after 15 characters


def pci(root: Path) -> int | None:
    """The number of NVIDIA GPUs on the PCI bus; None if the kernel does not list the bus's devices."""
    folder = root / "sys" / "bus" / "pci" / "devices"
    if not folder.is_dir():
        return None
    kinds = ((_word(device / "vendor"), _word(device / "class")[:6]) for device in folder.iterdir())
    return sum(vendor == _NVIDIA and kind in (_DISPLAY, _3D) for vendor, kind in kinds)


def switches(root: Path) -> bool:
    """Whether the driver has created devices for NVSwitches."""
    return any(root.glob("dev/nvidia-nvswitch[0-9]*")) or any(root.glob("proc/driver/nvidia-nvswitch/devices/*"))


def fabric_manager(root: Path) -> bool | None:
    """Whether the fabric manager runs; None if the host's processes are not visible, as in a container."""
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


def _word(file: Path) -> str:
    return file_text(file).strip()


def file_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(64 << 10).decode("utf-8", "replace")
    except OSError:
        return ""
