"""Store of files by sha256: each file is downloaded once for all profiles, engines and rebuilds."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from envbuild.util import atomic_files, temporary_files, user_folders
from envbuild.util.errors import HashMismatch


@dataclass(frozen=True)
class Store:
    """Files at `<folder>/<sha256>/<file name>`; a file is stored completely or not at all. The folder is created when
    the first download begins."""

    folder: Path

    def path(self, sha256: str, name: str) -> Path:
        return self.folder / sha256 / name

    def holds(self, sha256: str, name: str) -> bool:
        return self.path(sha256, name).is_file()

    @contextlib.contextmanager
    def incoming(self) -> Iterator[Path]:
        """A temporary folder in the store's folder for downloads; always removed afterwards."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with temporary_files.folder("incoming", self.folder) as folder:
            yield folder

    def put(self, file: Path, sha256: str, name: str) -> Path:
        """Check `file` and move it into the store. Raises HashMismatch with the file's name."""
        found = file_digest(file)
        if found != sha256:
            raise HashMismatch(
                f"{name} is not the file that was locked: sha256 {found}, locked {sha256}",
                hint="a mirror serves a different file under this name, or the download was cut short; use a mirror "
                "that you trust, or lock everything again: envbuild lock PROFILE --upgrade",
            )
        target = self.path(sha256, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        return target

    def check(self, sha256: str, name: str) -> None:
        """Raise HashMismatch if a stored file has changed, and remove that file."""
        path = self.path(sha256, name)
        found = file_digest(path)
        if found != sha256:
            hint = "the damaged file was removed: run the same command again to download it"
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # only another user may write to the folder
                hint = f"the damaged file cannot be removed ({error.strerror}): remove {path}, then repeat the command"
            raise HashMismatch(f"{name} was damaged on this disk: sha256 {found}, locked {sha256}", hint=hint)


def check_changed(store: Store, files: Mapping[str, str], record: Path) -> None:
    """Check the stored files, by sha256 and name, that have changed since the last call with this `record`, a JSON file
    with the state of each checked file. The state is inode, size, and both times of change: a program cannot write to a
    file without changing it. Raises HashMismatch as Store.check does."""
    now = {sha256: _state(store.path(sha256, name)) for sha256, name in files.items()}
    try:
        before = json.loads(record.read_bytes())
        changed = [sha256 for sha256, state in now.items() if before.get(sha256) != state]
    except (OSError, ValueError, AttributeError):  # missing, or not written by this envbuild
        changed = list(now)
    if not changed:
        return
    from concurrent.futures import ThreadPoolExecutor  # not needed if nothing has changed

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda sha256: store.check(sha256, files[sha256]), changed))
    atomic_files.write_atomically(record, json.dumps(now))


def _state(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def wheel_store() -> Store:
    return Store(user_folders.cache_folder("wheels", make=False))


def debs() -> Store:
    return Store(user_folders.cache_folder("debs", make=False))


def archive_store() -> Store:
    return Store(user_folders.cache_folder("archives", make=False))


def file_digest(file: Path) -> str:
    """sha256 of a file's content, hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


T = TypeVar("T")


def noted_listing(sha256: str) -> Path:
    """The cache file with the list of files and the size of a wheel, as an index offered it."""
    return user_folders.cache_folder("listings") / f"{sha256}.json"


def noted(file: Path, kind: type[T]) -> T | None:
    """The value in a JSON cache file; None if the file is missing or invalid, so that it is created again."""
    from pydantic import TypeAdapter  # only few commands need it

    try:
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None
