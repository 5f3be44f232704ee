"""The self-test's entry: a job document and frames for envbuild, or options and a table for a person.

    python -m envbuild.selftest [--level quick] [--device cpu] [--probe NAME]... [--list] [--json]
    python -m envbuild.selftest --job FILE      ("-": standard input)

Exit status: 0 all passed or skipped; 2 usage; 3 a bad job document; 4 no torch; 5 a probe failed; 128 + the signal
that interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

from envbuild.selftest.frames import FrameWriter
from envbuild.selftest.job import DEVICES, LEVELS, VERSION, Job, JobError, parse

OK, USAGE, BAD_JOB, NO_TORCH, FAILED = 0, 2, 3, 4, 5

Emit = Callable[[Mapping[str, Any]], None]


def main(job: Any, out: int = 1) -> int:
    """Run the job document (a dict) and write its frames to the file descriptor `out`; returns the exit status.

    From then on nothing else reaches `out` or the real stdout: what is printed goes to stderr.
    """
    return _run(job, take(out), lambda parsed, fd: FrameWriter(fd, parsed.nonce))


def take(out: int = 1) -> int:
    """The descriptor to write to, which is nobody else's from here on; stdout goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(out) if out == 1 else out
    os.set_inheritable(kept, False)
    os.dup2(2, 1)
    return kept


def has_torch() -> bool:
    """Import torch; where that fails, say why on stderr."""
    # OpenMP's threads spin while they wait, which costs five times the work where others use the processors (tried).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        importlib.import_module("torch")
        return True
    except Exception as error:  # also what a library says that cannot be loaded
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"torch cannot be imported by {sys.executable}: {why}", file=sys.stderr)
        return False


def _run(document: Any, fd: int, writer: Callable[[Job, int], Emit]) -> int:
    # Not at the top: torch must not be imported before stdout is safe, nor only to print the usage.
    if not has_torch():
        return NO_TORCH
    from envbuild.selftest import harness, watch
    from envbuild.selftest.catalogue import PROBES

    try:
        job = parse(document, frozenset(probe.name for probe in PROBES))
    except JobError as error:
        for fault in error.faults:
            print(f"job: {fault}", file=sys.stderr)
        return BAD_JOB
    try:
        return OK if harness.run(PROBES, job, writer(job, fd), watch.Terms(hidden=(fd,))) else FAILED
    except harness.Interrupted as interruption:
        return 128 + interruption.number


def command(arguments: list[str] | None = None) -> int:
    """Run what the options ask for; returns the exit status."""
    options = _options(arguments)
    if options.job is not None:
        return _job_command(options.job)
    if options.list:
        return _list()
    if options.probe:
        if not has_torch():
            return NO_TORCH
        unknown = _unknown(options.probe)
        if unknown:
            print(unknown, file=sys.stderr)
            return USAGE
    from envbuild.selftest.table import Collector, Table

    document = {
        "version": VERSION,
        "nonce": os.urandom(16).hex(),
        "level": options.level,
        "device": options.device,
        "probes": options.probe,
    }
    out = take()
    if not options.json:
        return _run(document, out, lambda job, fd: Table(fd))
    collector = Collector()
    status = _run(document, out, lambda job, fd: collector)
    collector.write(out)
    return status


def _job_command(path: str) -> int:
    try:
        document = json.loads(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"job: {path}: {error}", file=sys.stderr)
        return BAD_JOB
    return main(document)


def _unknown(names: list[str]) -> str | None:
    """What to say of names that no probe has; None where each is one's. Imports torch, as the probes do."""
    from envbuild.selftest.catalogue import PROBES

    known = [probe.name for probe in PROBES]
    wrong = [name for name in names if name not in known]
    return "there is no probe {}; known: {}".format(", ".join(map(repr, wrong)), ", ".join(known)) if wrong else None


def _list() -> int:
    if not has_torch():
        return NO_TORCH
    from envbuild.selftest.catalogue import PROBES

    for probe in PROBES:
        print("{:<22} {:<9} {}".format(probe.name, probe.level, (probe.function.__doc__ or "").splitlines()[0]))
    return OK


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m envbuild.selftest", description="Proves torch's kernels.")
    parser.add_argument("--level", choices=LEVELS, default=LEVELS[0])
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0])
    parser.add_argument("--probe", action="append", metavar="NAME", help="run this one only; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the probes")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--job", metavar="FILE", help='run a job document and write frames; "-" is standard input')
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command())
