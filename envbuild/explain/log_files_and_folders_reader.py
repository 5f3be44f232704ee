"""Reads files, all files in folders, and standard input as one log."""

from __future__ import annotations

import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from envbuild.explain import log_reader_and_search
from envbuild.explain.log_reader_and_search import Log
from envbuild.util.errors import FileError, some

MOST_FILES = 256
"""Maximum number of files that are read. torchrun writes two files per rank of a node into a folder."""
MOST_NAMED = 3
"""Maximum number of names in a note about skipped files."""
_KINDS = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


def read_logs(names: Sequence[str]) -> tuple[Log, list[str]]:
    """Read all files as one log. Return the log, with notes about files that were skipped or cut off.

    `names`: files, folders, and - for standard input. Raises FileError for an unreadable file, for a file that the user
    named and that is not text, if no file is found, and if no file contains text.
    """
    notes: list[str] = []
    files = list(dict.fromkeys(file for name in names for file in _files(name, notes)))
    if not files:
        raise FileError("; ".join((f"no file found in {', '.join(names)}", *notes)), hint=_NAME_A_LOG)
    if len(files) > MOST_FILES:
        notes.append(f"only the first {MOST_FILES} of {len(files)} files are read")
    parts: dict[str, Log] = {}
    for file in files[:MOST_FILES]:
        part = _one(file, min(len(files), MOST_FILES))
        if part.foreign and file in names:
            raise FileError(
                f"{_called(file)} is not a log: it is {part.foreign}", hint="pass the text output of the run"
            )
        if part.foreign:
            notes.append(f"{file} is skipped: it is {part.foreign.partition(';')[0]}")
            continue
        notes += [f"{_called(file)}: {note}" for note in (part.note, part.cut) if note]
        parts[file] = part
    if not parts:
        raise FileError("; ".join((f"no log found in {', '.join(names)}", *notes)), hint=_NAME_A_LOG)
    log = log_reader_and_search.join_logs(parts.values())
    if log.empty and not any(part.note for part in parts.values()):
        name = _called(files[0]) if len(files) == 1 else "each of these files"
        raise FileError(f"{name} is empty", hint=_SAVE_OUTPUT)
    return log, notes


_NAME_A_LOG = "pass a log file, or - for standard input"
_SAVE_OUTPUT = "save the output of a run: COMMAND 2>&1 | tee train.log"


def _files(name: str, notes: list[str]) -> list[str]:
    """Return the regular files in a folder at any depth. Hidden files and hidden folders are left out. Links to folders
    are not followed. A `name` that is not a folder is returned unchanged. Notes about other skipped entries are added
    to `notes`."""
    if name == "-" or not Path(name).is_dir():
        return [name]
    found: list[Path] = []
    others: dict[str, list[str]] = {}
    unread: list[str] = []
    folders = [Path(name)]  # os.walk recurses in Python 3.11, and a folder may be deeper than that allows
    while folders:
        folder = folders.pop()
        try:
            entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            unread.append(f"{folder}: folder skipped: {error.strerror}")
            continue
        for path in entries:
            kind = _kind(path)
            if kind:
                others.setdefault(kind, []).append(str(path.relative_to(name)))
            elif path.is_dir():
                folders.append(path)
            else:
                found.append(path)
    notes += sorted(unread)
    for kind, paths in sorted(others.items()):
        listed = ", ".join(sorted(paths)[:MOST_NAMED]) + (", ..." if len(paths) > MOST_NAMED else "")
        notes.append(f"{name}: {some(len(paths), kind, f'{kind}s')} skipped: {listed}")
    return [str(path) for path in sorted(found)]


def _kind(path: Path) -> str | None:
    """Return the kind of a folder's entry that is not read; None for a regular file and for a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "broken link" if path.is_symlink() else "unreadable entry"
    if stat.S_ISDIR(mode):
        return "link to a folder" if path.is_symlink() else None
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "special file")


def _one(file: str, logs: int) -> Log:
    name = file if logs > 1 else ""
    if file == "-":
        return log_reader_and_search.read(sys.stdin.buffer, logs, name)
    try:
        with open(file, "rb") as stream:  # noqa: PTH123 - also opens special files, such as /dev/fd/63
            return log_reader_and_search.read(stream, logs, name)
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error.strerror}", hint=_NAME_A_LOG) from error


def _called(file: str) -> str:
    return "standard input" if file == "-" else file
