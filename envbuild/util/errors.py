"""Errors that users see: one base class with a hint, and one exit code per kind.

Commands raise; `cli.entry.main` catches once, prints, and exits with `code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


def printable(text: str) -> str:
    """Make text from any source safe for a terminal: replace each unprintable character except line feed and tab, such
    as escape and those that change the writing direction."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def near(name: str, known: Iterable[str], most: int = 1) -> str | None:
    """A question that suggests up to `most` similar known names, or None if no known name is similar."""
    found = difflib.get_close_matches(name, list(known), most, 0.5 if most > 1 else 0.6)
    return f"did you mean {' or '.join(found)}?" if found else None


def unknown(name: str, known: Iterable[str]) -> str:
    """The message for an unknown setting, with a similar name if there is one."""
    meant = near(name, known)
    return f"unknown setting ({meant})" if meant else "unknown setting"


def some(number: int, noun: str, many: str = "") -> str:
    """A number with its noun: "1 block", "2 blocks". `many`: the plural if it is not the noun with an s."""
    return f"{number} {noun if number == 1 else many or f'{noun}s'}"


@dataclass(frozen=True)
class Fault:
    """One error in a file, shown as `file:line: field: message`."""

    message: str
    file: str | None = None
    line: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file and self.line else self.file or ""
        return ": ".join(part for part in (where, self.field, self.message) if part)


@dataclass(frozen=True)
class ErrorDocument:
    """The value of `error` in a document of `--json`. `code`: the exit code."""

    code: int
    kind: str
    message: str
    hint: str | None
    faults: tuple[Fault, ...]


class EnvbuildError(Exception):
    """Base of every error that a user can cause. `hint`: what to do; `faults`: all errors found, not only the first."""

    code: int = 1
    kind: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str | None = None, faults: Iterable[Fault] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.faults = tuple(faults)
        self.partial: dict[str, Any] = {}  # partial result of a command, for its `--json`

    def document(self) -> dict[str, Any]:
        """The value of `error` in `--json` output."""
        return asdict(ErrorDocument(self.code, self.kind, self.message, self.hint, self.faults))

    def lines(self) -> list[str]:
        """The message, each fault and the hint, for a terminal."""
        lines = [f"error: {self.message}", *(f"  {fault}" for fault in self.faults)]
        hints = self.hint.split("\n") if self.hint else []
        return [*lines, *(f"  {'hint: ' if index == 0 else '      '}{line}" for index, line in enumerate(hints))]


class UsageError(EnvbuildError):
    code, kind = 2, "usage"


class ProfileError(EnvbuildError):
    code, kind = 3, "profile"


class FactsError(EnvbuildError):
    code, kind = 3, "facts"


class SettingsError(EnvbuildError):
    """Invalid config.yaml."""

    code, kind = 3, "settings"


class LockError(EnvbuildError):
    code, kind = 3, "lock"


class FileError(EnvbuildError):
    """A file named on the command line is missing, unreadable or invalid: a policy, a key, a log, a document, hosts.
    Profiles, locks, facts, fingerprints and settings have their own errors."""

    code, kind = 3, "file"


class FingerprintError(EnvbuildError):
    """Invalid fingerprint file."""

    code, kind = 3, "fingerprint"


class HashMismatch(EnvbuildError):
    """A file's content differs from its recorded sha256."""

    code, kind = 3, "hash"


class NotProved(EnvbuildError):
    """The image is not verified, and was not built if this was known beforehand."""

    code, kind = 4, "not-proved"


class CheckFailed(EnvbuildError):
    """A self-test, audit or verification failed."""

    code, kind = 5, "check"


class EngineError(EnvbuildError):
    """The container engine is missing, too old, or failed."""

    code, kind = 6, "engine"


class BuildError(EnvbuildError):
    code, kind = 6, "build"


class DiskError(EnvbuildError):
    code, kind = 6, "disk"


class SystemFault(EnvbuildError):
    """The operating system refused an operation, such as writing to a folder."""

    code, kind = 6, "system"


class NetworkError(EnvbuildError):
    """An index, mirror or registry did not answer, lacks the requested content, or served wrong content."""

    code, kind = 7, "network"


class OutOfDate(EnvbuildError):
    code, kind = 8, "out-of-date"


class SomeFailed(EnvbuildError):
    """Some of several profiles failed; `code` is the exit code of the most severe failure."""

    kind = "profiles"

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class HungUp(KeyboardInterrupt):
    """The terminal was closed, for example by a lost ssh connection; the user did not ask to stop."""


class Interrupted(EnvbuildError):
    code, kind = 130, "interrupted"
