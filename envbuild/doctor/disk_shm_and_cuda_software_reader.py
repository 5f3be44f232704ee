"""Reads a machine's shared memory, disks, and installed CUDA software.

Nothing is raised if something is missing or cannot be read.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from envbuild.doctor.machine_readings import Disk, Role, clean
from envbuild.doctor.pci_nvswitch_and_rdma_reader import file_text
from envbuild.util import user_folders


def shm_bytes(root: Path) -> int:
    """The size of /dev/shm in bytes; 0 if missing."""
    try:
        found = os.statvfs(root / "dev" / "shm")
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def disks(engine: str | None) -> Iterator[Disk]:
    """Yields the disk of the cache folder, and the disk of the engine's folder if that is on this machine. `engine`:
    the engine's folder."""
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
    """Returns short name -> version, read from files only: the CUDA toolkit in /usr/local, the system's NCCL, and torch
    and NCCL of the active Python environment. If no environment is active, envbuild's own is read."""
    found: dict[str, str] = {}
    toolkit = re.search(
        r'"cuda"\s*:\s*{[^}]*"version"\s*:\s*"([0-9.]+)"', file_text(root / "usr/local/cuda/version.json")
    )
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
