"""Files by their sha256: what was fetched once is on the host for every profile, engine and rebuild."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from envbuild import scratch, settings
from envbuild.document import inside
from envbuild.errors import FileError, HashMismatch


@dataclass(frozen=True)
class Store:
    """`<folder>/<sha256>/<file name>`; a file is there whole or not at all."""

    folder: Path

    def path(self, sha256: str, name: str) -> Path:
        return self.folder / sha256 / name

    def holds(self, sha256: str, name: str) -> bool:
        return self.path(sha256, name).is_file()

    @contextlib.contextmanager
    def incoming(self) -> Iterator[Path]:
        """A folder beside the stored files to download into; gone afterwards, whatever happened."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with scratch.folder("incoming", self.folder) as folder:
            yield folder

    def put(self, file: Path, sha256: str, name: str) -> Path:
        """Move `file` in after checking it. Raises HashMismatch, naming the file."""
        found = digest(file)
        if found != sha256:
            raise HashMismatch(
                f"{name} is not the file that was locked: sha256 {found}, locked {sha256}",
                hint="a mirror serves another file under this name, or it was cut short; fetch it from a mirror you "
                "trust, or lock again",
            )
        target = self.path(sha256, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        return target

    def check(self, sha256: str, name: str) -> None:
        """Raises HashMismatch if a stored file is no longer what was put there; it is removed."""
        path = self.path(sha256, name)
        found = digest(path)
        if found != sha256:
            path.unlink()
            raise HashMismatch(
                f"{name} was damaged on this disk: sha256 {found}, locked {sha256}",
                hint="it was removed and will be fetched again: run the same command once more",
            )


def wheels() -> Store:
    return Store(settings.cache_folder("wheels"))


def debs() -> Store:
    return Store(settings.cache_folder("debs"))


def archives() -> Store:
    return Store(settings.cache_folder("archives"))


def digest(file: Path) -> str:
    """sha256 of a file's content, hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def holds_text(file: Path, text: str) -> bool:
    """Whether a file is there with exactly this content."""
    return file.is_file() and file.read_bytes() == text.encode()


T = TypeVar("T")


def noted(file: Path, kind: type[T]) -> T | None:
    """The value that a file of the cache holds as JSON; None where the file is missing or invalid: it is made anew."""
    from pydantic import TypeAdapter  # few commands read these

    try:
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def write_within(project: Path, file: Path, content: str | bytes) -> None:
    """Write a file of a project. Raises FileError where a link leads out of the project: its author may not choose
    which file is written."""
    try:
        inside(str(file.absolute()), file.parent, project)
    except ValueError as error:
        raise FileError(f"{error}: it is not written", hint="remove the link") from None
    write_atomically(file, content)


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write beside, flush to disk, then rename: a reader sees the old content or the new, never half.

    What is no file, as /dev/stdout, is written to; a link stays one, and a file keeps its permissions.
    """
    raw = content if isinstance(content, bytes) else content.encode()
    if file.exists() and not file.is_file():
        file.write_bytes(raw)
        return
    file = file.resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    with scratch.file(file.parent) as (stream, made):
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
        made.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o644)
        made.replace(file)
