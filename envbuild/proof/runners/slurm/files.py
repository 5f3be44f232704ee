"""What lies in the folder that a job shares with us, and the ticket by which we find it again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from envbuild import settings
from envbuild.errors import UsageError, printable
from envbuild.plan.store import write_atomically
from envbuild.proof.runners.slurm import states
from envbuild.proof.runners.slurm.states import Outcome
from envbuild.proof.testrun import MAX_STDOUT


@dataclass(frozen=True)
class Ticket:
    """What brings one back to a job that was submitted. `payload`: sha256 of what it was given: it must be the same."""

    job: str
    name: str
    folder: str
    image: str
    payload: str
    nonce: str


def _ticket_file(job: str) -> Path:
    return settings.state_folder("slurm") / f"{job}.ticket.json"


def read(job: str) -> Ticket:
    """Raises UsageError where no such job was submitted from here."""
    hint = "only whoever submitted a job can resume it, until its output was read"
    if not re.fullmatch("[0-9]{1,12}", job):
        raise UsageError(f"{printable(job[:50])!r} is no job's id", hint=hint)
    try:
        return Ticket(**json.loads(_ticket_file(job).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"no job {job} was submitted from here", hint=hint) from error


def keep(ticket: Ticket) -> None:
    write_atomically(_ticket_file(ticket.job), json.dumps(asdict(ticket), indent=1))


def forget(name: str, folder: Path) -> None:
    """Remove what there is of a job, here."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in settings.state_folder("slurm").glob("*.ticket.json"):
        with contextlib.suppress(FileNotFoundError):  # another process forgets its own
            if f'"{name}"' in file.read_text(encoding="utf-8", errors="replace"):
                file.unlink()


class Tail:
    """Gives on whole lines of a file that another machine writes to."""

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


def attempt(folder: Path) -> Path | None:
    """The newest: what an earlier one wrote, before its node was lost, does not count."""
    try:
        found = [path for path in folder.iterdir() if re.fullmatch("attempt-[0-9]{1,6}", path.name)]
    except OSError:
        return None
    return max(found, key=lambda path: int(path.name[8:]), default=None)


def outcome(attempt: Path) -> Outcome | None:
    """None where it has not ended yet, or was stopped."""
    try:
        with (attempt / "outcome").open("rb") as file:
            return states.outcome(file.read(4096).decode(errors="replace"))
    except OSError:
        return None


def whole(attempt: Path, outcome: Outcome) -> bool:
    """Whether the stdout that is there is the one that was written."""
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
    """The last of a text file, to be shown; empty where there is none."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - most))
            return printable(stream.read(most).decode(errors="replace"))
    except OSError:
        return ""
