"""Runs the whole plan for half an hour on a GPU (benchmarks/gpu_check.py) on a simulated H100: `make pretend-plan`.

python tests/pretend/plan_trial.py [--real-sizes]      writes benchmarks/results/gpu_plan_pretended.md; exit 1 if
                                                       anything is wrong

It runs as on a remote GPU machine: three calls, one for each block, in a copy of the checkout's files. The files that a
call leaves in its folder are copied to benchmarks/results/gpu of this copy before the next call begins. A fourth call
then runs only the steps that were skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from gpu_plan.steplog import PASSED, SKIPPED, Result, StepLog  # noqa: E402
from gpu_plan.steps import STEPS  # noqa: E402
from machine import described, write  # noqa: E402
from options import program  # noqa: E402
from selftest import stubs  # noqa: E402

from pretend import ledger  # noqa: E402
from pretend.gpus import GPU, GPUS  # noqa: E402
from pretend.nvidia_smi import DRIVER  # noqa: E402
from pretend.sizes import SHORT  # noqa: E402

MODEL = "h100"
PATIENCE = 20  # factor: a step of seconds on a GPU takes minutes on a shared processor
MOST_FILES, LARGEST = 8, 16 << 20  # limits for the files that a call returns
BLOCKS = sorted({step.block for step in STEPS})
CARRIED = (".gpu-wheels", ".gpu-apex")  # if the checkout has them
# Step -> why it cannot run on a simulated GPU: the first words of the reason.
SKIPPED_HERE = {
    "sanitizer": "compute-sanitizer is not on PATH",
    "apex": "no source of apex in .gpu-apex",
    "commands": "no wheels in .gpu-wheels",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of gpu_check.py. `files`: the returned files, with their sizes; `left_out`: steps whose result was
    complete already."""

    status: int
    seconds: float
    files: Mapping[str, int]
    left_out: Sequence[str]
    stderr: str


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables that make gpu_check.py and all its programs see the simulated GPU. Stand-ins for
    the driver's libraries and nvidia-smi are created in the folder. Skips the test without gcc."""
    gpu = GPUS[MODEL]
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    tests, python = shlex.quote(str(ROOT / "tests")), shlex.quote(sys.executable)
    smi.write_text(f'#!/bin/sh\nPYTHONPATH={tests} exec {python} -S -m pretend.nvidia_smi "$@"\n')
    smi.chmod(0o755)
    (folder / "ledger").mkdir()
    return {
        **stubs.build(folder / "driver", release=DRIVER),
        "STUB_CUDA": "13000",
        "STUB_DRIVER": DRIVER,
        "STUB_CARDS": f"name={gpu.name},total={gpu.memory >> 30}",
        "PATH": f"{smi.parent}{os.pathsep}{os.environ['PATH']}",
        "GPU_CHECK_FIRST": "pretend.first:begin",
        GPU: MODEL,
        ledger.FOLDER: str(folder / "ledger"),
    }


def call(checkout: Path, out: Path, given: Mapping[str, str], *options: str) -> Call:
    """Run gpu_check.py of this checkout, with the results below `out`."""
    command = [sys.executable, "benchmarks/gpu_check.py", "--out", str(out), "--patience", str(PATIENCE), *options]
    begin = time.monotonic()
    done = subprocess.run(
        command, cwd=checkout, env={**os.environ, **given}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True, check=False,
    )  # fmt: skip
    files = {str(file.relative_to(out)): file.stat().st_size for file in out.rglob("*") if file.is_file()}
    lines = [line for line in done.stderr.splitlines() if ": already " in line]
    left_out = [line.partition(": already ")[0] for line in lines]
    return Call(done.returncode, time.monotonic() - begin, files, left_out, done.stderr)


