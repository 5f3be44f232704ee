"""Refuses wheels that conflict with each other, and wheels that run code at every start of Python.

When a lock is made, the paths that wheels install are read from the store, from the cache, or from the index by range
requests. If the index does not support range requests, wheels are checked only after their download. The index is not
trusted: every downloaded file is checked again.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from envbuild.facts import database
from envbuild.fetch import (
    file_download_and_range_reads,
    index_config,
    sha256_file_store,
    wheel_file_lists_and_clashes,
    wheel_resolution_and_download,
)
from envbuild.fetch.file_download_and_range_reads import RemoteFile
from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.fetch.wheel_file_lists_and_clashes import SITE, Clash, Listing, clashes, module
from envbuild.lock import wheel_file_hashes_and_contents
from envbuild.profile.value_types import StartupFile
from envbuild.selftest.inventory import startup_files
from envbuild.util import atomic_files
from envbuild.util.errors import Fault, LockError, ProfileError

_MOST = 20
# The folders in which Python's module site looks for .pth files. Debian's Python also uses dist-packages, even in a
# virtual environment.
_SITES = re.compile(rf"(?:{SITE}|(?:local/)?lib/python3(?:\.[0-9]+)?/dist-packages)/(.+)")
_HINT = "leave one of the packages out, or lock a different version of it"


@dataclass(frozen=True)
class OfferedListing:
    """The list of files and the size in bytes of a wheel on an index, read without downloading the wheel."""

    listing: Listing
    bytes: int


def check_offered(
    addresses: Mapping[Wheel, str], wanted_by: Mapping[str, Collection[str]] | None = None
) -> dict[Wheel, int]:
    """Check wheels before they are locked, if their listings are available without a download. Return the size of each
    wheel in bytes. `wanted_by`: as in Resolved; a conflict then names the packages that require the two.

    Raises ProfileError if they conflict; NetworkError if an index does not answer; for a wheel in the store, the errors
    of wheel_file_hashes_and_contents.listing.
    """
    with ThreadPoolExecutor(index_config.PARALLEL) as pool:
        found = dict(zip(addresses, pool.map(_offered, addresses, addresses.values()), strict=True))
    listings = {_name(wheel): listing for wheel, (listing, _) in found.items() if listing}
    conflicts = [clash for clash in clashes(listings) if not _may_be_equal(clash, listings)]
    faults = [*_own(listings), *map(str, conflicts)]
    if faults:
        names = dict.fromkeys(one.split(" ")[0] for clash in conflicts for one in (clash.first, clash.second))
        required = {name: ", ".join(sorted({*(wanted_by or {}).get(name, ())} - {""})) for name in names}
        parents = [f"{name} is required by {by}" for name, by in required.items() if by]
        raise ProfileError("; ".join(faults[:_MOST]), hint="\n".join([_HINT, *parents]))
    return {wheel: size for wheel, (_, size) in found.items()}


def refuse_stored(
    locked: Iterable[LockedWheel], accepted: Collection[StartupFile] = (), built: Mapping[str, Path] | None = None
) -> None:
    """Check locked wheels, which must all be in the store. `built`: further wheels, compiled from source, by name.

    `accepted`: files that may run code when Python starts. Raises LockError; HashMismatch for a file damaged in the
    store.
    """
    files = {_name(w): sha256_file_store.wheel_store().path(w.sha256, w.file) for w in (item.wheel for item in locked)}
    files |= built or {}
    listings = {name: wheel_file_hashes_and_contents.listing(path) for name, path in files.items()}
    # do not read the content of refused wheels: their names may be ambiguous, their compression unsupported
    sound = {name: path for name, path in files.items() if not listings[name].faults}
    faults = [*_own(listings), *(str(clash) for clash in clashes(listings) if not _are_equal(clash, sound))]
    run = [text for name, path in sound.items() for text in _startup(name, path, listings[name], accepted)]
    if faults or run:
        hint = (
            _HINT if faults else "if you trust it, accept it in the profile, under startup: file, sha256 and a reason"
        )
        found = [Fault(text) for text in (*faults, *run)]
        raise LockError("refused packages", hint=hint, faults=found[:_MOST])


def _name(wheel: Wheel) -> str:
    return f"{wheel.name} {wheel.version}"


def _own(listings: Mapping[str, Listing]) -> list[str]:
    return [f"{name}: {fault}" for name, listing in listings.items() for fault in listing.faults]


def _offered(wheel: Wheel, address: str) -> tuple[Listing | None, int]:
    """The files that a wheel installs, or None if only a download would show them; and its size in bytes. Sizes and
    lists of files that were read from an index are cached. Raises ProfileError for an invalid wheel on the index, and
    the errors of wheel_file_hashes_and_contents.listing."""
    held = sha256_file_store.wheel_store().path(wheel.sha256, wheel.file)
    if held.is_file():
        return wheel_file_hashes_and_contents.listing(held), held.stat().st_size
    noted = sha256_file_store.noted_listing(wheel.sha256)
    if known := sha256_file_store.noted(noted, OfferedListing):
        return known.listing, known.bytes
    head = wheel_resolution_and_download.request_head(address, wheel.file)
    if not head.ranges:
        return None, head.bytes
    try:
        with file_download_and_range_reads.open_remote_file(
            index_config.shared_session(), RemoteFile(address, wheel.file), head.bytes
        ) as stream:
            found = wheel_file_lists_and_clashes.read(stream, wheel.file)
    except file_download_and_range_reads.RangeIgnored:
        return None, head.bytes
    except ValueError as error:
        raise ProfileError(
            f"{wheel.file} is not a readable wheel: {error}", hint="lock a different version of it"
        ) from None
    atomic_files.write_atomically(noted, json.dumps(asdict(OfferedListing(found, head.bytes))))
    return found, head.bytes


# conflicts between two wheels


def _may_be_equal(clash: Clash, listings: Mapping[str, Listing]) -> bool:
    """Whether the files may be equal, by CRC and size, or may both be the `__init__.py` of a namespace that wheels
    share. Only a comparison of the bytes is proof."""
    checksums = {listings[name].files.get(clash.path) for name in (clash.first, clash.second)}
    known = {f"{zlib.crc32(text):08x} {len(text)}" for text in database.namespace_texts()}
    return clash.equal or (_is_namespace(clash) and checksums <= known)


def _are_equal(clash: Clash, files: Mapping[str, Path]) -> bool:
    names = (clash.first, clash.second)
    if clash.path != clash.other or not files.keys() >= set(names):
        return False
    found = {wheel_file_hashes_and_contents.installed_sha256(files[name], clash.path) for name in names}
    known = {hashlib.sha256(text).hexdigest() for text in database.namespace_texts()}
    return len(found) == 1 or (_is_namespace(clash) and found <= known)


def _is_namespace(clash: Clash) -> bool:
    return clash.path == clash.other and clash.path.endswith("/__init__.py")


# files that run at Python's start


def _startup(name: str, wheel: Path, listing: Listing, accepted: Collection[StartupFile]) -> Iterator[str]:
    """Messages for files that run code when Python starts or torch is imported, and are not accepted. Every effective
    line of a `.pth` file counts, because a folder that it adds may contain a sitecustomize. Entry points count only if
    they are of the group torch.backends."""
    known = {
        row.sha256
        for row in database.startup_files()
        if row.distribution == wheel_file_hashes_and_contents.distribution_name(wheel)
    }
    for path in listing.files:
        match = _SITES.fullmatch(path)
        if match is None:
            continue
        below = match[1]
        is_pth = "/" not in below and below.endswith(".pth")
        is_entry_points = startup_files.ENTRY_POINTS.fullmatch(below) is not None
        is_module = (module(f"{SITE}/{below}") or "").split("/")[0] in startup_files.MODULES
        if not (is_pth or is_entry_points or is_module):
            continue
        content, sha256 = (
            wheel_file_hashes_and_contents.read(wheel, path),
            wheel_file_hashes_and_contents.installed_sha256(wheel, path),
        )
        takes_effect = (is_pth and startup_files.pth_lines(content)) or (
            is_entry_points and startup_files.loads_backend(content)
        )
        if (
            (is_pth or is_entry_points)
            and len(content) <= wheel_file_hashes_and_contents.LARGEST_TEXT
            and not takes_effect
        ):
            continue
        if sha256 not in known | _accepted(below, accepted):
            when = "torch is imported" if is_entry_points else "Python starts"
            shown = path.removeprefix(f"{SITE}/")
            yield f"{name} installs {shown} (sha256 {sha256}), which takes effect whenever {when}"


def _accepted(file: str, accepted: Iterable[StartupFile]) -> set[str]:
    return {item.sha256 for item in accepted if item.file == file}
