"""What can go wrong, as users see it: one base class, a hint, an exit code for each kind.

Commands raise; `cli.entry.main` catches once, prints, and exits with `code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


def printable(text: str) -> str:
    """Text for a terminal, whoever wrote it: no escape sequences, nothing that turns the direction of writing."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def near(name: str, known: Iterable[str], most: int = 1) -> str | None:
    """The question whether one of at most `most` other names was meant, None where no known one is like it."""
    found = difflib.get_close_matches(name, list(known), most, 0.5 if most > 1 else 0.6)
    return f"did you mean {' or '.join(found)}?" if found else None


def unknown(name: str, known: Iterable[str]) -> str:
    """What is said of a setting that there is not."""
    meant = near(name, known)
    return f"unknown setting ({meant})" if meant else "unknown setting"


def some(number: int, noun: str, many: str = "") -> str:
    """ "1 block", "2 blocks"; `many`: the plural of a noun that takes more than an s."""
    return f"{number} {noun if number == 1 else many or f'{noun}s'}"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in a file: `file:line: field: message`."""

    message: str
    file: str | None = None
    line: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file and self.line else self.file or ""
        return ": ".join(part for part in (where, self.field, self.message) if part)


class EnvbuildError(Exception):
    """Base of everything a user can cause. `hint` says what to do; `faults` lists all that is wrong at once."""

    code: int = 1
    kind: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str | None = None, faults: Iterable[Fault] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.faults = tuple(faults)
        self.partial: dict[str, Any] = {}  # what a command had come to, for its `--json`

    def document(self) -> dict[str, Any]:
        """The value of `error` in `--json` output."""
        return {
            "code": self.code,
            "kind": self.kind,
            "message": self.message,
            "hint": self.hint,
            "faults": [asdict(fault) for fault in self.faults],
        }


class UsageError(EnvbuildError):
    code, kind = 2, "usage"


class ProfileError(EnvbuildError):
    code, kind = 3, "profile"


class FactsError(EnvbuildError):
    code, kind = 3, "facts"


class SettingsError(EnvbuildError):
    """The site's config.yaml is at fault."""

    code, kind = 3, "settings"


class LockError(EnvbuildError):
    code, kind = 3, "lock"


class FileError(EnvbuildError):
    """A file that a command line names is not there, cannot be read, or what it holds is at fault: a policy, a key, a
    log, a document, hosts. For profiles, locks, facts, fingerprints and settings there are errors of their own."""

    code, kind = 3, "file"


class FingerprintError(EnvbuildError):
    """A fingerprint's file is at fault."""

    code, kind = 3, "fingerprint"


class HashMismatch(EnvbuildError):
    """A wheel or package is not the one that was locked."""

    code, kind = 3, "hash"


class NotProved(EnvbuildError):
    """Built, but not proved here."""

    code, kind = 4, "not-proved"


class CheckFailed(EnvbuildError):
    """A self-test, audit or verification says no."""

    code, kind = 5, "check"


class EngineError(EnvbuildError):
    """No engine, an engine too old, or one that failed."""

    code, kind = 6, "engine"


class BuildError(EnvbuildError):
    code, kind = 6, "build"


class DiskError(EnvbuildError):
    code, kind = 6, "disk"


class SystemFault(EnvbuildError):
    """The machine refuses something: a folder that may not be written, say."""

    code, kind = 6, "system"


class NetworkError(EnvbuildError):
    """An index, a mirror or a registry did not answer, does not have what is asked for, or has another than it says."""

    code, kind = 7, "network"


class OutOfDate(EnvbuildError):
    code, kind = 8, "out-of-date"


class SomeFailed(EnvbuildError):
    """Of several profiles; `code` is the worst of theirs."""

    kind = "profiles"

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class HungUp(KeyboardInterrupt):
    """The terminal is gone, as where ssh lost its connection; nobody asked for an end."""


class Interrupted(EnvbuildError):
    code, kind = 130, "interrupted"
