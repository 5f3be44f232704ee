"""The files that uv installs from a wheel and those in our layer of it, in one form: path -> mode and content."""

from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

from envbuild.fetch.wheel_resolution_and_download import uv_binary
from envbuild.image.layers.layer_writer import write_layer
from envbuild.image.layers.wheel_installed_files import installed_files
from envbuild.image.layers.wheel_reader import open_wheel

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
Tree = dict[str, tuple[int, bytes | None]]
"""By path below the environment; folders have no content, links the content b"-> target"."""


class UvRefused(Exception):
    """uv does not install the wheel."""


class UvOracle:
    """An empty virtual environment, and its copy in which one wheel is installed at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.empty, self.environment = folder, folder / "empty", folder / "venv"
        self._uv("venv", "--quiet", "--python", sys.executable, self.empty)
        self._before = set(self._listed(self.empty))

    def _uv(self, *arguments: str | Path) -> None:
        done = subprocess.run(
            [uv_binary(), *arguments, "--no-config", "--offline"],
            env={"PATH": os.defpath, "HOME": str(self.folder), "UV_NO_CACHE": "1", "UV_NO_INSTALLER_METADATA": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise UvRefused(done.stderr)

    @staticmethod
    def _listed(folder: Path) -> list[Path]:
        return [path.relative_to(folder) for path in folder.rglob("*")]

    def _is_folder(self, path: Path) -> bool:
        """Whether a folder in a layer leaves this path of the empty environment as it is."""
        return (self.empty / path).is_dir() and not (self.empty / path).is_symlink()

    def install(self, *wheels: Path) -> Tree:
        """Install wheels into an empty environment. Raises UvRefused."""
        shutil.rmtree(self.environment, ignore_errors=True)
        shutil.copytree(self.empty, self.environment, symlinks=True)
        python = self.environment / "bin" / "python"
        self._uv("pip", "install", "--quiet", "--python", python, "--no-index", "--no-deps", "--link-mode", "copy",
                 "--no-compile", *wheels)  # fmt: skip
        found: Tree = {}
        for path in sorted(set(self._listed(self.environment)) - self._before - {Path(".lock")}):
            full = self.environment / path
            mode = full.lstat().st_mode
            if stat.S_ISLNK(mode):
                found[str(path)] = (0o777, b"-> " + os.fsencode(full.readlink()))
            else:
                found[str(path)] = (stat.S_IMODE(mode), full.read_bytes() if stat.S_ISREG(mode) else None)
        return found

    def written(self, wheel: Path) -> Tree:
        """Write a layer for the same environment, and read this layer. Raises WheelRefused."""
        packed = io.BytesIO()
        with open_wheel(wheel) as reader:
            write_layer(installed_files(reader, PYTHON, str(self.environment)), packed.write)
        found = read_layer(packed.getvalue())
        inside = f"{self.environment}/".lstrip("/")
        shared = {str(path) for path in self._before if self._is_folder(path)}
        return {
            path.removeprefix(inside): about
            for path, about in found.items()
            if path.startswith(inside) and (about[1] is not None or path.removeprefix(inside) not in shared)
        }


def read_layer(packed: bytes) -> Tree:
    """Read a layer with Python's gzip and tarfile."""
    found: Tree = {}
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
        for member in tar:
            assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
            assert member.mtime == 1704067200
            assert member.name not in found
            content = tar.extractfile(member) if member.isreg() else None
            raw = content.read() if content else b"-> " + member.linkname.encode() if member.issym() else None
            found[member.name] = (member.mode, raw)
    return found


def differences(one: Tree, other: Tree) -> list[str]:
    """Return the paths on which two trees differ, with what differs."""
    found = []
    for path in sorted(one.keys() | other.keys()):
        if path not in one or path not in other:
            found.append(f"{path}: only in the {'second' if path not in one else 'first'}")
        elif one[path] != other[path]:
            found.append(f"{path}: {one[path]!r:.300} and {other[path]!r:.300}")
    return found
