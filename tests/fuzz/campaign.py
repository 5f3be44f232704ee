"""The campaign: `make fuzz`. A complete campaign (all targets, 200000 inputs or more) writes
benchmarks/results/fuzz.md. The shortest input of each fault is printed on stderr."""

from __future__ import annotations

import argparse
import resource
import sys
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

from machine import described, write  # noqa: E402
from options import positive, program  # noqa: E402

from fuzz.runner import Run, campaign  # noqa: E402
from fuzz.target import DEADLINE, MEMORY, sandbox  # noqa: E402
from fuzz.targets import TARGETS  # noqa: E402

INPUTS = 200_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=positive, default=INPUTS, help="in all")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same inputs")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"all without any: {', '.join(TARGETS)}")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.targets) - set(TARGETS))
    if unknown:
        parser.error(f"unknown target {unknown[0]!r}")
    warnings.simplefilter("ignore")
    names = arguments.targets or list(TARGETS)
    begin, shares = time.time(), sum(TARGETS[one].share for one in names)
    runs = [_run(name, arguments.inputs, shares, arguments.seed) for name in names]
    if not arguments.targets and arguments.inputs >= INPUTS:  # a partial campaign is not a result
        write("fuzz", _report(runs, arguments.seed, time.time() - begin))
    return 1 if any(run.faults for run in runs) else 0


def _run(name: str, inputs: int, shares: int, seed: int) -> Run:
    target = TARGETS[name]
    with sandbox():
        run = campaign(target, -(-inputs * target.share // shares), seed)
    print(f"{name}: {run.tried} inputs, {run.accepted} accepted, {run.seconds:.0f} s", file=sys.stderr, flush=True)
    for fault in run.faults.values():
        print(f"  {fault.what} at {fault.where}, {fault.times} times: {fault.example[:2000]}", file=sys.stderr)
    return run


def _report(runs: list[Run], seed: int, took: float) -> list[str]:
    rows = [
        f"| {run.target.name} | {run.tried} | {run.accepted} | {run.seconds:.0f} | {run.slowest:.2f} "
        f"| {len(run.faults)} |"
        for run in runs
    ]
    faults = [
        f"- {run.target.name}: `{found.what}` at `{found.where}`" for run in runs for found in run.faults.values()
    ]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [
        "# Hostile inputs",
        "",
        f"Machine: {described()}. Made by `make fuzz`, seed {seed}: {sum(run.tried for run in runs)} inputs in "
        f"{took:.0f} s, one process of at most {most >> 10} MiB, on a machine that did other work too.",
        "",
        f"A fault is anything but an answer or an error of envbuild's own: a traceback, no answer in {DEADLINE:.0f} s,",
        f"more than {MEMORY >> 20} MiB, or a result that breaks what must hold of it: a Dockerfile or requirement file",
        "with anything in it that its lock does not say, evidence believed that nobody signed.",
        "",
        "| what is read | inputs | accepted | processor seconds | slowest, s | faults |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        *(faults or ["No fault is left."]),
    ]


if __name__ == "__main__":
    program(main)
