"""Stores tickets: small files in the user's state folder that allow a later process to resume a job. A ticket is used
if the process that waited for the job was lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from envbuild.testrun.selftest_job import Job
from envbuild.util import user_folders
from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import UsageError, printable

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class Ticket:
    """The data to resume a job. `job`, `name`: the job's id and its name. `payload`: the sha256 of the job's input;
    `image`: the tested image. Both must be unchanged when the job is resumed. `place`: a value of the runner, for
    example a folder."""

    job: str
    name: str
    image: str
    payload: str
    nonce: str
    place: str


def made(id_: str, name: str, image: str, job: Job, place: str) -> Ticket:
    return Ticket(id_, name, image, hashlib.sha256(job.stdin).hexdigest(), job.nonce, place)


def _file(runner: str, job: str) -> Path:
    return user_folders.state_folder(runner) / f"{job}.ticket.json"


def read(runner: str, job: str) -> Ticket:
    """Reads the ticket of a job. Raises UsageError if it does not exist or is invalid."""
    hint = "a job can be resumed once, and only by the user who submitted it"
    if not _ID.fullmatch(job):
        raise UsageError(f"{printable(job[:50])!r} is not a job id", hint=hint)
    try:
        return Ticket(**json.loads(_file(runner, job).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"no job {job} was submitted from here", hint=hint) from error


def keep(runner: str, ticket: Ticket) -> None:
    write_atomically(_file(runner, ticket.job), json.dumps(asdict(ticket), indent=1))


def forget_ticket(runner: str, name: str) -> None:
    """Removes the tickets of a job by the job's name. Unlike its id, the name is known before the job is submitted."""
    for file in user_folders.state_folder(runner).glob("*.ticket.json"):
        with contextlib.suppress(FileNotFoundError):  # another process removed its ticket
            if f'"{name}"' in file.read_text(encoding="utf-8", errors="replace"):
                file.unlink()


def require_same(ticket: Ticket, image: str, job: Job) -> None:
    """Raises UsageError if the job's input or the image differs from what was submitted."""
    if (ticket.image, ticket.payload) != (image, hashlib.sha256(job.stdin).hexdigest()):
        raise UsageError(
            f"job {ticket.job} was submitted with a different image, profile, lock or self-test",
            hint="repeat the options with which it was submitted, or start a new job, without --resume",
        )
