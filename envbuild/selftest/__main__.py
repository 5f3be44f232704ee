"""The self-test's command line.

envbuild starts the self-test with a job document (--job) and reads the frames that the self-test writes. A person
starts the self-test with options and reads a table.

    python selftest.zip [--level quick] [--device cpu] [--probe NAME]... [--seed N] [--list] [--json]
    python selftest.zip --job FILE      ("-": standard input)

In a checkout, run `python -m envbuild.selftest` instead. STATUSES lists the exit statuses. With a job document, skipped
probes do not change the exit status, because the reader of the frames sees which probes were skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import json
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

from envbuild.selftest.harness.frame_and_message_streams import FrameWriter
from envbuild.selftest.harness.job_document import DEVICES, LEVELS, VERSION, JobDocument, JobError, parse
from envbuild.selftest.inventory import startup_code_suppression

OK, USAGE, BAD_JOB, UNPROVED, FAILED = 0, 2, 3, 4, 5
PROGRAM = "python selftest.zip"
RANDOM = "random"
_MOST_SEED = 2**31 - 1
STATUSES = (
    "exit status: 0 all probes that ran passed; 2 wrong usage; 3 invalid job document; 4 torch is missing, no probe "
    "passed, or a probe given with --probe was skipped; 5 a probe failed; 128 + the signal that interrupted"
)

Emit = Callable[[Mapping[str, Any]], None]


def main(job: Any, out: int = 1) -> int:
    """Run the job document (a dict), write frames to the file descriptor `out`, and return the exit status.

    After this call, `out` and the original stdout receive only frames. Other output goes to stderr.
    """
    return _run(job, take(out), lambda parsed, fd: FrameWriter(fd, parsed.nonce))


def take(out: int = 1) -> int:
    """Redirect stdout to stderr, and return a descriptor through which only this program writes to `out`."""
    sys.stdout.flush()
    kept = os.dup(out) if out == 1 else out
    os.set_inheritable(kept, False)
    os.dup2(2, 1)
    return kept


def has_torch() -> bool:
    """Return whether torch can be imported; print the reason to stderr if it cannot."""
    fault = torch_fault()
    if fault:
        print(fault, file=sys.stderr)
    return fault is None


def torch_fault() -> str | None:
    """Import torch and the probes; return the reason if the import fails, else None."""
    # By default, OpenMP's threads spin while they wait. If other processes use the same processors, spinning takes five
    # times the CPU time (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    startup_code_suppression.disable_backends()
    try:
        importlib.import_module("torch")
        importlib.import_module("envbuild.selftest.probes.probe_catalogue")
        return None
    except Exception as error:  # not only ImportError: loading a shared library can raise other errors
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
    found = None
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec("torch")
    broken = f" (torch is installed but broken: {found.origin})" if found else ""
    return f"torch cannot be imported by {sys.executable}: {why}{broken}"


def _run(document: Any, fd: int, writer: Callable[[JobDocument, int], Emit]) -> int:
    # The modules below import torch. They are imported here, because stdout must be redirected before torch is
    # imported, and printing the usage needs no torch.
    if not has_torch():
        return UNPROVED
    from envbuild.selftest.harness import probe_scheduler, probe_supervisor
    from envbuild.selftest.probes.probe_catalogue import PROBES

    try:
        job = parse(document, frozenset(probe.name for probe in PROBES))
    except JobError as error:
        for fault in error.faults:
            print(f"job: {fault}", file=sys.stderr)
        return BAD_JOB
    try:
        return OK if probe_scheduler.run(PROBES, job, writer(job, fd), probe_supervisor.Terms(hidden=(fd,))) else FAILED
    except probe_scheduler.RunInterrupted as interruption:
        return 128 + interruption.number


def command(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        return _command(_options(arguments))
    except KeyboardInterrupt:  # raised while torch is imported; later, probe_scheduler handles signals itself
        return 128 + signal.SIGINT


def _command(options: argparse.Namespace) -> int:
    if options.job is not None:
        return _job_command(options.job)
    if options.list:
        return _list()
    if options.probe:
        if not has_torch():
            return UNPROVED
        unknown = _unknown(options.probe)
        if unknown:
            print(unknown, file=sys.stderr)
            return USAGE
    from envbuild.selftest.harness.standalone_output import Collector, Table

    seed = options.seed
    if seed == RANDOM:
        seed = 1 + secrets.randbelow(_MOST_SEED)
        print(f"seed {seed} was drawn; to repeat this run: {_repeating(options, seed)}", file=sys.stderr)
    document = {
        "version": VERSION,
        "nonce": os.urandom(16).hex(),
        "level": options.level,
        "device": options.device,
        "probes": options.probe,
        "seed": seed,
    }
    out, collector = take(), Collector()
    table = None if options.json else Table(out)

    def emit(message: Mapping[str, Any]) -> None:
        collector(message)
        if table:
            table(message)

    status = _run(document, out, lambda job, fd: emit)
    if options.json:
        collector.write(out)
    statuses = [probe["status"] for probe in collector.probes()]
    lacking = "passed" not in statuses or (options.probe and "skipped" in statuses)
    return UNPROVED if status == OK and lacking else status


def _repeating(options: argparse.Namespace, seed: int) -> str:
    """Return the command line that runs the same probes with the same test cases."""
    probes = [word for name in options.probe or () for word in ("--probe", name)]
    rest = ["--level", options.level, "--device", options.device, *probes, "--seed", str(seed)]
    return f"{PROGRAM} {shlex.join(rest)}"


def _job_command(path: str) -> int:
    try:
        document = json.loads(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"job: {path}: {error}", file=sys.stderr)
        return BAD_JOB
    return main(document)


def _unknown(names: list[str]) -> str | None:
    """Return an error message that names the unknown probes; None if all names are known.

    This imports the probe catalogue, and therefore torch.
    """
    from envbuild.selftest.probes.probe_catalogue import PROBES

    known = [probe.name for probe in PROBES]
    wrong = [name for name in names if name not in known]
    return "; ".join(f"unknown probe {name!r} ({_meant(name, known)})" for name in wrong) or None


def _meant(name: str, known: list[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or else all known names."""
    found = difflib.get_close_matches(name, known, 1)
    return f"did you mean {found[0]}?" if found else f"known: {', '.join(known)}"


def _list() -> int:
    if not has_torch():
        return UNPROVED
    from envbuild.selftest.probes.probe_catalogue import PROBES

    for probe in PROBES:
        where = "GPU" if probe.needs == "cuda" else "any"
        print(f"{probe.name:<20} {probe.level:<9} {where:<4} {probe.does}")
    return OK


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Test torch's kernels.", epilog=STATUSES)
    parser.add_argument("--level", choices=LEVELS, default=LEVELS[0])
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0])
    parser.add_argument("--probe", action="append", metavar="NAME", help="run only this probe; may be repeated")
    parser.add_argument(
        "--seed", type=_seed, metavar="N", help=f"sample the cases with this seed (default: 1); {RANDOM!r} chooses one"
    )
    parser.add_argument("--list", action="store_true", help="list the probes")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--job", metavar="FILE", help='run a job document and write frames; "-" is standard input')
    return parser.parse_args(arguments)


def _seed(text: str) -> int | str:
    return text if text == RANDOM else int(text)


if __name__ == "__main__":
    sys.exit(command())
