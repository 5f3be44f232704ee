"""Reads and removes the files in the folder that a job shares with the machine that waits for it."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from envbuild.runners.slurm import outcome_file_and_start_failures
from envbuild.runners.slurm.outcome_file_and_start_failures import JobOutcome
from envbuild.testrun.run_result import MAX_STDOUT
from envbuild.util.errors import printable

_OUTCOME = 32 << 10  # bytes; the names of 64 nodes need at most 16 kB


def remove_job_folder(folder: Path) -> None:
    """Removes all files of a job from this machine."""
    shutil.rmtree(folder, ignore_errors=True)


class FileTail:
    """Forwards the complete lines of a job's stdout, a file that another machine writes."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._file: Path | None = None
        self._at = 0

    def read(self, attempt: Path) -> None:
        if attempt != self._file:
            self._file, self._at = attempt, 0
        try:
            with (attempt / "stdout").open("rb") as file:
                file.seek(self._at)
                block = file.read(MAX_STDOUT)
        except OSError:
            return
        whole = block[: block.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            self._on_line(line)


def latest_attempt(folder: Path) -> Path | None:
    """The folder of the newest attempt; None if no attempt has begun. The output of earlier attempts, for example on a
    failed node, does not count."""
    try:
        found = [path for path in folder.iterdir() if re.fullmatch("attempt-[0-9]{1,6}", path.name)]
    except OSError:
        return None
    return max(found, key=lambda path: int(path.name[8:]), default=None)


def read_outcome(attempt: Path) -> JobOutcome | None:
    """The outcome of an attempt; None if the attempt has not ended yet, was stopped, or wrote an invalid file."""
    try:
        with (attempt / "outcome").open("rb") as file:
            return outcome_file_and_start_failures.parse_outcome(file.read(_OUTCOME).decode(errors="replace"))
    except OSError:
        return None


def is_complete(attempt: Path, outcome: JobOutcome) -> bool:
    """Whether the file `stdout` has the size and the sha256 in the outcome."""
    digest, size = hashlib.sha256(), 0
    try:
        with (attempt / "stdout").open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
                if size > outcome.size:
                    return False
    except OSError:
        return False
    return (size, digest.hexdigest()) == (outcome.size, outcome.sha256)


def end(file: Path, most: int = 2000) -> str:
    """The end of a text file, for messages; empty if it is missing."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - most))
            return printable(stream.read(most).decode(errors="replace"))
    except OSError:
        return ""
