"""A small file system of its own, ext4 in a file, that can be filled and emptied again."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


class Disk:
    """Mounted at `folder`, so many bytes; every byte of it is for anybody, none is reserved for root."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self._image = folder.with_name(f"{folder.name}.ext4")
        folder.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(size)
        for command in (
            ["mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-O", "^has_journal", str(self._image)],
            ["mount", "-o", "loop", str(self._image), str(folder)],
        ):
            subprocess.run(command, check=True, capture_output=True)

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def fill(self, leave: int = 0) -> None:
        """Until so many bytes are free, or none at all."""
        with self._ballast.open("ab") as file:
            for block in (64 << 20, 1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while shutil.disk_usage(self.folder).free >= leave + block:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, block)

    def empty(self) -> None:
        """There is room again."""
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True, capture_output=True)
        self._image.unlink()


def usable() -> str | None:
    """Why there can be no such disk here, None where there can."""
    if os.geteuid() != 0:
        return "only root can mount a file system"
    if not Path("/dev/loop-control").exists() or not shutil.which("mkfs.ext4"):
        return "no loop devices, or no mkfs.ext4"
    return None


@contextlib.contextmanager
def disk(folder: Path, size: int) -> Iterator[Disk]:
    made = Disk(folder, size)
    try:
        yield made
    finally:
        made.unmount()