def copy_checkout(folder: Path) -> Path:
    """Copy what is carried to such a machine: tracked files, files that git does not ignore, and CARRIED."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name in CARRIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
    return folder


def problems(calls: Sequence[Call], results: Mapping[str, Result]) -> Iterator[str]:
    """Return what is wrong with these calls. The last call must have run only the steps that were skipped before."""
    for number, one in enumerate(calls, start=1):
        if number in BLOCKS and one.status != 0:
            yield f"call {number} ended with exit status {one.status}: {one.stderr[-2000:]}"
        if len(one.files) > MOST_FILES:
            yield f"call {number} leaves {len(one.files)} files, of which {MOST_FILES} come back"
        yield from (f"call {number}: {name} has {size} bytes" for name, size in one.files.items() if size > LARGEST)
    for step in STEPS:
        result = results.get(step.name, Result(step.name, reason="never begun"))
        expected = SKIPPED_HERE.get(step.name)
        if result.verdict != PASSED and not (
            result.verdict == SKIPPED and expected and result.reason.startswith(expected)
        ):
            yield f"{step.name} {result.verdict}: {result.reason}"
    complete = {name for name, result in results.items() if result.verdict != SKIPPED}
    if set(calls[-1].left_out) != complete:
        yield f"the last call ran again: {', '.join(sorted(complete - set(calls[-1].left_out)))}"


def rows(results: Mapping[str, Result]) -> Iterator[str]:
    for step in STEPS:
        result = results.get(step.name, Result(step.name, reason="never begun"))
        reason = " ".join(result.reason.split()).replace("|", "/")
        yield f"| {step.block} | {step.name} | {result.verdict} | {result.seconds:.0f} | {reason} |"


def rows_of_calls(calls: Sequence[Call]) -> Iterator[str]:
    for number, one in enumerate(calls, start=1):
        largest = max(one.files.values(), default=0) / 2**20
        yield f"| {number} | {one.seconds:.0f} | {len(one.files)} | {largest:.1f} MiB | {len(one.left_out)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="The plan for half an hour on a GPU, whole, on a simulated one.")
    parser.add_argument("--real-sizes", action="store_true", help="the probes' real sizes, not small ones")
    real = parser.parse_args().real_sizes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given, checkout = variables(folder), copy_checkout(folder / "checkout")
        given.update({} if real else {SHORT: "1"})
        committed, calls = checkout / "benchmarks" / "results" / "gpu", []
        for options in (*(["--block", str(block)] for block in BLOCKS), []):
            out = folder / f"out-{len(calls)}"
            out.mkdir()
            calls.append(call(checkout, out, given, *options))
            print(calls[-1].stderr, file=sys.stderr, flush=True)
            shutil.copytree(out, committed, dirs_exist_ok=True)
        results = StepLog(committed / "-".join(GPUS[MODEL].name.lower().split())).results()
    wrong = list(problems(calls, results))
    counts = [sum(result.verdict == verdict for result in results.values()) for verdict in (PASSED, SKIPPED)]
    write(
        "gpu_plan_pretended",
        [
            f"# The plan for half an hour on a GPU, on a simulated {GPUS[MODEL].name}",
            "",
            f"Machine: {described()}. Made by `make pretend-plan`, on the CPU: nothing of it has run on a GPU.",
            "",
            f"- Steps: {counts[0]} passed, {counts[1]} skipped, of {len(STEPS)}.",
            f"- Sizes of the probes: {'real' if real else 'small'}.",
            f"- Time: {sum(one.seconds for one in calls) / 60:.0f} min; all time limits are multiplied by {PATIENCE}.",
            *(f"- WRONG: {text.splitlines()[0]}" for text in wrong),
            "",
            "| block | step | verdict | s | reason |",
            "|---|---|---|---|---|",
            *rows(results),
            "",
            "Each block is a separate call, as on a remote GPU machine, which returns at most "
            f"{MOST_FILES} files of {LARGEST >> 20} MiB each. The last call runs only the steps that were skipped: the "
            "others are complete.",
            "",
            "| call | s | files | largest | steps already complete |",
            "|---|---|---|---|---|",
            *rows_of_calls(calls),
        ],
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    program(main)
