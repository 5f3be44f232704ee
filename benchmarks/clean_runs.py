"""Runs of all sampled probes on a machine that is right, each with its own seed: none may fail.

python benchmarks/clean_runs.py [--runs 1000]        writes benchmarks/results/clean_runs.md; fewer runs are printed;
                                                    exit 1 after a false alarm

Only the probes in PROBES run, at level quick. A new sampled probe of that level is added there.

Run number n has the seed n, and one thread or two in turn; --processes of them run at a time. Runs are added to a file
as they end, in order (--file); a campaign that was cut off goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fault_injection import records
from fault_injection.records import CleanRun
from machine import described, write
from options import positive, program

ROOT = Path(__file__).parents[1]
RUNS = 1000
THREADS = (1, 2)
LEVEL = "quick"
PROBES = ("gemm.cases", "attention.cases", "norm.cases", "conv.cases", "repeat", "operations", "optim.torch")
# Reads a job document, and writes the results of the probes as one JSON document.
WORKER = """
import json, sys
from envbuild.selftest.__main__ import torch_fault
if fault := torch_fault():
    sys.exit(fault)
from envbuild.selftest.harness import probe_scheduler, probe_supervisor
from envbuild.selftest.probes.probe_catalogue import PROBES
from envbuild.selftest.harness.job_document import parse
from envbuild.selftest.harness.standalone_output import Collector
collector = Collector()
job = parse(json.load(sys.stdin), frozenset(probe.name for probe in PROBES))
probe_scheduler.run(PROBES, job, collector, probe_supervisor.Terms())
collector.write(1)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="False alarms of the sampled probes.")
    parser.add_argument("--runs", type=positive, default=RUNS)
    parser.add_argument("--file", type=Path, default=ROOT / ".clean-runs.jsonl", help="of the runs as they end")
    parser.add_argument("--processes", type=positive, default=os.cpu_count(), help="at a time")
    arguments = parser.parse_args()
    lines = records.Lines(arguments.file)
    with ThreadPoolExecutor(arguments.processes) as pool:
        for done in pool.map(run, range(lines.open() + 1, arguments.runs + 1)):
            lines.add(done)
    found = [
        CleanRun(configuration, level, threads, seed, tuple(reasons))
        for configuration, level, threads, seed, reasons in lines.read()
    ]
    text = page(found, described(), str(torch.__version__))
    if len(found) >= RUNS:  # an incomplete campaign has no result
        write("clean_runs", text)
    else:
        print("\n".join(text))
    return 1 if any(one.faults for one in found) else 0


def run(number: int) -> CleanRun:
    """Run every probe with the seed `number`; a probe that did not pass is a fault."""
    threads = THREADS[number % len(THREADS)]
    document = {
        "version": 1,
        "nonce": f"{number:032x}",
        "level": LEVEL,
        "device": "cpu",
        "probes": list(PROBES),
        "seed": number,
        "threads": threads,
    }
    argv = [sys.executable, "-c", WORKER]
    done = subprocess.run(argv, input=json.dumps(document).encode(), stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return CleanRun("all", LEVEL, threads, number, faults(json.loads(done.stdout)["probes"]))


def faults(results: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the report of each probe that did not pass in a run."""
    failed = [result for result in results if result["status"] != "passed"]
    missing = set(PROBES) - {result["probe"] for result in results}
    reasons = [f"{result['probe']}: {result['failure'] or result['status']}: {result['reason']}" for result in failed]
    return (*reasons, *(f"{probe}: no result" for probe in sorted(missing)))


def page(runs: Sequence[CleanRun], machine: str, version: str) -> list[str]:
    """Return the page: counts, then each false alarm with its case."""
    alarms = [(one, fault) for one in runs for fault in one.faults]
    counts = ", ".join(f"{sum(one.threads == n for one in runs)} with threads={n}" for n in THREADS)
    rows = [f"| {one.offset} | {one.threads} | {fault.replace('|', '/')} |" for one, fault in alarms]
    return [
        "# Clean runs of the sampled probes",
        "",
        f"Machine: {machine}. torch {version}, on the CPU. Made by `make clean-runs`.",
        "",
        f"- Runs of level {LEVEL}, each with its own seed: {len(runs)} ({counts}).",
        f"- Runs with a false alarm: {sum(bool(one.faults) for one in runs)}.",
        f"- Probes: {', '.join(PROBES)}. optim.torch samples nothing at this level and runs its fixed cases.",
        *(["", "| seed | threads | false alarm |", "|---|---|---|", *rows] if rows else []),
    ]


if __name__ == "__main__":
    program(main)
