"""Reads a machine's shared memory, disks, and installed CUDA software.

Nothing is raised if something is missing or cannot be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
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
    the engine's folder. No folder is created: a missing cache folder is on the disk of its nearest existing parent."""
    try:
        yield _cache_disk(user_folders.cache_folder("wheels", make=False))
    except OSError as error:
        yield Disk("cache", clean(str(error.filename)), fault=clean(error.strerror or "unusable"))
    if engine:
        with contextlib.suppress(OSError):
            yield _disk("engine", Path(engine))


def _cache_disk(folder: Path) -> Disk:
    """Return the disk of a folder, which need not exist. Raises OSError if the path is not a folder, or if the folder
    is missing and cannot be created."""
    for existing in (folder, *folder.parents):
        try:
            found = _disk("cache", existing)
        except FileNotFoundError:
            if not existing.is_symlink():
                continue
            missing = f"symbolic link to the missing {os.path.realpath(existing)}"
            raise FileNotFoundError(errno.ENOENT, missing, str(existing)) from None
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
        if existing != folder and not os.access(existing, os.W_OK | os.X_OK):
            code = errno.EROFS if os.statvfs(existing).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code), str(existing))
        return dataclasses.replace(found, folder=str(folder))
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


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
