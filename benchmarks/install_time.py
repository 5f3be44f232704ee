"""Compares `envbuild install` with `uv pip install` of the same wheels, in turn, in one run.

python benchmarks/install_time.py [--profile NAME] [--runs N]     writes benchmarks/results/install_time.md

Both install the wheels of the profile's lock into a new environment, from the same folder and with the same uv cache:
empty, as on the first installation after a download, and filled. uv's environment is made before its time begins;
envbuild's time includes making its own. The wheels are downloaded once, into a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uv
from machine import described, keep_bytecode, write
from options import positive, program

from envbuild.lock import lock_file
from envbuild.resolve import profile_reader_and_overrides

BUDGET = 1.3
Cost = tuple[float, float]
UV = uv.find_uv_bin()
OURS, COLD, ALONE, WHOLE, BOUND, OURS_UNPACKING, ALONE_UNPACKING = (
    "`envbuild install`",
    "`envbuild install`, first time after a change of the profile, the lock or envbuild",
    "`uv pip install`",
    "`uv venv` and `uv pip install`",
    "`uv venv`, `uv pip install`, and a Python program that only imports click",
    "`envbuild install`, uv's cache empty",
    "`uv pip install`, uv's cache empty",
)
UNPACKING = {OURS_UNPACKING, ALONE_UNPACKING}
UNPACKING_RUNS = 5  # at most: each fills a cache, for cpu with 0.8 GB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="cpu", help="default: cpu")
    parser.add_argument("--runs", type=positive, default=11, help="runs of each command; default: 11")
    arguments = parser.parse_args()
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="envbuild-install-") as name:
        times, files = measured(arguments.profile, arguments.runs, Path(name))
    loads.append(os.getloadavg()[0])
    alone = {name: [statistics.median(column) for column in zip(*times[name], strict=True)]
             for name in (ALONE, ALONE_UNPACKING)}  # fmt: skip
    rows = []
    for command, taken in times.items():
        wall, cpu = zip(*taken, strict=True)
        alone_wall, alone_cpu = alone[ALONE_UNPACKING if command in UNPACKING else ALONE]
        rows.append(
            f"| {command} | {statistics.median(wall):.2f} | {min(wall):.2f} | {max(wall):.2f} "
            f"| {statistics.median(wall) / alone_wall:.2f} | {statistics.median(cpu):.2f} "
            f"| {statistics.median(cpu) / alone_cpu:.2f} |"
        )
    empty = statistics.median(wall for wall, _ in times[OURS_UNPACKING]) / alone[ALONE_UNPACKING][0]
    filled = statistics.median(wall for wall, _ in times[OURS]) / alone[ALONE][0]
    write(
        "install_time",
        [
            f"# Installing the lock of {arguments.profile}",
            "",
            f"Machine: {described()}; load {loads[0]:.1f} before and {loads[1]:.1f} after. {arguments.runs} runs each "
            f"(at most {UNPACKING_RUNS} with uv's cache empty), in turn, with {uv_version()}. {files} files. "
            "Made by `python benchmarks/install_time.py`.",
            "",
            "| command | median s | min s | max s | over `uv pip install` | CPU s, median | over `uv pip install` |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            "All wheels are in the store, and none has changed since its hash was checked. If uv's cache "
            "is empty, uv checks and unpacks each wheel. Otherwise uv only links the unpacked files into the "
            "environment. Ratios compare commands with the same state of uv's cache. `uv pip install` gets an "
            "environment that exists; `envbuild install` makes its own, and also writes the constraints and the "
            "activation.",
            "",
            f"Goal: from a store that has the wheels, `envbuild install` takes at most {BUDGET} times the time of "
            f"`uv pip install`. Measured: {empty:.2f} with uv's cache empty ({verdict(empty)}), {filled:.2f} with uv's "
            f"cache filled ({verdict(filled)}).",
        ],
    )


def verdict(ratio: float) -> str:
    return "met" if ratio <= BUDGET else "missed"


def measured(profile: str, runs: int, folder: Path) -> tuple[dict[str, list[Cost]], int]:
    """Return the cost of each run by command, and the number of files in the environment."""
    os.environ.update({"XDG_CACHE_HOME": str(folder / "cache"), "UV_CACHE_DIR": str(folder / "uv")})
    keep_bytecode(folder / "compiled")
    plans = folder / "cache" / "envbuild" / "install-plans"
    ours = [sys.executable, "-m", "envbuild", "install", profile]
    cost([*ours, str(folder / "first")])  # downloads the wheels, and fills the caches
    links = next(file for file in (folder / "cache" / "envbuild" / "find-links").iterdir() if file.is_dir())
    lock = lock_file.required_lock(profile_reader_and_overrides.load(profile))
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{locked.wheel.hashed_pin()}\n" for locked in lock.wheels))
    own = [UV, "pip", "install", "--quiet", "--no-config", "--offline", "--no-index", "--no-deps",
           "--find-links", str(links), "--require-hashes", "-r", str(listed), "--python"]  # fmt: skip
    venv = [UV, "venv", "--quiet", "--no-project", "--no-config", "--offline", "--python", sys.executable]
    times: dict[str, list[Cost]] = {
        command: [] for command in (ALONE, OURS, WHOLE, BOUND, COLD, ALONE_UNPACKING, OURS_UNPACKING)
    }
    for number in range(runs):
        for command in list(times) if number % 2 else reversed(times):
            # always a new folder, and none is removed before the end: the removal would slow the next command down
            if command in UNPACKING and number >= UNPACKING_RUNS:
                continue
            target = str(folder / f"{number}-{list(times).index(command)}")
            if command == COLD:
                shutil.rmtree(plans)
            if command in UNPACKING:
                os.environ["UV_CACHE_DIR"] = f"{target}-uv"
            if command in (OURS, COLD, OURS_UNPACKING):
                parts = [cost([*ours, target])]
            else:
                parts = [cost([*venv, target]), cost([*own, target])]
            os.environ["UV_CACHE_DIR"] = str(folder / "uv")
            if command in (ALONE, ALONE_UNPACKING):
                parts = parts[1:]
            if command == BOUND:
                parts.append(cost([sys.executable, "-c", "import click"]))
            times[command].append((sum(wall for wall, _ in parts), sum(cpu for _, cpu in parts)))
            assert sum(1 for _ in Path(target).glob("lib/*/site-packages/*.dist-info")) == len(lock.wheels)
    return times, sum(len(names) for _, _, names in os.walk(folder / "first"))


def cost(argv: list[str]) -> Cost:
    """Return the seconds that a command takes, and its CPU seconds with those of its children."""
    os.sync()  # otherwise the command also waits for the writes of the one before it
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    taken, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def uv_version() -> str:
    return subprocess.run([UV, "--version"], check=True, capture_output=True, text=True).stdout.split(" (")[0].strip()


if __name__ == "__main__":
    program(main)
