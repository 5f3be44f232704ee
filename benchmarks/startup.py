"""How fast the command line starts, beside the interpreter alone and other command lines, in one run.

python benchmarks/startup.py        writes benchmarks/results/startup.md
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 21
BUDGET = 0.15
HERE = Path(__file__).parent
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


def machine() -> str:
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), "unknown CPU")  # fmt: skip
    import os

    return f"{cpu}, {os.cpu_count()} cores, {platform.platform(terse=True)}, Python {platform.python_version()}"


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):  # in turn, so that a busy moment touches all
        for name, argv in COMMANDS.items():
            times[name].append(seconds(argv))
    floor = statistics.median(times["python -c pass"])
    rows = [
        f"| `{name}` | {statistics.median(taken):.3f} | {min(taken):.3f} | {max(taken):.3f} "
        f"| {statistics.median(taken) / floor:.1f} |"
        for name, taken in times.items()
    ]
    text = "\n".join([
        "# Start-up", "", f"Machine: {machine()}. {RUNS} runs each, in turn. Made by `make bench`.", "",
        "| command | median s | min s | max s | over the bare interpreter |", "|---|---|---|---|---|", *rows, "",
        f"Budget for `envbuild --help`: {BUDGET} s.", "",
    ])  # fmt: skip
    target = HERE / "results" / "startup.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
