"""The findings of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["defect", "refuse", "warn", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True)
class VersionMismatch:
    """A version that is not as expected. `found`: null if the distribution is not installed; `expected`: a version, or
    a requirement such as >=2; empty if any version will do."""

    name: str
    found: str | None
    expected: str


@dataclass(frozen=True)
class Finding:
    """A finding of an audit. `severity`: defect, refuse, warn or note; an environment with only notes is clean.
    `versions`: all versions that are not as expected; `message` may list only some of them."""

    id: str
    severity: Severity
    message: str
    remedy: str
    versions: tuple[VersionMismatch, ...] = ()
