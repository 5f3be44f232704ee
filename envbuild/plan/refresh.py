"""What the configured index says of torch's pins today, beside what the facts say."""

from __future__ import annotations

import urllib.parse
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import requests
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.errors import NetworkError
from envbuild.plan import facts, index, wheels
from envbuild.plan.facts import TorchRelease

# torch's wheels fit this and newer; it only decides which file is asked for.
_GLIBC = "2.28"


@dataclass(frozen=True)
class Difference:
    """One pin that the index and the facts tell differently; None: not there."""

    release: str
    distribution: str
    facts: str | None
    index: str | None


def differences(release: TorchRelease) -> list[Difference] | None:
    """None where the index has no metadata beside the wheel (PEP 658). Raises NetworkError if it does not answer."""
    metadata = _metadata(release)
    return None if metadata is None else list(_compare(release, pins(metadata)))


def _metadata(release: TorchRelease) -> str | None:
    python = next(p for p in reversed(release.pythons) if not p.endswith("t"))
    python = "3.11" if "3.11" in release.pythons else python
    found = wheels.locate({"torch": f"={release.version}"}, python, _GLIBC)
    address = next(iter(found.values()))
    if address.startswith("file://"):
        return _inside(Path(urllib.parse.unquote(urllib.parse.urlsplit(address).path)))
    try:
        answer = index.session().get(f"{address}.metadata", timeout=60)
        if answer.status_code == requests.codes.not_found:
            return None
        answer.raise_for_status()
    except requests.RequestException as error:
        raise NetworkError(
            f"the index does not give the metadata of torch {release.version}: {type(error).__name__}"
        ) from error
    return answer.text


def _inside(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode("utf-8", "replace")


def pins(metadata: str) -> dict[str, str]:
    """Distribution -> specifier of what a wheel's metadata pins for Linux x86_64; extras and plain names left out."""
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
        if facts.library_of(name) or name.startswith(("nvidia-", "cuda-")):
            found[name] = str(wanted.specifier)
    return found


def _compare(release: TorchRelease, told: Mapping[str, str]) -> Iterator[Difference]:
    known: dict[str, str] = {canonicalize_name(name): specifier for name, specifier in release.pins.items()}
    for name in sorted({*known, *told}):
        if _sorted(known.get(name)) != _sorted(told.get(name)):
            yield Difference(release.version, name, known.get(name), told.get(name))


def _sorted(specifier: str | None) -> list[str] | None:
    return sorted(specifier.split(",")) if specifier is not None else None
