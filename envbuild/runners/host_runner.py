"""Runs a job with a Python interpreter of this machine, without a container, with the environment variables of the
shell."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from envbuild.runners.runner_interface import Watch
from envbuild.testrun.run_result import MAX_STDOUT, RawOutput
from envbuild.testrun.selftest_job import Job
from envbuild.util import temporary_files
from envbuild.util.errors import EnvbuildError, UsageError
from envbuild.util.host_processes import LineListeners, ProcessTimeout, run


class HostRunner:
    """The runner for a Python interpreter, named by its path or by the folder of its virtual environment. Raises
    UsageError if the interpreter is missing or does not work."""

    image = ""
    nonce: str | None = None

    def __init__(self, named: str) -> None:
        self.python = find_interpreter(named)

    def run(self, job: Job, watch: Watch) -> RawOutput:
        return run_on_host(self.python, job, watch.line)


def find_interpreter(named: str) -> Path:
    """Return the Python interpreter for `named`: the path of an interpreter, or the folder of a virtual environment.
    Raises UsageError if the interpreter is missing or does not work."""
    path = Path(named).absolute()
    if path.is_dir():
        inside = [path / "bin" / name for name in ("python", "python3") if (path / "bin" / name).exists()]
        if not inside:
            raise UsageError(
                f"{path} is not an environment: bin/python is missing",
                hint="pass a Python interpreter, or the folder of a venv",
            )
        path = inside[0]
    if version(path) is None:
        raise UsageError(
            f"{path} is not a working Python interpreter", hint="pass a Python interpreter, or the folder of a venv"
        )
    return path


def environment_folder(python: Path) -> Path:
    """The folder of an interpreter's environment. It need not contain `python`, which may be a link to the interpreter
    in the environment."""
    done = run([python, "-I", "-c", "import sys; print(f'prefix {sys.prefix}')"], timeout=20)
    word, _, folder = done.stdout.strip().rpartition("\n")[2].partition(" ")
    return Path(folder) if done.code == 0 and word == "prefix" else python.parent.parent


def version(python: Path) -> str | None:
    """The version of a Python interpreter, such as "3.11"; None if the file is not a working interpreter."""
    try:
        done = run([python, "-S", "-c", "import sys; print('Python %d.%d' % sys.version_info[:2])"], timeout=20)
    except (OSError, EnvbuildError):
        return None
    word, _, number = done.stdout.strip().rpartition("\n")[2].partition(" ")
    return number if done.code == 0 and word == "Python" else None


def run_on_host(python: Path, job: Job, on_line: Callable[[bytes], None] = lambda line: None) -> RawOutput:
    """Runs the job until it ends or is stopped at its time limit or output limit; the result says which. `on_line`
    receives each line of the job's stdout. The job's temporary files are removed afterwards.

    Raises ProcessMissing if the file is not a program.
    """
    begin, timed_out = time.monotonic(), False
    with temporary_files.folder("here") as folder:
        given = folder / "job"
        given.write_bytes(job.stdin)
        argv: list[str | Path] = [python, *job.argv[1:], given]
        own = {"TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        if job.devices:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(job.devices)
        try:
            done = run(
                argv,
                env=own,
                timeout=job.limits.timeout,
                listeners=LineListeners(stdout=lambda line: on_line(line.encode())),
                limit=MAX_STDOUT,
            )
        except ProcessTimeout as expired:
            done, timed_out = expired.done, True
    return RawOutput(
        stdout=done.stdout.encode(),
        stderr=done.stderr,
        exit_code=None if timed_out else done.code,
        seconds=time.monotonic() - begin,
        timed_out=timed_out,
        too_long=done.cut,
    )
