"""The result of a check, and helpers that several checks share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skipped"]
GIB = 1 << 30
LATE = "not read in time"


@dataclass(frozen=True)
class Check:
    """The result of a check. `id`: a stable name. `detail`: what was found. `remedy`: what to do; None if nothing is to
    be done. `missing`: the names of all missing files; `detail` may list only some of them."""

    id: str
    status: Status
    detail: str
    remedy: str | None = None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckRow:
    """A check in a JSON document. `missing`: for the check `wheels`, the locked files that no index has."""

    id: str
    state: Status
    detail: str
    remedy: str | None
    missing: tuple[str, ...] = ()


CheckState = Literal["ok", "warn", "fail"]


def check_rows(checks: Sequence[Check]) -> tuple[CheckRow, ...]:
    return tuple(CheckRow(check.id, check.status, check.detail, check.remedy, check.missing) for check in checks)


def worst_state(checks: Sequence[Check]) -> CheckState:
    """Return the worst state of the checks. Skipped checks do not count."""
    found = {check.status for check in checks}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"


def ok(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def skipped_check(name: str, reason: str) -> Check:
    return Check(name, "skipped", reason)


def worst_check(name: str, found: Sequence[tuple[Status, str, str]], fine: str) -> Check:
    """Return one check for several findings (status, detail, fix), with the worst status and each text once. `fine`:
    the detail if there is no finding."""
    if not found:
        return ok(name, fine)
    status: Status = "fail" if any(item[0] == "fail" for item in found) else "warn"
    details, remedies = (dict.fromkeys(item[index] for item in found) for index in (1, 2))
    return Check(name, status, "; ".join(details), "; ".join(remedies))


def counted(names: Iterable[str]) -> str:
    """Return how often each name occurs, in the order of their first appearance: "2 x NVIDIA H20, 1 x NVIDIA H200"."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size < 10 * GIB else f"{size / GIB:.0f} GiB"
