"""Compares torch's current pins on the configured index with those in the facts."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from typing import IO

import requests
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.facts import database
from envbuild.facts.database import TorchRelease
from envbuild.fetch import file_download_and_range_reads, index_config, sha256_file_store, wheel_resolution_and_download
from envbuild.fetch.file_download_and_range_reads import RemoteFile
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.util import temporary_files
from envbuild.util.errors import NetworkError

# torch's wheels support this glibc and newer. The value only determines which wheel is read.
_GLIBC = "2.28"
_LARGEST = 1 << 22  # bytes of METADATA; that of torch 2.13 has 38 kB
_LARGEST_WHEEL = 1 << 32  # bytes; torch's have up to 1 GB


@dataclass(frozen=True)
class Difference:
    """A pin that differs between the index and the facts; None: the pin is missing in the index or in the facts."""

    release: str
    distribution: str
    facts: str | None
    index: str | None


def pin_differences(release: TorchRelease, say: Callable[[str], None]) -> list[Difference]:
    """Compare the pins in the metadata of torch's wheel with those in the facts. Reads the metadata file of the index
    (PEP 658), otherwise the wheel by range requests, otherwise the downloaded wheel. `say` announces the download of a
    wheel.

    Raises NetworkError if the index does not answer or the wheel is invalid, ProfileError if the index has no such
    wheel, and HashMismatch for a metadata file that is too large or a wheel with a different hash.
    """
    return list(_compare(release, pins(_metadata(release, say))))


def _metadata(release: TorchRelease, say: Callable[[str], None]) -> str:
    python = next(p for p in reversed(release.pythons) if not p.endswith("t"))
    python = "3.11" if "3.11" in release.pythons else python
    ((wheel, address),) = wheel_resolution_and_download.locate({"torch": f"={release.version}"}, python, _GLIBC).items()
    session = index_config.index_session()
    remote = RemoteFile(address, wheel.file)
    found = None if address.startswith("file:") else _metadata_file(session, remote)
    if found is not None:
        return found
    size = file_download_and_range_reads.head(session, remote).bytes
    try:
        with file_download_and_range_reads.open_remote_file(session, remote, size) as stream:
            return _inside(stream, wheel.file)
    except file_download_and_range_reads.RangeIgnored:
        say(f"the index has no metadata file and serves no ranges: downloading {wheel.file}, {size / 1e6:.0f} MB")
    held, wanted = sha256_file_store.wheel_store(), LockedWheel(wheel, min(size, _LARGEST_WHEEL), "")
    wheel_resolution_and_download.fetch_wheels([wanted], python, _GLIBC, held, lambda file, count: None)
    with held.path(wheel.sha256, wheel.file).open("rb") as stream:
        return _inside(stream, wheel.file)


def _metadata_file(session: requests.Session, wheel: RemoteFile) -> str | None:
    """The content of the wheel's metadata file on the index. None if the index answers 404 or 403: some indexes answer
    403 for a missing file."""
    with temporary_files.folder("metadata") as folder:
        file = folder / "METADATA"
        try:
            file_download_and_range_reads.fetch_file(
                session, RemoteFile(f"{wheel.address}.metadata", wheel.name), file, lambda count: None, limit=_LARGEST
            )
        except NetworkError as error:
            answer = getattr(error.__cause__, "response", None)
            if answer is not None and answer.status_code in (requests.codes.not_found, requests.codes.forbidden):
                return None
            raise
        return file.read_text(encoding="utf-8", errors="replace")


def _inside(stream: IO[bytes], name: str) -> str:
    try:
        with zipfile.ZipFile(stream) as archive:
            (member,) = (found for found in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", found))
            with archive.open(member) as file:
                raw = file.read(_LARGEST + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise NetworkError(f"invalid wheel from the index, METADATA cannot be read: {name}") from error
    if len(raw) > _LARGEST:
        raise NetworkError(f"invalid wheel from the index, METADATA is longer than {_LARGEST} bytes: {name}")
    return raw.decode("utf-8", "replace")


def pins(metadata: str) -> dict[str, str]:
    """Distribution -> specifier of the known libraries and NVIDIA packages that a wheel's metadata requires on Linux
    x86_64. Other packages and requirements of extras are left out."""
    found: dict[str, str] = {}
    for line in HeaderParser().parsestr(metadata).get_all("Requires-Dist") or ():
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        here = {"platform_system": "Linux", "platform_machine": "x86_64", "sys_platform": "linux", "extra": ""}
        if wanted.marker is not None and not wanted.marker.evaluate(here):
            continue
        name = canonicalize_name(wanted.name)
        if database.library_of(name) or name.startswith(("nvidia-", "cuda-")):
            found[name] = str(wanted.specifier)
    return found


def _compare(release: TorchRelease, listed: Mapping[str, str]) -> Iterator[Difference]:
    known: dict[str, str] = {canonicalize_name(name): specifier for name, specifier in release.pins.items()}
    for name in sorted({*known, *listed}):
        if _sorted(known.get(name)) != _sorted(listed.get(name)):
            yield Difference(release.version, name, known.get(name), listed.get(name))


def _sorted(specifier: str | None) -> list[str] | None:
    return sorted(specifier.split(",")) if specifier is not None else None
