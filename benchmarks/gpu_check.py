"""Runs a plan of steps on a GPU that is available for half an hour, without Docker. Most steps need only torch.

    python benchmarks/gpu_check.py [--block 1|2|3] [--steps NAME...] [--again] [--out FOLDER]
    python benchmarks/gpu_check.py --list
    python benchmarks/gpu_check.py --write-expected       on a machine with envbuild installed and its store of wheels

Each block ends within nine minutes, each step within its own limit. Results are written to FOLDER/<gpu>/ as they are
produced: block-1.jsonl to block-3.jsonl, fingerprint.json, clocks.csv, and page.md, which is rewritten after each step.
A step with a complete result runs again only with --again, or if the sources that its result depends on have changed.
A failed step does not end the plan.

On a remote machine, run one block for each call. Copy .gpu-wheels (`make gpu-wheels`) and .gpu-apex to it for block 3:
    python3 benchmarks/gpu_check.py --block 1 --out "$OUT"
Copy the files that come back to benchmarks/results/gpu before the next call, which continues with these results.

Exit codes: 0 no chosen step failed; 5 a chosen step failed or was interrupted; 4 no GPU, or every chosen step was
skipped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import machine
from gpu_plan import locked_files, steplog, summary
from gpu_plan.limits import adopt_orphans
from gpu_plan.plan import BLOCK_SECONDS, LEAST_SECONDS, Bench, Step, run_step, skip_step, sources
from gpu_plan.selftests import EXPECTED, ROOT, Frame
from gpu_plan.steplog import PASSED, SKIPPED, Result
from gpu_plan.steps import STEPS, nvidia_smi
from options import program

NO_GPU, FAILED = 4, 5


def first_gpu() -> str | None:
    """Return the first GPU's name as nvidia-smi prints it; None if there is no GPU."""
    printed = nvidia_smi("--query-gpu=name", "--format=csv,noheader") or ""
    return printed.partition("\n")[0].strip() or None


def run_plan(chosen: Sequence[Step], bench: Bench, again: bool, patience: float = 1) -> dict[str, Result]:
    """Run the chosen steps that have no complete result of the current sources; with `again`, run all chosen steps.
    Return the results of all steps that have ever been started or skipped.

    `patience`: a factor for all time limits, for a trial on a machine without a GPU, which is slower.
    """
    now = sources()
    block, end = 0, 0.0
    for step in chosen:
        if step.block != block:
            block, end = step.block, time.monotonic() + patience * BLOCK_SECONDS
        known = bench.log.results().get(step.name)
        if known and known.complete and known.sources == now and not again:
            print(f"{step.name}: already {known.verdict}; --again runs it again", file=sys.stderr, flush=True)
            continue
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            skip_step(step, bench, f"no time left in block {block}: --steps {step.name} runs it alone")
        else:
            run_step(step, bench, min(patience * step.limit, left))
        lines = summary.page(bench.gpu or "CPU", machine.described(), STEPS, bench.log.results(), now)
        steplog.replace(bench.folder / "page.md", "\n".join(lines).rstrip() + "\n")
    return bench.log.results()


def code(chosen: Sequence[Step], results: dict[str, Result]) -> int:
    """Return the exit code for the chosen steps."""
    verdicts = {results[step.name].verdict if step.name in results else SKIPPED for step in chosen}
    if steplog.FAILED in verdicts:
        return FAILED
    return 0 if PASSED in verdicts else NO_GPU


def folder_for(out: Path, gpu: str | None) -> Path:
    """Return the GPU's folder below `out`. A new folder is filled with the committed results of this GPU, so that one
    page can show blocks that ran on different days."""
    name = "-".join((gpu or "CPU").lower().split())
    folder, committed = out / name, machine.RESULTS / "gpu" / name
    if not folder.exists() and committed.exists():
        shutil.copytree(committed, folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def expected() -> Frame:
    """Return the part of the job document that comes from the facts, for every known GPU."""
    from envbuild.facts import database
    from envbuild.testrun import expected_hardware

    return expected_hardware.devices_by_name(database.gpus().values())


def write_expected() -> None:
    """Write the data that the plan needs on a machine without envbuild's dependencies: gpu_expected.json (from the
    facts) and gpu_locked_files.json (from the lock and the wheels in the store)."""
    import yaml

    from envbuild.util import user_folders

    EXPECTED.write_text(json.dumps(expected(), indent=1) + "\n", encoding="utf-8")
    lock = yaml.safe_load((ROOT / "profiles" / f"{locked_files.PROFILE}.lock.yaml").read_text(encoding="utf-8"))
    before = locked_files.read() if locked_files.FILE.exists() else {}
    made = locked_files.expected(lock, user_folders.cache_folder("wheels", make=False), before)
    locked_files.FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{len(made['wheels'])} wheels with libraries; not in the store: {', '.join(made['missing']) or 'none'}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a plan of steps on this machine's GPU.")
    parser.add_argument(
        "--block", type=int, choices=sorted({step.block for step in STEPS}), help="only the steps of this block"
    )
    parser.add_argument(
        "--steps", nargs="+", choices=[step.name for step in STEPS], metavar="NAME", help="only these steps"
    )
    parser.add_argument("--list", action="store_true", help="list the steps and end")
    parser.add_argument("--again", action="store_true", help="also run steps again that have a complete result")
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "gpu", help="default: benchmarks/results/gpu")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU: a trial of this program")
    parser.add_argument(
        "--patience", type=float, default=1, metavar="FACTOR", help="factor for all time limits, for a trial"
    )
    parser.add_argument(
        "--write-expected", action="store_true", help="write the data that the plan compares with, then exit"
    )
    given = parser.parse_args()
    if given.list:
        for step in STEPS:
            print(f"{step.block}  {step.name:<14} {step.limit:4.0f} s  {step.about}")
        return 0
    if given.write_expected:
        write_expected()
        return 0
    gpu = None if given.cpu else first_gpu()
    if gpu is None and not given.cpu:
        print("no GPU: nvidia-smi lists none", file=sys.stderr)
        return NO_GPU
    chosen = [step for step in STEPS if given.block in (None, step.block) and step.name in (given.steps or step.name)]
    if not chosen:
        parser.error("no step of --steps is in that block")
    adopt_orphans()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(gpu, folder_for(given.out, gpu), Path(scratch))
        results = run_plan(chosen, bench, given.again, given.patience)
    for step in chosen:
        if step.name in results:
            why = " ".join(results[step.name].reason.split())
            print(f"{results[step.name].verdict:<8} {step.name}" + (f": {why[:300]}" if why else ""))
    return code(chosen, results)


if __name__ == "__main__":
    program(main)
