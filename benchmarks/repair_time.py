"""Measures the tests in which `fix` or `run --with-fix` repairs a reported failure.

python benchmarks/repair_time.py        writes benchmarks/results/repair_time.md

The wheels of the tests are stand-ins, so nothing is downloaded. With the real torch, uv also links some thousand files.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from machine import described, write
from options import program

BUDGET = 120  # seconds
TESTS = Path(__file__).parents[1] / "tests"
FILE = "unit/repair/test_reported_failures.py"
_CALL = re.compile(r"([0-9.]+)s call +\S+::test_(\S+)")


def main() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "--durations=0", "-vv", FILE]
    done = subprocess.run(command, cwd=TESTS, check=True, stdout=subprocess.PIPE, text=True)
    seconds = {name.replace("_", " "): float(value) for value, name in _CALL.findall(done.stdout)}
    slowest = max(seconds.values())
    write(
        "repair_time",
        [
            "# Repairing environments",
            "",
            f"Machine: {described()}. Made by `python benchmarks/repair_time.py`, one run of the tests in "
            f"`tests/{FILE}`, one after the other.",
            "",
            "The time of a test includes making the faulty environment, all commands of envbuild and of the package "
            "manager, and the check which library is loaded afterwards; in most tests also `--undo`. The wheels are "
            "stand-ins for torch and NVIDIA's libraries, so that neither downloads nor the size of torch count.",
            "",
            "| test | s |",
            "|---|---|",
            *(f"| {name} | {value:.1f} |" for name, value in sorted(seconds.items())),
            "",
            f"Goal: at most {BUDGET} s for each. The slowest took {slowest:.0f} s "
            f"({'met' if slowest <= BUDGET else 'missed'}).",
        ],
    )


if __name__ == "__main__":
    program(main)
