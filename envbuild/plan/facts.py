"""Facts: what is known of suites, GPUs and faults. Data files in facts/, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from envbuild.errors import FactsError
from envbuild.plan import document

_FOLDER = Path(__file__).parent / "facts"


@dataclass(frozen=True)
class Suite:
    """A Debian release: the Python it carries and its C library's version."""

    name: str
    python: str
    glibc: str


@dataclass(frozen=True)
class Advisory:
    """A known fault. `signature` is what a probe reports when it is met: keys of a probe's result."""

    id: str
    title: str
    severity: str
    signature: Mapping[str, str]
    remedy: str
    cite: tuple[str, ...]

    def matches(self, result: Mapping[str, Any]) -> bool:
        return bool(self.signature) and all(result.get(key) == value for key, value in self.signature.items())


def _read(name: str) -> dict[str, Any]:
    return document.read(_FOLDER / f"{name}.yaml", FactsError).data


@cache
def suites() -> Mapping[str, Suite]:
    return {name: Suite(name, row["python"], row["glibc"]) for name, row in _read("debian")["suites"].items()}


@cache
def base_packages() -> tuple[str, ...]:
    return tuple(_read("debian")["packages"])


@cache
def advisories() -> tuple[Advisory, ...]:
    return tuple(
        Advisory(row["id"], row["title"], row["severity"], row["signature"], row["remedy"], tuple(row["cite"]))
        for row in _read("advisories")["advisories"]
    )


@cache
def released_selftests() -> frozenset[str]:
    """Ids (sha256:...) of self-tests whose evidence counts beside this tree's own."""
    return frozenset(_read("selftests")["released"])
