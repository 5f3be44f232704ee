"""Runs all sampled probes on a machine without faults, many times and each time with a new seed. No probe may fail.

python benchmarks/clean_runs.py [--runs 1000]     adds runs to benchmarks/results/clean_runs.json until each probe has
                                                  that many, and writes clean_runs.md; exit 1 after a false alarm

Only the probes in PROBES run, each at its lowest level: optim.torch at standard, the others at quick. A new sampled
probe of level quick must be added there.

A run counts for the version of the probe (envbuild/selftest/probes/versions.json) and the version of torch with which
it ran. So a campaign can be interrupted and continued later or on a different machine; after a change, only the changed
probes run again. Each run uses the next unused seed, and one or two threads in turn. --processes sets how many runs
there are at a time. The results file may contain `notes` for the page, written by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, described, write
from options import positive, program

from envbuild.facts import probe_catalogue_reader
from envbuild.util.atomic_files import write_atomically

ROOT = Path(__file__).parents[1]
FILE = RESULTS / "clean_runs.json"
VERSIONS = ROOT / "envbuild" / "selftest" / "probes" / "versions.json"
RUNS = 1000
THREADS = (1, 2)
PROBES = ("gemm.cases", "attention.cases", "norm.cases", "conv.cases", "repeat", "operations", "optim.torch")
# A program that reads a job document from stdin, and writes the results of the probes to stdout as one JSON document.
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


@dataclass(frozen=True)
class Runs:
    """The clean runs of one version of a probe, with one version of torch and one number of threads, on one machine.
    `count`: how many; `alarms`: seed -> the failure."""

    probe: str
    version: int
    torch: str
    machine: str
    threads: int
    count: int = 0
    alarms: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        return self.probe, self.version, self.torch, self.machine, self.threads


@dataclass(frozen=True)
class Done:
    """A run that has ended: its seed, its number of threads, and for each of its probes the failure, or None if the
    probe passed."""

    seed: int
    threads: int
    failures: Mapping[str, str | None]


def main() -> int:
    parser = argparse.ArgumentParser(description="False alarms of the sampled probes.")
    parser.add_argument(
        "--runs", type=positive, default=RUNS, help="number of runs of each probe, including earlier runs"
    )
    parser.add_argument("--probe", action="append", choices=PROBES, help="run only this probe; may be repeated")
    parser.add_argument("--file", type=Path, default=FILE, help="file of all runs, including earlier ones")
    parser.add_argument("--processes", type=positive, default=os.cpu_count(), help="number of runs at a time")
    arguments = parser.parse_args()
    machine, version, versions = described(), str(torch.__version__), read_versions()
    seed, found, notes = read(arguments.file)
    try:
        for done in campaign(found, versions, version, seed, arguments):
            seed = max(seed, done.seed + 1)
            found = added(found, done, versions, version, machine)
            write_atomically(arguments.file, text(seed, found, notes))
    finally:  # also after an interruption
        page = report(found, versions, version, notes)
        if arguments.file == FILE:
            write("clean_runs", page)
        else:
            print("\n".join(page))
    return 1 if any(runs.alarms for runs in current(found, versions, version)) else 0


def campaign(
    found: Sequence[Runs], versions: Mapping[str, int], version: str, seed: int, arguments: argparse.Namespace
) -> Iterator[Done]:
    """Run the probes that have too few runs, several runs at a time, and yield each run as it ends."""
    missing = {
        probe: arguments.runs - count(current(found, versions, version), probe) for probe in arguments.probe or PROBES
    }
    running: set[Future[Done]] = set()
    with ThreadPoolExecutor(arguments.processes) as pool:
        while running or any(number > 0 for number in missing.values()):
            probes = [probe for probe, number in missing.items() if number > 0]
            if probes and len(running) < arguments.processes:
                missing.update({probe: missing[probe] - 1 for probe in probes})
                running.add(pool.submit(run, probes, seed))
                seed += 1
                continue
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in ended)


def run(probes: Sequence[str], seed: int) -> Done:
    """Run the probes once, with this seed; the probes of each level run in one process."""
    threads = THREADS[seed % len(THREADS)]
    found: dict[str, str | None] = {}
    for level, names in by_level(probes).items():
        document = {
            "version": 1,
            "nonce": f"{seed:032x}",
            "level": level,
            "device": "cpu",
            "probes": names,
            "seed": seed,
            "threads": threads,
        }
        argv = [sys.executable, "-c", WORKER]
        done = subprocess.run(argv, input=json.dumps(document).encode(), stdout=subprocess.PIPE, check=True, cwd=ROOT)
        found.update(failures(names, json.loads(done.stdout)["probes"]))
    return Done(seed, threads, {probe: found[probe] for probe in probes})


def by_level(probes: Iterable[str]) -> dict[str, list[str]]:
    """Group the probes by their level, the lowest at which they run."""
    found: dict[str, list[str]] = {}
    for probe in probes:
        found.setdefault(probe_catalogue_reader.known_probes()[probe].level, []).append(probe)
    return found


def failures(probes: Sequence[str], results: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return, for each probe, the reason why it did not pass, or None if it passed."""
    found: dict[str, str | None] = dict.fromkeys(probes, "no result")
    for result in results:
        passed = result["status"] == "passed"
        found[result["probe"]] = None if passed else f"{result['failure'] or result['status']}: {result['reason']}"
    return found


