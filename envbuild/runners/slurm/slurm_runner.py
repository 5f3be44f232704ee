"""Submits a job to Slurm and waits for its output in a shared folder.

The files decide: a complete outcome counts, even if Slurm reports that the job failed afterwards. Slurm is queried only
for the job's state, and for the reason if the job ended without an outcome.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from envbuild.image.docker_engine import Image
from envbuild.runners import job_resume_tickets
from envbuild.runners.job_resume_tickets import Ticket
from envbuild.runners.runner_interface import RunnerError, Watch
from envbuild.runners.slurm import (
    batch_script,
    job_folder_reader,
    multi_node_script,
    outcome_file_and_start_failures,
    slurm_job_states,
)
from envbuild.runners.slurm.outcome_file_and_start_failures import JobOutcome
from envbuild.runners.slurm.slurm_job_states import Queue, Seen
from envbuild.runners.slurm.slurm_settings import SlurmSite
from envbuild.testrun.run_result import MAX_STDOUT, RawOutput
from envbuild.testrun.selftest_job import Job
from envbuild.util import user_folders
from envbuild.util.errors import EnvbuildError, HungUp, Interrupted, SystemFault, printable
from envbuild.util.host_processes import Completed, ProcessMissing, ProcessTimeout, run

POLL = 1.0  # seconds between two reads of the files
ASK = 3.0  # seconds between two queries of the controller, which all users share
LEAVING = 20.0  # seconds for a cancelled job to leave the queue
PATIENCE = 900.0  # seconds to wait for a controller that does not answer
_ANSWER = 30.0
_NAME = "slurm"


class Slurm:
    """The runner for Slurm. `resume`: the id of the job to resume.

    Raises UsageError if the job to resume is unknown on this machine. `run` raises ProcessMissing if Slurm's commands
    are missing.
    """

    max_input: int | None = None

    def __init__(
        self,
        site: SlurmSite,
        image: Image,
        reference: str | None,
        profile: str,
        resume: str | None = None,
        *,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        """`reference`: the image in a registry, with its digest; None: the nodes' engines already have the image.
        `origins`: where each value of the site is set, as for requested_resources."""
        self._site, self._profile, self._origins = site, profile, origins or {}
        self._names = (reference,) if reference else tuple(dict.fromkeys((image.id, image.handle)))
        self.image = self._names[0]
        self._ticket = job_resume_tickets.read(_NAME, resume) if resume else None
        self.nonce = self._ticket.nonce if self._ticket else None
        self._about = f"envbuild-{re.sub('[^A-Za-z0-9._-]', '-', profile)[:60]}"
        self._token = self._new_name()
        self._last: Seen | None = None

    def script(self, job: Job, *, brief: bool = False) -> str:
        """The script for sbatch. The script does not contain the self-test, but reads it from a file."""
        render = multi_node_script.render if job.nodes > 1 else batch_script.render
        return render(job, self._site, PurePosixPath(self._folder()), self._token, self._names)

    def _new_name(self) -> str:
        return f"{self._about}-{secrets.token_hex(6)}"

    def _folder(self) -> Path:
        base = Path(self._site.folder) if self._site.folder else user_folders.state_folder(_NAME)
        return base / self._token

    def run(self, job: Job, watch: Watch) -> RawOutput:
        """Implements Runner.run. If the terminal is closed, a resumable job continues, and Interrupted is raised with
        the command that resumes it. Other jobs are cancelled."""
        ticket = self._resumed(job) if self._ticket else self._submit(job, watch)
        try:
            if not job.resumable:
                where = f", on {job.nodes} nodes" if job.nodes > 1 else ""
                watch.say(f"job {ticket.job} is submitted{where}")
            elif not self._ticket:
                watch.say(f"job {ticket.job} is submitted; if this process is lost: --resume {ticket.job}")
            attempt, outcome = self._wait(ticket, job, watch)
            output = self._output(job, attempt, outcome, watch)
        except KeyboardInterrupt as end:
            if isinstance(end, HungUp) and job.resumable:
                raise Interrupted(
                    f"the terminal was closed; job {ticket.job} continues",
                    hint=f"to wait for it: --resume {ticket.job}",
                ) from None
            self._cancel(ticket.name, watch)
            _forget(ticket.name, Path(ticket.place))
            raise
        except EnvbuildError as error:
            if isinstance(error, _Unknown | ProcessMissing) and job.resumable:
                raise
            _forget(ticket.name, Path(ticket.place))
            raise
        _forget(ticket.name, Path(ticket.place))
        return output

    # submitting

    def _submit(self, job: Job, watch: Watch) -> Ticket:
        self._token, self._last = self._new_name(), None
        text, folder = self.script(job), self._folder()
        _private(folder)
        try:
            ticket = self._handed_over(job, text, folder)
        except BaseException as error:
            if not isinstance(error, ProcessMissing):  # Slurm may have accepted the job, whatever sbatch reported
                self._cancel(self._token, Watch() if isinstance(error, _NotTaken) else watch)
            _forget(self._token, folder)
            raise
        return ticket

    def _handed_over(self, job: Job, text: str, folder: Path) -> Ticket:
        (folder / "payload").write_bytes(job.stdin)
        (folder / "job.sh").write_text(text, encoding="utf-8")
        try:
            done = run(["sbatch", "--parsable", folder / "job.sh"], cwd=folder, timeout=_ANSWER)
        except ProcessMissing as error:
            error.hint = "run envbuild on a login node of the cluster, or without --on slurm"
            raise
        found = re.fullmatch(r"([0-9]{1,12})(;\S+)?", done.stdout.strip())
        if done.code != 0 or not found:
            refusal = f"Slurm refused the job: {_words(done)}"
            kind = _NotTaken if done.code and "timed out" not in refusal.lower() else RunnerError
            raise kind(refusal, ending="refused", hint=f"{self._request_text(job)}\n--dry-run shows the job's script")
        ticket = job_resume_tickets.made(found[1], self._token, self.image, job, str(folder))
        job_resume_tickets.keep(_NAME, ticket)
        return ticket

    def _request_text(self, job: Job) -> str:
        return requested_resources(job, self._site, self._profile, self._origins)

    def _resumed(self, job: Job) -> Ticket:
        assert self._ticket
        job_resume_tickets.require_same(self._ticket, self.image, job)
        return self._ticket

    # waiting

    def _wait(self, ticket: Ticket, job: Job, watch: Watch) -> tuple[Path, JobOutcome]:
        """Waits until the outcome of the job's last attempt and the complete stdout are on disk. Raises RunnerError if
        the job ends without them, if it waits in the queue longer than the setting `queue` allows, or if its state
        remains unknown. Raises NotProved if Slurm can never start the job."""
        tail, shown, last_query, over_since, silent_since = job_folder_reader.FileTail(watch.line), "", -ASK, None, None
        queue = Queue(self._site.queue)
        while True:
            now = time.monotonic()
            if now - last_query >= ASK:
                known, last = _ask(ticket.job)
                last_query = now
                silent_since = None if known else (silent_since or now)
                self._last = last or self._last
                text = self._progress(known, last)
                if text != shown:
                    shown = text
                    watch.say(f"job {ticket.job}: {text}")
                over = known and (last is None or last.over)
                over_since = (over_since or now) if over else None
                if ends := queue.ends(ticket.job, last, now):
                    self._cancel(ticket.name, watch)
                    ends.hint = f"{ends.hint}\n{self._request_text(job)}"
                    raise ends
            attempt = job_folder_reader.latest_attempt(Path(ticket.place))
            if attempt:
                tail.read(attempt)
                outcome = job_folder_reader.read_outcome(attempt)
                if outcome and outcome.job == ticket.job and job_folder_reader.is_complete(attempt, outcome):
                    tail.read(attempt)
                    return attempt, outcome
            if over_since is not None and now - over_since >= self._site.grace:
                raise self._without(ticket, attempt)
            if silent_since is not None and now - silent_since >= PATIENCE:
                raise _Unknown(
                    f"Slurm's controller no longer answers: the state of job {ticket.job} is unknown",
                    ending="unknown",
                    hint=f"when it answers again: --resume {ticket.job}"
                    if job.resumable
                    else "the job ends, because its folder was removed: run the command again",
                )
            time.sleep(POLL)

    def _progress(self, known: bool, last: Seen | None) -> str:
        if not known:
            return "waiting for Slurm's controller, which does not answer"
        return last.describe() if last else "Slurm no longer knows the job; looking for its output"

    def _without(self, ticket: Ticket, attempt: Path | None) -> RunnerError:
        """The error of a job that ended without valid output."""
        if attempt and job_folder_reader.read_outcome(attempt):
            return RunnerError(
                f"job {ticket.job} ended, but its output on disk is truncated or was changed",
                ending="truncated",
                hint=f"is the disk of {attempt.parent.parent} full? run the command again",
            )
        seen = self._last if self._last and self._last.over else None  # Slurm forgets ended jobs after MinJobAge
        return slurm_job_states.ending(ticket.job, seen, job_folder_reader.end(Path(ticket.place) / "slurm.log"))

    # its output

    def _output(self, job: Job, attempt: Path, outcome: JobOutcome, watch: Watch) -> RawOutput:
        words = job_folder_reader.end(attempt / "stderr", batch_script.MAX_STDERR)
        outcome_file_and_start_failures.require_started(outcome, self._site, self.image, words)
        queued, restarts = self._last.queued if self._last else None, int(attempt.name.rpartition("-")[2])
        place = outcome_file_and_start_failures.location(outcome, self._site, job)
        where = place.model_copy(update={"queued_seconds": queued, "restarts": restarts})
        for lack in where.unconfined:
            watch.say(f"less confined than a container on this machine: {lack}")
        with (attempt / "stdout").open("rb") as file:
            stdout = file.read(MAX_STDOUT)
        limit = outcome.size > MAX_STDOUT
        timed_out = outcome.seconds >= job.limits.timeout and outcome.exit in (124, 137)  # exit codes of timeout(1)
        return RawOutput(
            stdout=stdout,
            stderr=words,
            exit_code=None if timed_out else outcome.exit,
            seconds=outcome.seconds,
            out_of_memory=outcome.oom,
            timed_out=timed_out,
            too_long=limit,
            parts=outcome.parts,
            where=where,
        )

    # cancelling

    def _cancel(self, name: str, watch: Watch) -> None:
        """Cancels the job by its name, which is known before its id. The job's script then removes the container."""
        try:
            done = run(["scancel", f"--name={name}"], timeout=_ANSWER)
            if done.code != 0:
                watch.say(f"the job could not be cancelled: {_words(done)}; scancel --name={name}")
                return
            end = time.monotonic() + LEAVING
            while time.monotonic() < end:
                done = run(["squeue", "--noheader", f"--name={name}"], timeout=_ANSWER)
                if done.code != 0 or not done.stdout.strip():
                    return
                time.sleep(POLL / 4)
        except EnvbuildError as error:
            watch.say(f"the job may still run: {error.message}; scancel --name={name}")


