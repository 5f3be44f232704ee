"""Reads wheels on this machine: the paths that they install, the bytes of these files, and the folders they own."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from packaging.utils import parse_wheel_filename

from envbuild.fetch import sha256_file_store, wheel_file_lists_and_clashes
from envbuild.fetch.locked_wheel_types import Wheel
from envbuild.fetch.wheel_file_lists_and_clashes import BROKEN, SITE, Listing, installed
from envbuild.lock.lock_file import Lock
from envbuild.util import atomic_files, user_folders
from envbuild.util.errors import EnvbuildError, LockError, printable
from envbuild.util.thread_safe_cache import thread_safe_cache

LARGEST_TEXT = 1 << 20
"""How many bytes of a file are read to inspect its text."""
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
# Namespaces shared by many wheels: a wheel owns only its folder below them.
_SHARED = frozenset({"nvidia", "google"})
_BLOCK = 1 << 20


def distribution_name(wheel: Path) -> str:
    """The normalised name of a wheel's distribution, from its file name."""
    return parse_wheel_filename(wheel.name)[0]


@thread_safe_cache
def listing(wheel: Path) -> Listing:
    """The files that a wheel installs. If the wheel cannot be read, raises HashMismatch if it was damaged in the store,
    otherwise LockError. Damage that leaves the list of files readable is not detected."""
    with _readable(wheel), wheel.open("rb") as stream:
        return wheel_file_lists_and_clashes.read(stream, wheel.name)


def roots(wheel: Path) -> tuple[str, ...]:
    """The folders and modules below site-packages that belong to a wheel, such as ("torch", "torch-2.3.1.dist-info").
    Writing to them changes the package. Raises the errors of `listing`."""
    site = f"{SITE}/"
    return tuple(sorted({_root(path.removeprefix(site)) for path in listing(wheel).files if path.startswith(site)}))


def _root(path: str) -> str:
    parts = path.split("/")
    return "/".join(parts[: 2 if parts[0] in _SHARED else 1])


# the bytes of one file


def read(wheel: Path, path: str) -> bytes:
    """The first LARGEST_TEXT + 1 bytes of the file that a wheel installs as `path`. Raises the errors of `listing`."""
    with _opened(wheel, path) as stream:
        return stream.read(LARGEST_TEXT + 1)


@thread_safe_cache
def installed_sha256(wheel: Path, path: str) -> str:
    """sha256 of the file that a wheel installs as `path`; for a generated script, the sha256 of the name of the
    function that it calls. Raises the errors of `listing`."""
    with _opened(wheel, path) as stream:
        return _sha256(stream)


def _sha256(stream: IO[bytes]) -> str:
    found = hashlib.sha256()
    while block := stream.read(_BLOCK):
        found.update(block)
    return found.hexdigest()


@contextlib.contextmanager
def _opened(wheel: Path, path: str) -> Iterator[IO[bytes]]:
    name = distribution_name(wheel)
    with _readable(wheel), zipfile.ZipFile(wheel) as archive:
        member = next((i for i in archive.infolist() if installed(i.filename, name) == path), None)
        if member is None:
            yield io.BytesIO(listing(wheel).files[path].encode())
        else:
            with archive.open(member) as stream:
                yield stream


@contextlib.contextmanager
def _readable(wheel: Path) -> Iterator[None]:
    """A context in which errors of reading a wheel become HashMismatch or LockError, as `listing` raises them."""
    try:
        yield
    except BROKEN as error:
        raise _unreadable(wheel, error) from None


def _unreadable(wheel: Path, error: Exception) -> EnvbuildError:
    held = sha256_file_store.wheel_store()
    if wheel.parent.parent == held.folder:
        held.check(wheel.parent.name, wheel.name)
    why = printable(str(error))[:200] or type(error).__name__
    return LockError(f"{wheel.name} cannot be read: {why}", hint="lock a different version of it")


# the bytes of all files


def wheel_hashes(lock: Lock) -> dict[str, dict[str, str]]:
    """For each locked wheel in the store, "name==version" -> sha256 by path below site-packages, without RECORD, and
    without METADATA if the lock has overrides. Raises the errors of `listing`."""
    paths = {
        item.wheel: sha256_file_store.wheel_store().path(item.wheel.sha256, item.wheel.file) for item in lock.wheels
    }
    held = {wheel: path for wheel, path in paths.items() if path.is_file()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = [f"{wheel.name}=={wheel.version}" for wheel in held]
        found = dict(zip(names, pool.map(_hashes, held, held.values()), strict=True))
    if lock.overrides:  # the image's METADATA may differ: it is changed to require the override
        return {name: {p: h for p, h in files.items() if not _METADATA.fullmatch(p)} for name, files in found.items()}
    return found


def _hashes(wheel: Wheel, file: Path) -> dict[str, str]:
    """The hashes of one wheel, cached: computing them takes as long as unpacking it."""
    noted = user_folders.cache_folder("contents") / f"{wheel.sha256}.json"
    known = sha256_file_store.noted(noted, dict[str, str])
    if known is not None:
        return known
    found: dict[str, str] = {}
    with _readable(file), zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            site, _, path = installed(info.filename, wheel.name).partition("/")
            if site == SITE and not info.is_dir() and not path.endswith(".dist-info/RECORD"):
                with archive.open(info) as stream:
                    found[path] = _sha256(stream)
    atomic_files.write_atomically(noted, json.dumps(found))
    return found
