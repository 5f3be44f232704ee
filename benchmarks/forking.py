"""Compares, in one run, the harness that forks probes after one import of torch with a new process for each probe.

python benchmarks/forking.py        writes benchmarks/results/forking.md
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

from machine import described, write
from options import program

RUNS = 5
SELFTEST = [sys.executable, "-m", "envbuild.selftest", "--json"]


def run(*options: str) -> tuple[float, list[dict[str, str]]]:
    """Run the probes. Return the seconds, and the results of the probes."""
    begin = time.perf_counter()
    done = subprocess.run([*SELFTEST, *options], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found: list[dict[str, str]] = json.loads(done.stdout)["probes"]
    return time.perf_counter() - begin, found


def main() -> None:
    _, probes = run()
    names = [probe["probe"] for probe in probes if probe["status"] == "passed"]
    chosen = [word for name in names for word in ("--probe", name)]
    forked, fresh = [], []
    for _ in range(RUNS):  # in turn, so that a busy moment affects both
        forked.append(run(*chosen)[0])
        fresh.append(sum(run("--probe", name)[0] for name in names))
    rows = [("forked from one process", forked), ("a fresh process each", fresh)]
    ratio = statistics.median(forked) / statistics.median(fresh)
    write(
        "forking",
        [
            "# Forked probes compared with fresh processes",
            "",
            f"Machine: {described()}. The {len(names)} probes of level quick that pass here: {', '.join(names)}.",
            f"{RUNS} runs each, in turn. Made by `make bench`.",
            "",
            "| how | median s | min s | max s |",
            "|---|---|---|---|",
            *(f"| {how} | {statistics.median(took):.2f} | {min(took):.2f} | {max(took):.2f} |" for how, took in rows),
            "",
            f"Ratio: {ratio:.2f}.",
        ],
    )


if __name__ == "__main__":
    program(main)