class _NotTaken(RunnerError):
    """sbatch refused the job. Cancelling such a job fails, and this failure is not reported."""


class _Unknown(RunnerError):
    """The state of the job is unknown, and it may still be running. The folder and the ticket of a resumable job are
    kept."""


def _ask(job: str) -> tuple[bool, Seen | None]:
    """Return whether the controller answers, and the job's state, which is None if the controller no longer knows the
    job."""
    try:
        done = run(["scontrol", "--oneliner", "show", "job", job], timeout=_ANSWER, limit=1 << 20)
    except ProcessMissing:
        raise
    except ProcessTimeout:
        return False, None
    if done.code == 0:
        found = slurm_job_states.seen(done.stdout)
        return found is not None, found
    return "Invalid job id" in done.stderr + done.stdout, None


def _forget(name: str, folder: Path) -> None:
    job_folder_reader.remove_job_folder(folder)
    job_resume_tickets.forget_ticket(_NAME, name)


def _private(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise SystemFault(
            f"{folder} cannot be created: {error.strerror}", hint="set a different folder with slurm: {folder: ...}"
        ) from error


def _words(done: Completed) -> str:
    return printable(" ".join(done.stderr.split())[-500:]) or f"exit code {done.code}"


_SET = ("partition", "account", "qos", "reservation", "constraint", "time", "cpus_per_task", "mem")


def requested_resources(job: Job, site: SlurmSite, profile: str, origins: Mapping[str, str]) -> str:
    """The resources that the job requests, one per line. `origins`: for each setting, or gres.MODEL, where it is
    set."""
    lines = [f"{key} {value}{_by(origins.get(key))}" for key in _SET if (value := getattr(site, key))]
    if job.gpus:
        model = job.models[0]
        name = origins.get(f"gres.{model}", f"the GPU's id, because slurm: {{gres: ...}} sets no name for {model}")
        lines.insert(
            0, f"gres {site.gres_of(model, job.count)} (the count: gpu_count of profile {profile}; the name: {name})"
        )
    if job.nodes > 1:
        lines.insert(0, f"nodes {job.nodes} (--nodes)")
    shown = "sinfo -o '%P %l %D %G %f' lists partition, time, nodes, gres, features"
    return "\n".join(["the job requested", *(f"  {line}" for line in lines), shown]) if lines else shown


def _by(origin: str | None) -> str:
    return f" ({origin})" if origin else ""
