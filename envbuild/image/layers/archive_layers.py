"""The layers of archives: a CUDA toolkit, or the driver's compatibility libraries."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.fetch import sha256_file_store
from envbuild.fetch.archive_spec import FOLDERS, UNPACKER
from envbuild.image.layers import gzip_members, nvcc_links
from envbuild.image.layers.base_and_empty_venv_layers import file_blocks, write_compressed
from envbuild.image.layers.layer_writer import EXECUTABLE, TAR_BLOCK, WRITER_VERSION, WrittenLayer, tar_header
from envbuild.util import strict_and_canonical_json, temporary_files, user_folders
from envbuild.util.errors import BuildError, HashMismatch, printable
from envbuild.util.host_processes import run

NVCC_RELEASE = re.compile(rb"Cuda compilation tools, release (\d+\.\d+),")


@dataclass(frozen=True)
class ArchiveLayer:
    """The layer with an unpacked archive. `kind`: a key of archive_spec.FOLDERS; `sha256`: that of the file, hex;
    `release`: the CUDA release that its nvcc must have, such as "12.6", or empty for an archive without nvcc. If there
    is an nvcc, the links that linkers look for are added. `folder`: the folder for the archive in the image, if a
    symbolic link of the base image leads from the kind's usual folder to it; otherwise empty."""

    file: Path
    kind: str
    sha256: str
    release: str = ""
    folder: str = ""
    compressor: str = gzip_members.COMPRESSOR
    keeps_blob = True

    @property
    def key(self) -> str:
        versions = [WRITER_VERSION, self.compressor, sha256_file_store.file_digest(UNPACKER)]
        content = ["archive", versions, self.kind, self.sha256, self.release]
        return strict_and_canonical_json.canonical_digest(content + ([self.folder] if self.folder else []))

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer. Raises HashMismatch if the file was damaged, BuildError if the archive cannot be unpacked or
        its nvcc is of another release."""
        found = sha256_file_store.file_digest(self.file)
        if found != self.sha256:
            raise HashMismatch(
                f"{self.file} is not the locked archive: sha256 {found}, locked {self.sha256}",
                hint="the file was damaged on this disk: remove it, and run the same command again",
            )
        with temporary_files.folder("archive", user_folders.cache_folder("layers")) as folder:
            target = folder / "content"
            command: list[str | Path] = [sys.executable, UNPACKER, self.kind, self.file, target]
            done = run(command, env={"PYTHONUTF8": "1"}, timeout=1800)  # the same names in every locale
            if done.code:
                raise BuildError(f"{self.kind} cannot be unpacked", hint=done.stderr.strip().removeprefix("error: "))
            if self.release:
                self._require_release(target)
                _add_links(target)
            return write_compressed(_tar(target, (self.folder or FOLDERS[self.kind]).lstrip("/")), packed, plain)

    def _require_release(self, home: Path) -> None:
        """Raise BuildError if nvcc is of another release. nvcc is not run, because the archive may be hostile: the line
        that `nvcc --version` prints is read from nvcc's file."""
        file = home / "bin" / "nvcc"
        found = NVCC_RELEASE.search(file.read_bytes()) if file.is_file() else None
        if found is None or found[1].decode() != self.release:
            says = f"is of CUDA {found[1].decode()}" if found else "is missing, or names no release"
            text = f"{FOLDERS[self.kind]}/bin/nvcc {says}; torch needs CUDA {self.release}"
            raise BuildError(text, hint=f"set an archive of CUDA {self.release} as toolchain in the profile")


def _add_links(home: Path) -> None:
    """Add lib64 if it is missing, and the links that linkers look for. Links of the archive cannot lead out of the
    folder, because the unpacker refuses such links."""
    libraries = home / "lib64"
    if not libraries.exists():
        libraries.symlink_to("lib")
    if libraries.is_dir():
        names = {path.name for path in libraries.iterdir() if path.exists()}
        for link, target in nvcc_links.missing_links(names).items():
            (libraries / link).symlink_to(target)


def _tar(content: Path, root: str) -> Iterator[bytes]:
    """Yield the blocks of a tar: `root` and its parent folders, then the content of a folder, below `root` and sorted
    by path."""
    parts = root.split("/")
    for count in range(1, len(parts) + 1):
        yield tar_header(f"{'/'.join(parts[:count])}/", b"5", EXECUTABLE)
    names: dict[int, str] = {}  # inode -> the first path of a file
    for path in sorted(content.rglob("*"), key=lambda path: os.fsencode(path).split(b"/")):
        name, found = f"{root}/{_utf8(path.relative_to(content))}", path.lstat()
        if stat.S_ISLNK(found.st_mode):
            yield tar_header(name, b"2", 0o777, target=_utf8(path.readlink()))
        elif stat.S_ISDIR(found.st_mode):
            yield tar_header(f"{name}/", b"5", EXECUTABLE)
        elif names.setdefault(found.st_ino, name) != name:
            yield tar_header(name, b"1", found.st_mode & 0o777, target=names[found.st_ino])
        else:
            yield tar_header(name, b"0", found.st_mode & 0o777, found.st_size)
            yield from file_blocks(path)
            yield b"\0" * (-found.st_size % TAR_BLOCK)
    yield b"\0" * 2 * TAR_BLOCK


def _utf8(path: Path) -> str:
    """The path, decoded as UTF-8 in every locale. Raises BuildError if that is not possible."""
    try:
        return os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise BuildError(
            f"the archive has a path that is not UTF-8: {printable(str(path))!r}", hint="use another archive"
        ) from None
