"""What brings one back to a job whose waiting process was lost: kept beside the user's state, by the job's id."""

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
    """`payload`: sha256 of what the job was given, `image`: what it tests; both must be the same. `place`: the runner's
    own, as a folder."""

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
    """Raises UsageError where no such job was submitted from here."""
    hint = "only whoever submitted a job can resume it, until its output was read"
    if not _ID.fullmatch(job):
        raise UsageError(f"{printable(job[:50])!r} is no job's id", hint=hint)
    try:
        return Ticket(**json.loads(_file(runner, job).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"no job {job} was submitted from here", hint=hint) from error


def keep(runner: str, ticket: Ticket) -> None:
    write_atomically(_file(runner, ticket.job), json.dumps(asdict(ticket), indent=1))


def forget_ticket(runner: str, name: str) -> None:
    """Those of a job by its name, which is known before its id is."""
    for file in user_folders.state_folder(runner).glob("*.ticket.json"):
        with contextlib.suppress(FileNotFoundError):  # another process forgets its own
            if f'"{name}"' in file.read_text(encoding="utf-8", errors="replace"):
                file.unlink()


def require_same(ticket: Ticket, image: str, job: Job) -> None:
    """Raises UsageError where what is asked for now is not what was submitted then."""
    if (ticket.image, ticket.payload) != (image, hashlib.sha256(job.stdin).hexdigest()):
        raise UsageError(
            f"job {ticket.job} tests something else: its image, profile, lock or self-test is another",
            hint="give the same options as when it was submitted; or run anew, without --resume",
        )
