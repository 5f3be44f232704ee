"""Checks that an environment fits a profile. The script that `envbuild export check` writes runs this check on every
rank before training.

Without a fault, the check prints one line to stdout. Otherwise it prints the faults and their remedies to stderr.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from envbuild.selftest.__main__ import FAILED, OK, torch_fault
from envbuild.selftest.harness.cpu_count import processors
from envbuild.selftest.harness.job_document import parse
from envbuild.selftest.harness.standalone_output import Collector

# Environment variables with a rank's number: the first of each pair is set by torchrun, the second by Slurm.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
_RANKS = ("RANK", "SLURM_PROCID")
_MOST_LINES = 12
_DECIDING = ("torch ", "`torch.", "nvidia-", "triton ", "Python ")
"""How lines about differing versions begin if the version decides whether kernels work on a GPU. Such lines are printed
before those of other packages."""

Result = Mapping[str, Any]


def main(document: Mapping[str, Any]) -> int:
    """Run the check and return the exit status: 0 (no fault), 5 (faults), or 128 + the number of the signal that
    interrupted it.

    `document`: {"profile": the profile's name, "lock": the lock's short id, "job": a job document (its nonce and
    threads are replaced), "remedies": [{"when": {key: pattern}, "remedy": text}, ...]}. A remedy applies if, for each
    key of "when", the value in the probe's result or traits matches the pattern. The first remedy that applies is
    printed.
    """
    who = "envbuild check: {}{}".format(document["profile"], _place())
    job = dict(document["job"], nonce=os.urandom(16).hex(), threads=_threads())
    if job.get("device") == "cuda":
        try:
            _choose_device()
        except LookupError as error:
            return _refuse(who, [str(error)])
    fault = torch_fault()
    if fault:
        image = "run in the image of {0} (envbuild make {0})".format(document["profile"])
        return _refuse(who, [fault, f"  fix: {image}, or install the locked versions and their dependencies"])
    # Imported here, because these modules import torch, and CUDA_VISIBLE_DEVICES must be set before that.
    from envbuild.selftest.harness import probe_scheduler, probe_supervisor
    from envbuild.selftest.inventory import mapped_library_origins
    from envbuild.selftest.probes.environment import env_libs
    from envbuild.selftest.probes.probe_catalogue import PROBES

    parsed = parse(job, frozenset(probe.name for probe in PROBES))
    collector, begin = Collector(), time.monotonic()
    try:
        probe_scheduler.run(PROBES, parsed, collector, probe_supervisor.Terms())
    except probe_scheduler.RunInterrupted as interruption:
        return 128 + interruption.number
    differing = env_libs.version_mismatches(parsed, mapped_library_origins.take_inventory(()).distributions)
    results = [with_versions(result, differing) for result in collector.probes()]
    wrong = [result for result in results if is_wrong(result, parsed.require)]
    if not any(result["status"] == "passed" for result in results):
        wrong = wrong or results
    if wrong:
        return _refuse(who, report(wrong, document["remedies"]))
    counts = ["{} {}".format(sum(r["status"] == status for r in results), status) for status in ("passed", "skipped")]
    print("{}: {}, {:.1f} s".format(who, ", ".join(counts), time.monotonic() - begin), flush=True)
    return OK


def with_versions(result: Result, differing: Sequence[str]) -> Result:
    """Return the probe's result, or a failure if the probe env.libs was skipped and versions differ.

    env.libs is skipped without a GPU, but installed versions can be compared without one.
    """
    if (result["probe"], result["status"]) != ("env.libs", "skipped") or not differing:
        return result
    return {**result, "status": "failed", "failure": "version", "detail": "\n".join(differing), "reason": differing[0]}


def is_wrong(result: Result, required: Sequence[str]) -> bool:
    """Return whether a probe failed, or was skipped although it is required."""
    return bool(result["status"] == "failed" or (result["status"] == "skipped" and result["probe"] in required))


def _rank(result: Result) -> int:
    """Return the sort key of a result: failed probes first, then env.libs's list of differing versions, then skipped
    probes."""
    return 2 if result["status"] == "skipped" else int((result["probe"], result["failure"]) == ("env.libs", "version"))


def report(wrong: Sequence[Result], remedies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of `failure_lines` for all results, sorted by `_rank`. Probes with equal lines are printed once,
    with all their names."""
    probes: dict[tuple[str, ...], list[str]] = {}
    for result in sorted(wrong, key=_rank):
        first, *rest = failure_lines(result, remedies)
        probes.setdefault((first.partition(": ")[2], *rest), []).append(result["probe"])
    return [line for (cause, *rest), names in probes.items() for line in (f"{', '.join(names)}: {cause}", *rest)]


def failure_lines(result: Result, remedies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that describe a probe's failure: its kind, its faults (at most _MOST_LINES), and the first remedy
    that applies."""
    cause = " ".join(str(result[key]) for key in ("failure", "signal") if result[key]) or str(result["status"])
    several = (result["detail"] or "").splitlines() if result["failure"] in ("version", "mismatch") else []
    if result["failure"] == "version":
        several.sort(key=lambda line: not line.startswith(_DECIDING))
    reasons = several or [str(result["reason"])]
    if len(reasons) > _MOST_LINES:
        reasons[_MOST_LINES:] = [f"and {len(reasons) - _MOST_LINES} more"]
    at = " at {}".format(result["at"]) if result["at"] else ""
    lines = ["{}: {}{}".format(result["probe"], cause, at), *(f"  {reason}" for reason in reasons)]
    matching = (row["remedy"] for row in remedies if _fits(result, row["when"]))
    return [*lines, *(f"  fix: {remedy}" for remedy in list(matching)[:1])]


def _fits(result: Result, when: Mapping[str, str]) -> bool:
    known = {**result.get("traits", {}), **result}
    said = {key: "" if known.get(key) is None else str(known[key]) for key in when}
    return all(said[key] and re.fullmatch(pattern, said[key], re.IGNORECASE) for key, pattern in when.items())


def visible(variables: Mapping[str, str]) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES that gives this rank its own device; None to keep the present value.

    Raises LookupError if CUDA_VISIBLE_DEVICES lists several devices, but none for this rank.
    """
    local = _first(variables, _LOCAL_RANKS)
    given = variables.get("CUDA_VISIBLE_DEVICES")
    if local is None or given == "":
        return None
    if given is None:
        return local
    devices = [device.strip() for device in given.split(",")]
    if len(devices) == 1:
        return None  # the launcher has chosen this device for this rank
    if int(local) >= len(devices):
        raise LookupError(f"local rank {local} has no device of its own: CUDA_VISIBLE_DEVICES is {given}")
    return devices[int(local)]


def _choose_device() -> None:
    chosen = visible(os.environ)
    if chosen is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen


def _first(variables: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((variables[name] for name in names if variables.get(name, "").isdecimal()), None)


def _threads() -> int | None:
    """Return this rank's equal share of the processors; None (all processors) if LOCAL_WORLD_SIZE is not set."""
    ranks = _first(os.environ, ("LOCAL_WORLD_SIZE",))
    return max(1, processors() // max(1, int(ranks))) if ranks else None


def _place() -> str:
    rank = _first(os.environ, _RANKS)
    return f", rank {rank} on {socket.gethostname()}" if rank is not None else ""


def _refuse(who: str, lines: Sequence[str]) -> int:
    """Print the lines with a single write, so that the outputs of several ranks do not mix; return the exit status."""
    sys.stderr.write("".join([f"{who}: check failed\n", *(f"  {line}\n" for line in lines)]))
    sys.stderr.flush()
    return FAILED
