"""Injects faults into real processes and records what the self-test reports for each. Then makes clean runs, in which
the self-test must report no fault.

python benchmarks/faults.py [--clean 50]        writes benchmarks/results/faults.md; exit 1 if a fault is not reported
                                                as expected, or if a clean run fails

The faults and the expected results are those of the tests (tests/selftest): patched operations, compiled libraries,
leaks, hangs, and ranks that die, hang or compute wrong results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from machine import described, write
from options import program

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from selftest import seeding
from selftest.named import NAMED
from selftest.probes.multi_gpu.test_dist_rank_failures import LAME
from selftest.probes.test_apex_loader import WRONG as APEX
from selftest.seeds.failures import WRONG
from selftest.test_seeded_operations import WRONG as OPERATIONS

from envbuild.facts import database

Frame = Mapping[str, Any]
RANKS = "dist.staged:"

# Seed -> the expected kind of failure, words that the reason must contain, and the expected advisories (None: any).
WANTED: dict[str, tuple[str, str, list[str] | None]] = {
    **{seed: (failure, words, NAMED.get(seed, [])) for seed, failure, words in (*WRONG, *OPERATIONS, *APEX)},
    **{RANKS + seed: (failure, words, None) for seed, failure, _, _, words in LAME},
}


def named(frame: Frame) -> list[str]:
    """Return the advisories whose signature matches the failure, as `envbuild test` names them."""
    result = {**frame, "probe": frame["probe"].partition(":")[0]}
    return [advisory.id for advisory in database.advisories() if advisory.matches(result)]


def caught(seed: str, frame: Frame) -> bool:
    failure, words, advisories = WANTED[seed]
    is_expected = frame["status"] == "failed" and frame["failure"] == failure and words in str(frame["reason"])
    return is_expected and advisories in (None, named(frame))


def row(seed: str, frame: Frame) -> str:
    probe, _, name = seed.partition(":")
    how = " ".join(filter(None, (frame["failure"], frame["signal"])))
    reason = str(frame["reason"]).splitlines()[0].replace("|", "/")
    reason = reason if len(reason) < 120 else reason[:117] + "..."
    ids = ", ".join(named(frame)) or "-"
    return f"| {name} | {probe} | {'yes' if caught(seed, frame) else 'NO'} | {how} | {reason} | {ids} |"


def clean(count: int) -> Iterator[tuple[float, list[str]]]:
    """Run level quick `count` times. Yield the seconds and the failed probes of each run."""
    for _ in range(count):
        begin = time.perf_counter()
        argv = [sys.executable, "-m", "envbuild.selftest", "--json"]
        done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        failed = [probe["probe"] for probe in json.loads(done.stdout)["probes"] if probe["status"] == "failed"]
        yield time.perf_counter() - begin, failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the self-test with faults that it must detect, and without faults."
    )
    parser.add_argument("--clean", type=int, default=50, help="number of clean runs of level quick")
    count = parser.parse_args().clean
    with tempfile.TemporaryDirectory() as folder:
        runs_of = (seeding.kernels, seeding.operations, seeding.apexes, seeding.ranks)
        found = {seed: frame for seeded in runs_of for seed, frame in seeded(Path(folder)).items()}
    good = sum(caught(seed, found[seed]) for seed in WANTED)
    runs = list(clean(count))
    alarms = [failed for _, failed in runs if failed]
    seconds = [took for took, _ in runs]
    write(
        "faults",
        [
            "# Faults that the self-test catches",
            "",
            f"Machine: {described()}. Made by `make faults`, on the CPU: nothing of it has run on a GPU.",
            "",
            f"- Caught: {good}/{len(WANTED)}, each by the probe whose job it is, with the advisory where one is known.",
            f"- Clean runs of level quick with a false alarm: {len(alarms)}/{count}"
            + (f", {min(seconds):.1f} to {max(seconds):.1f} s each." if seconds else ".")
            + "".join(f" {', '.join(failed)}." for failed in alarms),
            "",
            "| seeded fault | probe | caught | as | in its words | advisory |",
            "|---|---|---|---|---|---|",
            *(row(seed, found[seed]) for seed in WANTED),
        ],
    )
    return 0 if good == len(WANTED) and not alarms else 1


if __name__ == "__main__":
    program(main)
