"""A small separate file system, ext4 in a file, that can be filled and emptied again."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


class Disk:
    """A disk of this size, mounted at `folder`; any user may write to it, and no space is reserved for root."""

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
        """Fill the disk until this many bytes are free, by default none."""
        with self._ballast.open("ab") as file:
            for block in (64 << 20, 1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while shutil.disk_usage(self.folder).free >= leave + block:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, block)

    def empty(self) -> None:
        """Free the space again."""
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True, capture_output=True)
        self._image.unlink()


def usable() -> str | None:
    """Return why such a disk is impossible here; None if it is possible."""
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