def added(
    found: Sequence[Runs], done: Done, versions: Mapping[str, int], version: str, machine: str
) -> tuple[Runs, ...]:
    """Add a run to the runs of its probes."""
    by_key = {runs.key: runs for runs in found}
    for probe, failure in done.failures.items():
        empty = Runs(probe, versions[probe], version, machine, done.threads)
        before = by_key.get(empty.key, empty)
        alarms = {**before.alarms, **({str(done.seed): failure} if failure else {})}
        by_key[empty.key] = dataclasses.replace(before, count=before.count + 1, alarms=alarms)
    return tuple(by_key.values())


def current(found: Iterable[Runs], versions: Mapping[str, int], version: str) -> list[Runs]:
    """Return the runs that were made with the current versions of the probes and this version of torch."""
    return [runs for runs in found if runs.torch == version and versions.get(runs.probe) == runs.version]


def count(found: Iterable[Runs], probe: str) -> int:
    return sum(runs.count for runs in found if runs.probe == probe)


def read_versions() -> dict[str, int]:
    versions: dict[str, int] = json.loads(VERSIONS.read_text(encoding="utf-8"))
    return versions


def read(file: Path) -> tuple[int, tuple[Runs, ...], list[str]]:
    """Return the next seed, the earlier runs, and the notes."""
    if not file.exists():
        return 1, (), []
    document = json.loads(file.read_text(encoding="utf-8"))
    return document["next_seed"], tuple(Runs(**runs) for runs in document["runs"]), document.get("notes", [])


def text(seed: int, found: Sequence[Runs], notes: Sequence[str]) -> str:
    """Return the contents of the results file, one line for each `Runs`."""
    lines = ",\n".join(f"  {json.dumps(dataclasses.asdict(runs))}" for runs in sorted(found, key=lambda one: one.key))
    return f'{{"next_seed": {seed}, "notes": {json.dumps(notes)}, "runs": [\n{lines}\n]}}\n'


def report(found: Sequence[Runs], versions: Mapping[str, int], version: str, notes: Sequence[str] = ()) -> list[str]:
    """Return the page: the counts of each probe, then each false alarm."""
    runs = current(found, versions, version)
    machines = sorted({one.machine for one in runs})
    rows = []
    for probe in PROBES:
        by_threads = [count((one for one in runs if one.threads == threads), probe) for threads in THREADS]
        false = sum(len(one.alarms) for one in runs if one.probe == probe)
        rows.append(
            f"| {probe} | {versions[probe]} | {sum(by_threads)} | {by_threads[0]} | {by_threads[1]} | {false} |"
        )
    alarms = [(one, seed, reason.replace("|", "/")) for one in runs for seed, reason in one.alarms.items()]
    return [
        "# Clean runs of the sampled probes",
        "",
        f"Made by `make clean-runs` with torch {version}, on the CPU: nothing has run on a GPU.",
        "Each run has its own seed. A run counts for the version of the probe that ran: after a change, it runs again.",
        f"The goal is {RUNS} runs of each probe, at its lowest level.",
        "",
        *(f"- Machine: {machine}." for machine in machines),
        *(f"- {note}" for note in notes),
        "",
        "| probe | version | runs | with 1 thread | with 2 threads | false alarms |",
        "|---|---|---|---|---|---|",
        *rows,
        *(["", "| probe | seed | threads | false alarm |", "|---|---|---|---|"] if alarms else []),
        *(f"| {one.probe} | {seed} | {one.threads} | {reason} |" for one, seed, reason in alarms),
    ]


if __name__ == "__main__":
    program(main)
