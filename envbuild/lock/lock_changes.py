"""Lists the differences between two locks of a profile. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.lock.lock_file import Lock
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import some


def version_changes(before: Lock | None, after: Lock) -> Iterator[str]:
    """The changes between two locks, one per line: `numpy 2.4.5 -> 2.4.6`. Without `before`, one line with the number
    of wheels and Debian packages."""
    yield from [part_counts(after)] if before is None else map(str, lock_changes(before, after))


def part_counts(locked: Lock) -> str:
    return f"{some(len(locked.wheels), 'wheel')}, {some(len(locked.base) + len(locked.apt), 'Debian package')}"


@dataclass(frozen=True)
class LockChange:
    """A changed entry of a lock. `before`, `after`: its versions; `before` is None for a new entry, `after` for a
    removed one, and both for an entry without versions."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        moved = self.before or self.after
        return f"{self.name} {self.before or '(new)'} -> {self.after or '(gone)'}" if moved else self.name


def lock_changes(before: Lock, after: Lock) -> Iterator[LockChange]:
    yield from _moves(before.versions, after.versions)
    yield from _moves(_versions(before), _versions(after))
    yield from _moves(_contents(before), _contents(after))
    for title, old, new in (("base image", before.image, after.image), ("python", before.python, after.python)):
        if old != new:
            yield LockChange(title, old, new)
    if before.environment != after.environment:
        yield LockChange("environment", None, None)


def _versions(locked: Lock) -> dict[str, str]:
    return {deb.name: deb.version for deb in (*locked.base, *locked.apt)}


def _contents(locked: Lock) -> dict[str, str]:
    """The archives with their hashes, and the extensions, each with a hash of all its inputs, by name."""
    found = {archive.name: f"{archive.version} ({archive.sha256[:12]})" for archive in locked.archives}
    for one in locked.extensions:
        assert locked.builder
        made = strict_and_canonical_json.canonical_digest([one.content, locked.builder.content])
        found[one.name] = f"{one.digest[:12]} for {locked.builder.arch} ({made[:8]})"
    return found


def _moves(old: dict[str, str], new: dict[str, str]) -> Iterator[LockChange]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield LockChange(name, old.get(name), new.get(name))
