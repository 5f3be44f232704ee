"""Compares the start-up time of envbuild with that of the Python interpreter alone and of other commands, in one run.

python benchmarks/startup.py        writes benchmarks/results/startup.md
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import described, keep_bytecode, write
from options import program

RUNS = 21
BUDGET = 0.15
BIN = Path(sys.executable).parent

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import click'": [sys.executable, "-c", "import click"],
    "envbuild --help": [str(BIN / "envbuild"), "--help"],
    "envbuild show cpu": [str(BIN / "envbuild"), "show", "cpu"],
    "pip --help": [sys.executable, "-m", "pip", "--help"],
}


def seconds(argv: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        keep_bytecode(Path(folder))
        for number in range(RUNS + 1):  # in turn, so that a busy moment affects all commands
            for name, argv in COMMANDS.items():
                taken = seconds(argv)
                if number:  # the first run compiles the modules
                    times[name].append(taken)
    floor = statistics.median(times["python -c pass"])
    rows = [
        f"| `{name}` | {statistics.median(taken):.3f} | {min(taken):.3f} | {max(taken):.3f} "
        f"| {statistics.median(taken) / floor:.1f} |"
        for name, taken in times.items()
    ]
    write(
        "startup",
        [
            "# Start-up",
            "",
            f"Machine: {described()}. {RUNS} runs each, in turn. Made by `make bench`.",
            "",
            "| command | median s | min s | max s | over the bare interpreter |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Budget for `envbuild --help`: {BUDGET} s.",
        ],
    )


if __name__ == "__main__":
    program(main)
