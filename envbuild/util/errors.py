"""The errors that users see. All have one base class with a hint; each kind has an exit code.

Any module may raise these errors. `cli.entry.main` prints those that no caller handles, and exits with their `code`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar


def display(file: Path) -> str:
    """The path as shown in messages: relative to the working folder if the file is in it."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def printable(text: str) -> str:
    """Make untrusted text safe for a terminal. Each unprintable character except line feed and tab is replaced, for
    example escape and characters that change the writing direction."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def near(name: str, known: Iterable[str], most: int = 1) -> str | None:
    """A question that suggests up to `most` known names similar to `name`; None if no known name is similar."""
    import difflib  # only for errors

    found = difflib.get_close_matches(name, list(known), most, 0.5 if most > 1 else 0.6)
    return f"did you mean {' or '.join(found)}?" if found else None


def unknown(name: str, known: Iterable[str]) -> str:
    """The message for the unknown setting `name`, with a similar known name if there is one."""
    meant = near(name, known)
    return f"unknown setting ({meant})" if meant else "unknown setting"


def some(number: int, noun: str, many: str = "") -> str:
    """A number with its noun: "1 block", "2 blocks". `many`: the plural, if it is not formed with an s."""
    return f"{number} {noun if number == 1 else many or f'{noun}s'}"


@dataclass(frozen=True)
class Fault:
    """One fault in a file, shown as `file:line: field: message`."""

    message: str
    file: str | None = None
    line: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file and self.line else self.file or ""
        return ": ".join(part for part in (where, self.field, self.message) if part)


@dataclass(frozen=True)
class ErrorDocument:
    """The value of the key `error` in a document of `--json`. `code`: the exit code."""

    code: int
    kind: str
    message: str
    hint: str | None
    faults: tuple[Fault, ...]


class EnvbuildError(Exception):
    """The base class of all errors that users see. `hint`: what to do; `faults`: all faults found, not only the
    first."""

    code: int = 1
    kind: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str | None = None, faults: Iterable[Fault] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.faults = tuple(faults)
        self.partial: dict[str, Any] = {}  # what the command completed before the error, for `--json`

    def document(self) -> dict[str, Any]:
        """The value of the key `error` in the output of `--json`."""
        return asdict(ErrorDocument(self.code, self.kind, self.message, self.hint, self.faults))

    def lines(self) -> list[str]:
        """The lines for a terminal: the message, each fault and the hint."""
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
    """A file is missing, unreadable or invalid, or cannot be written: for example a policy, a key or a log. Profiles,
    locks, facts, fingerprints and settings have their own error classes."""

    code, kind = 3, "file"


class FingerprintError(EnvbuildError):
    """Invalid fingerprint file."""

    code, kind = 3, "fingerprint"


class HashMismatch(EnvbuildError):
    """The sha256 of a file differs from the recorded one."""

    code, kind = 3, "hash"


class NotProved(EnvbuildError):
    """The result would not be verified, for example because the GPU is missing. If this is known before the build, the
    image is not built."""

    code, kind = 4, "not-proved"


class CheckFailed(EnvbuildError):
    """A check failed: a self-test, an audit or a verification."""

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
    """A server, such as an index, a mirror or a registry, did not answer, does not have the requested content, or sent
    wrong content."""

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
    """The terminal was closed, for example because an ssh connection was lost. The user did not press Ctrl-C."""


class Interrupted(EnvbuildError):
    code, kind = 130, "interrupted"
