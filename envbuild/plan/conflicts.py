"""Refuses wheels that must not be installed together, and those that run code at every start of Python.

When a lock is made, what the wheels install is read from the store, from the cache, or from the index by ranges; an
index without ranges is asked for nothing, and the wheels are looked at once they are fetched. An index is not believed:
what it said of a wheel never replaces the look into the fetched file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO

from packaging.utils import parse_wheel_filename

from envbuild import settings
from envbuild.errors import Fault, LockError, ProfileError
from envbuild.once import once
from envbuild.plan import download, facts, index, store
from envbuild.plan.download import Head
from envbuild.plan.lock import Lock
from envbuild.plan.locked import LockedWheel, StartupFile, Wheel
from envbuild.plan.wheelfiles import SITE, Clash, Listing, clashes, installed, module, read
from envbuild.selftest import startup

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
_MOST = 20
_LARGEST = 1 << 20
_HINT = "leave one of the packages out, or lock another version of it"


def refuse_offered(addresses: Mapping[Wheel, str], heads: Mapping[Wheel, Head]) -> None:
    """For wheels that are about to be locked, as far as their listings can be had without fetching them.

    Raises ProfileError, NetworkError where an index does not answer.
    """
    with ThreadPoolExecutor(index.PARALLEL) as pool:
        found = dict(zip(addresses, pool.map(_offered, addresses, addresses.values(), heads.values()), strict=True))
    listings = {_name(wheel): listing for wheel, listing in found.items() if listing}
    faults = [*_own(listings), *(str(clash) for clash in clashes(listings) if not _may_be_alike(clash, listings))]
    if faults:
        raise ProfileError("; ".join(faults[:_MOST]), hint=_HINT)


def refuse_stored(
    locked: Iterable[LockedWheel], accepted: Collection[StartupFile] = (), built: Mapping[str, Path] | None = None
) -> None:
    """For locked wheels, of which the store has all, and wheels that were `built`, by name. `accepted`: files that may
    run code at Python's start. Raises LockError, and HashMismatch for a file that was damaged in the store."""
    files = {_name(w): store.wheels().path(w.sha256, w.file) for w in (item.wheel for item in locked)}
    files |= built or {}
    listings = {name: _readable(path) for name, path in files.items()}
    faults = [*_own(listings), *(str(clash) for clash in clashes(listings) if not _alike(clash, files))]
    run = [text for name, path in files.items() for text in _startup(name, path, listings[name], accepted)]
    if faults or run:
        hint = (
            _HINT if faults else "if you trust it, accept it in the profile, under startup: file, sha256 and a reason"
        )
        found = [Fault(text) for text in (*faults, *run)]
        raise LockError("refused packages", hint=hint, faults=found[:_MOST])


def _readable(wheel: Path) -> Listing:
    """Raises HashMismatch for a file that was damaged in the store, LockError for another that cannot be read."""
    try:
        return _stored(wheel)
    except ValueError as error:
        if wheel.parent.parent == store.wheels().folder:
            store.wheels().check(wheel.parent.name, wheel.name)
        raise LockError(f"{wheel.name} cannot be read: {error}", hint="lock another version of it") from None


def _name(wheel: Wheel) -> str:
    return f"{wheel.name} {wheel.version}"


def _own(listings: Mapping[str, Listing]) -> list[str]:
    return [f"{name}: {fault}" for name, listing in listings.items() for fault in listing.faults]


# what a wheel installs


def _offered(wheel: Wheel, address: str, head: Head) -> Listing | None:
    """None where it cannot be had without fetching the wheel. Raises ProfileError for an invalid wheel."""
    held = store.wheels().path(wheel.sha256, wheel.file)
    noted = settings.cache_folder("listings") / f"{wheel.sha256}.json"
    try:
        if held.is_file():
            return _stored(held)
        if noted.is_file():
            return Listing(**json.loads(noted.read_text(encoding="utf-8")))
        if not head.ranges:
            return None
        with download.opened(_session(), address, wheel.file, head.bytes) as stream:
            found = read(stream, wheel.file)
    except download.RangeIgnored:
        return None
    except ValueError as error:
        raise ProfileError(
            f"{wheel.file} is not a readable wheel: {error}", hint="lock another version of it"
        ) from None
    store.write_atomically(noted, json.dumps(asdict(found)))
    return found


_session = once(index.session)


@once
def _stored(path: Path) -> Listing:
    with path.open("rb") as stream:
        return read(stream, path.name)


# two wheels


