"""Runs a job with a Python of this machine, in this shell's environment: no container, no engine."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from envbuild.errors import EnvbuildError
from envbuild.process import ProcessTimeout, run
from envbuild.proof.job import Job, RawOutput


def version(python: Path) -> str | None:
    """Of a Python; None for a file that is none, or does not run."""
    try:
        done = run([python, "-c", "import sys; print('Python %d.%d' % sys.version_info[:2])"], timeout=20)
    except (OSError, EnvbuildError):
        return None
    word, _, number = done.stdout.strip().rpartition("\n")[2].partition(" ")
    return number if done.code == 0 and word == "Python" else None


def start(python: Path, job: Job) -> RawOutput:
    """Run the job to its end. Whatever it writes is gone afterwards.

    Raises ProcessMissing if the file is no program.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
        given = Path(folder) / "job"
        given.write_bytes(job.stdin)
        argv: list[str | Path] = [python, *job.argv[1:], given]
        try:
            done = run(argv, env={"TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}, timeout=job.limits.timeout)
        except ProcessTimeout:
            return RawOutput(b"", "", None, time.monotonic() - begin, timed_out=True)
    return RawOutput(done.stdout.encode(), done.stderr, done.code, time.monotonic() - begin)
