"""Watches a program and its child processes, and reports which files of given libraries they have mapped into
memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_FAST, _SLOW, _FAST_SECONDS = 0.1, 2.0, 60.0
_MOST_REPORTS = 64


def mapped_files(pid: int, sonames: Collection[str]) -> set[str]:
    """The files of these libraries that a process has mapped; empty if the process has ended or its maps may not be
    read."""
    try:
        paths = all_mapped_files(pid)
    except OSError:
        return set()
    return {path for path in paths if _is_one_of(Path(path).name, sonames)}


def all_mapped_files(pid: int) -> set[str]:
    """All files that a process has mapped. Raises OSError if the process has ended or its maps may not be read."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    parts = (line.split(None, 5) for line in lines)
    return {part[5] for part in parts if len(part) == 6}


def _is_one_of(file: str, sonames: Collection[str]) -> bool:
    """Whether a file name belongs to one of the sonames. The version may differ, and a hash may precede ".so"."""
    stem = re.sub(r"(-[0-9a-f]{8})?\.so\b.*$", "", file.partition(" (deleted)")[0])
    return ".so" in file and stem in {name.partition(".so")[0] for name in sonames}


def descendants(pid: int) -> Iterator[int]:
    """The ids of a process and of all processes that it started, directly or indirectly."""
    yield pid
    try:
        texts = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return
    for child in {int(word) for text in texts for word in text.split()}:
        yield from descendants(child)


class LibraryWatch:
    """Reports each mapped file of each process once, in a thread, until _MOST_REPORTS files are reported. `report`
    receives the process id and the path."""

    def __init__(self, sonames: Collection[str], report: Callable[[int, str], None]) -> None:
        self._sonames, self._report = sonames, report
        self._seen: set[tuple[int, str]] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._watch, args=(pid,), daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Stop watching. Return whether any process was seen to map one of the libraries."""
        self._end.set()
        if self._thread:
            self._thread.join(_SLOW)
        return bool(self._seen)

    def _watch(self, pid: int) -> None:
        waited = 0.0
        while not self._end.is_set() and len(self._seen) < _MOST_REPORTS:
            for process in list(descendants(pid)):
                for path in sorted(mapped_files(process, self._sonames)):
                    if (process, path) not in self._seen:
                        self._seen.add((process, path))
                        self._report(process, path)
            pause = _FAST if waited < _FAST_SECONDS else _SLOW
            waited += pause
            self._end.wait(pause)