def _may_be_alike(clash: Clash, listings: Mapping[str, Listing]) -> bool:
    """By CRC and size: only the bytes can say that it is so."""
    said = {listings[name].files.get(clash.path) for name in (clash.first, clash.second)}
    known = {f"{zlib.crc32(text):08x} {len(text)}" for text in facts.namespace_texts()}
    return clash.alike or (_is_namespace(clash) and said <= known)


def _alike(clash: Clash, files: Mapping[str, Path]) -> bool:
    if clash.path != clash.other:
        return False
    found = {_digest(files[name], clash.path) for name in (clash.first, clash.second)}
    known = {hashlib.sha256(text).hexdigest() for text in facts.namespace_texts()}
    return len(found) == 1 or (_is_namespace(clash) and found <= known)


def _is_namespace(clash: Clash) -> bool:
    return clash.path == clash.other and clash.path.endswith("/__init__.py")


# what runs at Python's start


def _startup(name: str, wheel: Path, listing: Listing, accepted: Collection[StartupFile]) -> Iterator[str]:
    """A `.pth` file counts with every line: the folder that it adds may hold a sitecustomize. Of the metadata only the
    entry points of torch.backends count."""
    known = {row.sha256 for row in facts.startup_files() if row.distribution == wheel_name(wheel)}
    for path in listing.files:
        below = path.removeprefix(f"{SITE}/")
        is_pth = "/" not in below and below.endswith(".pth")
        is_entry_points = startup.ENTRY_POINTS.fullmatch(below) is not None
        is_module = (module(path) or "").split("/")[0] in startup.MODULES
        if path == below or not (is_pth or is_entry_points or is_module):
            continue
        content, sha256 = _content(wheel, path), _digest(wheel, path)
        takes_effect = (is_pth and startup.lines(content)) or (is_entry_points and startup.loads_backend(content))
        if (is_pth or is_entry_points) and len(content) <= _LARGEST and not takes_effect:
            continue
        if sha256 not in known | _accepted(below, accepted):
            when = "torch is imported" if is_entry_points else "Python starts"
            yield f"{name} installs {below} (sha256 {sha256}), which takes effect whenever {when}"


def _accepted(file: str, accepted: Iterable[StartupFile]) -> set[str]:
    return {item.sha256 for item in accepted if item.file == file}


# the bytes


def contents(lock: Lock) -> dict[str, dict[str, str]]:
    """By "name==version" of each locked wheel that the store has: sha256 by path below site-packages."""
    paths = {item.wheel: store.wheels().path(item.wheel.sha256, item.wheel.file) for item in lock.wheels}
    held = {wheel: path for wheel, path in paths.items() if path.is_file()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = [f"{wheel.name}=={wheel.version}" for wheel in held]
        found = dict(zip(names, pool.map(_contents, held, held.values()), strict=True))
    if lock.overrides:  # METADATA was written anew, to ask for the override
        return {name: {p: h for p, h in files.items() if not _METADATA.fullmatch(p)} for name, files in found.items()}
    return found


def _contents(wheel: Wheel, file: Path) -> dict[str, str]:
    """Read once for each wheel: it takes as long as to unpack it."""
    noted = settings.cache_folder("contents") / f"{wheel.sha256}.json"
    if noted.is_file():
        known: dict[str, str] = json.loads(noted.read_text(encoding="utf-8"))
        return known
    found: dict[str, str] = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            site, _, path = installed(info.filename, wheel.name).partition("/")
            if site == SITE and not info.is_dir() and not path.endswith(".dist-info/RECORD"):
                with archive.open(info) as stream:
                    found[path] = _sha256(stream)
    store.write_atomically(noted, json.dumps(found))
    return found


def wheel_name(wheel: Path) -> str:
    return parse_wheel_filename(wheel.name)[0]


def _content(wheel: Path, path: str) -> bytes:
    with _opened(wheel, path) as stream:
        return stream.read(_LARGEST + 1)


@once
def _digest(wheel: Path, path: str) -> str:
    """sha256 of what a wheel installs as `path`; of a generated script the function that it calls."""
    with _opened(wheel, path) as stream:
        return _sha256(stream)


def _sha256(stream: IO[bytes]) -> str:
    found = hashlib.sha256()
    while block := stream.read(_LARGEST):
        found.update(block)
    return found.hexdigest()


@contextlib.contextmanager
def _opened(wheel: Path, path: str) -> Iterator[IO[bytes]]:
    distribution = wheel_name(wheel)
    with zipfile.ZipFile(wheel) as archive:
        member = next((i for i in archive.infolist() if installed(i.filename, distribution) == path), None)
        if member is None:
            yield io.BytesIO(_stored(wheel).files[path].encode())
        else:
            with archive.open(member) as stream:
                yield stream
