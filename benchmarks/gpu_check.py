"""Run the self-test on a real GPU, without Docker and without envbuild's dependencies: torch is enough.

python benchmarks/gpu_check.py [--out FOLDER] [--runs NAME...]     default: benchmarks/results/gpu, every run

Each probe's result is written and flushed as it ends, so that a run that is cut short loses nothing before that. Files
per run: <gpu>-<run>.jsonl, one frame a line; a page <gpu>.md is written again after each run. What envbuild knows of
GPUs comes from gpu_expected.json: `--write-expected`, on a machine where envbuild is installed, makes it again.

Exit codes: 0 every run completed and nothing failed; 5 a probe failed, a run did not complete, or a value that must
repeat did not; 4 no GPU, or every probe was skipped.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
from options import program

ROOT = Path(__file__).parents[1]
EXPECTED = Path(__file__).with_name("gpu_expected.json")
# Name -> level, or the one probe to run. In the order of what is learned per second.
RUNS = {
    "quick-1": "quick",
    "quick-2": "quick",
    "standard-1": "standard",
    "fingerprint": "fingerprint",
    "standard-2": "standard",
    "full": "full",
}
BUDGET = {"quick": 10, "standard": 60}  # seconds
# The traits of a probe that are the same in every run on one GPU.
REPEATS = {"gemm.exact": ("sha256",), "train.step": ("weights", "losses")}
NO_GPU, FAILED = 4, 5

Frame = dict[str, Any]


@dataclass
class Run:
    """The frames of one run as far as it came. `problem`: why its output ended early, "" if it did not."""

    name: str
    frames: list[Frame] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""

    @property
    def outcomes(self) -> dict[str, Frame]:
        return {frame["probe"]: frame for frame in self.frames if frame["kind"] == "probe"}

    @property
    def failed(self) -> list[str]:
        return [probe for probe, frame in self.outcomes.items() if frame["status"] == "failed"]


def job(run: str, gpu: str | None) -> Frame:
    """The job document of a run, on the CPU where `gpu` is None."""
    level = RUNS[run]
    only = [level] if level not in ("quick", "standard", "full") else None
    known = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return {
        "version": 1,
        "nonce": secrets.token_hex(16),
        "level": "quick" if only else level,
        "device": "cuda" if gpu else "cpu",
        "probes": only,
        "expect": {"gpus": [gpu], **known} if gpu else {},
    }


SELFTEST = (sys.executable, "-m", "envbuild.selftest", "--job")


def execute(name: str, document: Frame, out: Path, selftest: Sequence[str] = SELFTEST) -> Run:
    """Start the self-test with the file of its job document; write each frame to `out` as it comes."""
    run = Run(name)
    file = out.with_suffix(".job.json")
    file.write_text(json.dumps(document), encoding="utf-8")
    begin = time.monotonic()
    command = [*selftest, str(file)]
    with out.open("w", encoding="utf-8") as log, subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            frame = parse(line, document["nonce"], len(run.frames))
            if frame is None:
                run.problem = run.problem or f"line {len(run.frames) + 1} of its output is not a valid frame"
                continue
            run.frames.append(frame)
            log.write(json.dumps(frame) + "\n")
            log.flush()
            if frame["kind"] == "probe":
                print(
                    f"{name}: {frame['probe']} {frame['status']} {frame['seconds']:.2f} s", file=sys.stderr, flush=True
                )
    file.unlink()
    run.seconds = time.monotonic() - begin
    if not run.frames or run.frames[-1]["kind"] != "end":
        run.problem = run.problem or f"it ended after {len(run.outcomes)} probes with exit status {process.returncode}"
    return run


def parse(line: bytes, nonce: str, sequence: int) -> Frame | None:
    """The document of a frame, None if it is damaged or belongs to another run."""
    parts = line.decode("utf-8", errors="replace").rstrip("\n").split(" ", 4)
    if len(parts) != 5 or parts[:3] != ["ENVBUILD", nonce, str(sequence)]:
        return None
    if f"{zlib.crc32(parts[4].encode()):08x}" != parts[3]:
        return None
    frame: Frame = json.loads(parts[4])
    return frame


def differences(runs: Iterable[Run]) -> list[str]:
    """The traits that must repeat and did not, over all runs that have them."""
    seen: dict[str, Any] = {}
    found = []
    for run in runs:
        for probe, traits in REPEATS.items():
            frame = run.outcomes.get(probe)
            for trait in traits if frame and frame["status"] == "passed" else ():
                name, value = f"{probe}: {trait}", frame["traits"].get(trait) if frame else None
                if seen.setdefault(name, value) != value:
                    found.append(f"{name} ({run.name})")
    return found


def code(runs: list[Run]) -> int:
    """The exit code."""
    statuses = [frame["status"] for run in runs for frame in run.outcomes.values()]
    if any(run.failed or run.problem for run in runs) or differences(runs):
        return FAILED
    return 0 if "passed" in statuses else NO_GPU


def page(gpu: str, about: Mapping[str, str], runs: list[Run]) -> Iterator[str]:
    """The page in Markdown."""
    start = next((frame for run in runs for frame in run.frames if frame["kind"] == "start"), {})
    yield from (f"# The self-test on {gpu}", "")
    yield f"Machine: {machine.described()}; {', '.join(f'{key} {value}' for key, value in about.items())};"
    yield f"torch {start.get('torch', 'unknown')}. Made by `make gpu-check`. Results, not evidence: no image ran."
    yield ""
    for run in runs:
        budget = BUDGET.get(RUNS[run.name])
        limit = f" (budget {budget} s)" if budget else ""
        yield f"- {run.name}: {run.seconds:.1f} s{limit}" + (f"; not complete: {run.problem}" if run.problem else "")
    counts = {status: sum(frame["status"] == status for run in runs for frame in run.outcomes.values())
              for status in ("passed", "failed", "skipped")}  # fmt: skip
    yield "- " + ", ".join(f"{count} {status}" for status, count in counts.items())
    yield f"- failed: {', '.join(f'{probe} ({run.name})' for run in runs for probe in run.failed) or 'none'}"
    yield f"- should repeat and did not: {', '.join(differences(runs)) or 'none'}"
    yield ""
    yield from table(runs)


def table(runs: list[Run]) -> Iterator[str]:
    yield (
        "| probe | " + " | ".join(f"{run.name}: s" for run in runs) + " | status | checks, largest error / tolerance |"
    )
    yield "|---" * (len(runs) + 3) + "|"
    for probe in dict.fromkeys(probe for run in runs for probe in run.outcomes):
        frames = [run.outcomes.get(probe) for run in runs]
        present = [frame for frame in frames if frame]
        seconds = " | ".join(f"{frame['seconds']:.2f}" if frame else "-" for frame in frames)
        status = ", ".join(dict.fromkeys(frame["status"] for frame in present))
        ratios = [float(figure["ratio"]) for frame in present for figure in frame["figures"]]
        reasons = [str(frame["reason"]) for frame in present if frame.get("reason")]
        detail = reasons[0] if reasons else f"{len(present[-1]['figures'])}, {max(ratios):.3g}" if ratios else "-"
        yield f"| {probe} | {seconds} | {status} | {detail.splitlines()[0].replace('|', '/')} |"


def gpu_here() -> tuple[str, dict[str, str]] | None:
    """The first GPU's name, and its driver and memory, as nvidia-smi prints them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=False).stdout
    except FileNotFoundError:
        return None
    rows = [[part.strip() for part in line.split(",")] for line in printed.splitlines() if line.count(",") == 2]
    return (rows[0][0], {"GPUs": str(len(rows)), "driver": rows[0][1], "memory": rows[0][2]}) if rows else None


def expected() -> Frame:
    """The part of the job document that comes from the facts, for every GPU in them."""
    from envbuild.plan import facts
    from envbuild.proof import hardware

    return hardware.known(facts.gpus().values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the self-test on this machine's GPU.")
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "gpu")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--cpu", action="store_true", help="run on the CPU: a trial of this program")
    parser.add_argument("--write-expected", action="store_true", help="write gpu_expected.json and end")
    given = parser.parse_args()
    if given.write_expected:
        EXPECTED.write_text(json.dumps(expected(), indent=1) + "\n", encoding="utf-8")
        return 0
    found = ("CPU", {}) if given.cpu else gpu_here()
    if found is None:
        print("no GPU: nvidia-smi lists none", file=sys.stderr)
        return NO_GPU
    gpu, about = found
    given.out.mkdir(parents=True, exist_ok=True)
    stem = gpu.lower().replace(" ", "-")
    runs: list[Run] = []
    for name in given.runs:
        document = job(name, None if given.cpu else gpu)
        runs.append(execute(name, document, given.out / f"{stem}-{name}.jsonl"))
        lines = list(page(gpu, about, runs))
        (given.out / f"{stem}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return code(runs)


if __name__ == "__main__":
    program(main)
