"""Measures how many independently written wrong kernels the self-test detects, and how long the self-test takes.

python benchmarks/kernel_score.py [--half known|unseen] [--level full] [--seed 1] [--again]

Writes benchmarks/results/wrong_kernels.md. Each verdict is written to wrong_kernels.json in the same folder as soon as
it is reached. So an interrupted run can be continued, and a run with a higher level judges only the kernels that were
not found; --again discards earlier verdicts. The kernels are in tests/wrong_kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from machine import RESULTS, described, write
from options import positive, program

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from wrong_kernels import KERNELS, WrongKernel
from wrong_kernels.score import LEVELS, Verdict, judge, lowest

from envbuild.selftest.harness.cpu_count import processors

HALVES = ("known", "unseen")
CLEAN = "clean"  # the runs without a wrong kernel, by level
KEPT = RESULTS / "wrong_kernels.json"

Verdicts = dict[str, Verdict]


def kernels(half: str) -> dict[str, WrongKernel]:
    """Return the kernels of one author."""
    importlib.import_module(f"wrong_kernels.{half}")
    return {name: kernel for name, kernel in KERNELS.items() if name.startswith(f"{half}/")}


def verdict(half: str, name: str, levels: Sequence[str], seed: int) -> Verdict:
    """Judge one kernel, in a worker process that has imported torch but called none of its functions."""
    importlib.import_module(f"wrong_kernels.{half}")
    return lowest(KERNELS[name], levels, seed)


def read_verdicts(again: bool) -> dict[str, Verdicts]:
    found = json.loads(KEPT.read_text()) if KEPT.exists() and not again else {}
    return {
        half: {name: Verdict(**result) for name, result in found.get(half, {}).items()} for half in (CLEAN, *HALVES)
    }


def untried(before: Verdict | None, levels: Sequence[str]) -> Sequence[str]:
    """Return the levels at which a kernel must still be judged: none if a level has detected it."""
    if before is None:
        return levels
    return () if before.level else levels[LEVELS.index(before.tried) + 1 :]


def write_verdicts(verdicts: Mapping[str, Verdicts]) -> None:
    plain = {half: {name: asdict(result) for name, result in sorted(found.items())} for half, found in verdicts.items()}
    partial = KEPT.with_suffix(".partial")
    partial.write_text(json.dumps(plain, indent=1) + "\n")
    partial.replace(KEPT)


def share(found: int, of: int) -> str:
    return f"{found} of {of} ({found / of:.0%})" if of else "-"


def table(half: str, chosen: Mapping[str, WrongKernel], verdicts: Verdicts, levels: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table with a row for each operation: how many of the kernels that a self-test can be
    expected to detect are detected at each level."""
    judged = {name: kernel for name, kernel in chosen.items() if name in verdicts}
    yield from ("", f"## {half.capitalize()}", "")
    heads = " | ".join(levels)
    yield f"| operation | kernels | {heads} | found beyond what can be asked |"
    yield "|---" * (len(levels) + 3) + "|"
    operations = sorted({kernel.operation for kernel in judged.values()})
    for operation in (*operations, None):
        some = [k for k in judged.values() if operation in (None, k.operation)]
        possible, beyond = [k for k in some if not k.beyond], [k for k in some if k.beyond]
        cells = [share(_found(possible, verdicts, levels[: at + 1]), len(possible)) for at in range(len(levels))]
        cells.append(share(_found(beyond, verdicts, levels), len(beyond)))
        yield f"| {operation or 'all'} | {len(some)} | {' | '.join(cells)} |"
    if half == "known":
        missed = sorted(name for name, k in judged.items() if not k.beyond and not verdicts[name].level)
        yield from ("", f"Not found: {', '.join(missed) or 'none'}.")


def _found(chosen: Sequence[WrongKernel], verdicts: Verdicts, levels: Sequence[str]) -> int:
    return sum(verdicts[kernel.name].level in levels for kernel in chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description="Wrong kernels that the self-test finds.")
    parser.add_argument("--half", action="append", choices=HALVES, help="default: both")
    parser.add_argument("--level", choices=LEVELS, default="full", help="the highest level to run; default: full")
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--again", action="store_true", help="discard earlier verdicts")
    options = parser.parse_args()
    levels = LEVELS[: LEVELS.index(options.level) + 1]
    verdicts = read_verdicts(options.again)
    chosen = {half: kernels(half) for half in HALVES}
    os.environ["GOMP_SPINCOUNT"] = "0"  # waiting threads must not use processor time that another worker needs
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processors(), context) as pool:
        clean = [level for level in reversed(levels) if level not in verdicts[CLEAN]]
        waiting = {pool.submit(judge, None, level, options.seed): (CLEAN, level) for level in clean}
        for half in options.half or HALVES:
            for name in chosen[half]:
                if left := untried(verdicts[half].get(name), levels):
                    waiting[pool.submit(verdict, half, name, left, options.seed)] = (half, name)
        for future in concurrent.futures.as_completed(waiting):
            result, (half, name) = future.result(), waiting[future]
            if half == CLEAN and result.reason:  # because of this false alarm, every kernel would count as detected
                pool.shutdown(wait=False, cancel_futures=True)
                alarm = f"{name}: {result.probe}, {result.reason}"
                print(f"error: the self-test fails without a wrong kernel; first fix {alarm}", file=sys.stderr)
                return 1
            verdicts[half][name] = result
            write_verdicts(verdicts)
            found = f"{result.level or 'not found'} {result.probe or ''}"
            print(f"{half} {name}: {found}, {result.seconds:.0f} s", file=sys.stderr, flush=True)
    seconds = [result.seconds for half in HALVES for result in verdicts[half].values() if result.level == "quick"]
    write(
        "wrong_kernels",
        [
            "# Wrong kernels that the self-test finds",
            "",
            f"Machine: {described()}. Made by `make wrong-kernels`, on the CPU: nothing of it has run on a GPU.",
            "",
            "Each kernel of tests/wrong_kernels takes the place of an operation, and the self-test runs with it, "
            f"seed {options.seed}. Their two authors saw neither the probes nor each other's kernels. "
            "The cases were developed with `known` at hand; `unseen` is the measure.",
            "",
            "- A run with nothing wrong: no failure at any of these levels; "
            + ", ".join(f"{level} {verdicts[CLEAN][level].seconds:.0f} s" for level in levels)
            + " (without the probes that check no results of operations).",
            f"- Until the first failure at quick: {statistics.median(seconds):.1f} s (median)." if seconds else "",
            "- Kernels of which the author said beforehand that a self-test of a minute cannot find them count in "
            "the last column only.",
            *(row for half in HALVES if verdicts[half] for row in table(half, chosen[half], verdicts[half], levels)),
        ],
    )
    return 0


if __name__ == "__main__":
    program(main)
