"""Measures the detection rate of the self-test: injects faults of a published model into the probes' operations, and
makes clean runs.

python benchmarks/injections.py [--injections 100000]     writes benchmarks/results/injections.md

There is one clean run for each setting that affects the order of summation; `make clean-runs` makes runs with many
seeds.

Results are written to a folder (--folder) as they are produced, so an interrupted campaign can be continued.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from fault_injection import records, report
from fault_injection.units import PROBES
from fault_injection.worker import CONTROL, LEVEL, clean_settings
from machine import described, write
from options import positive, program

HERE = Path(__file__).parent
FOLDER = HERE.parent / ".injections"
INJECTIONS = 100_000
CONTROLLED = 2000
# The relative number of injections, chosen so that no probe takes more than a tenth of the time. An injection takes 2
# ms (operations) to 1.2 s (train.step) of processor time, measured on an AMD EPYC. Probes that are not listed have 1.
WEIGHTS = {
    "train.step": 0.04,
    "gemm.accuracy": 0.05,
    "train.repeat": 0.1,
    "gemm.accumulator": 0.15,
    **dict.fromkeys(("optim.torch", "gemm.exact"), 0.2),
    "attention.math": 0.4,
    "gemm.crash": 0.6,
    "attention.flash": 0.8,
    **dict.fromkeys(("gemm.cases", "attention.cases", "norm.cases", "operations"), 1.5),
}
SILENCE = (
    1800.0  # a process without a result for so many seconds is ended; on a busy machine the first result takes minutes
)
_ended = threading.Event()  # is set when the campaign ends, fails or is interrupted
DEATHS = 100  # the campaign is given up after this many deaths of a probe's processes


def _limited(aten: str, onednn: str, mkl: str) -> dict[str, str]:
    """Return the variables that limit the instruction sets of torch, oneDNN and MKL."""
    return {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}


AVX_512 = "AVX-512 without extensions"
# The instruction sets that torch (ATen), oneDNN and MKL use. They determine the order of summation, and so the
# rounding.
CONFIGURATIONS: dict[str, dict[str, str]] = {
    "all": {},
    AVX_512: _limited("avx512", "AVX512_CORE", "AVX512"),
    "AVX2": _limited("avx2", "AVX2", "AVX2"),
    "SSE4": _limited("default", "SSE41", "SSE4_2"),
}


@dataclass(frozen=True)
class Work:
    """The work of one worker: `count` injections, or clean runs, of a probe, written to a file."""

    what: str
    name: str
    count: int
    file: Path
    configuration: str = ""

    def run(self) -> None:
        """Run workers until all injections are done. If an injection ends its process twice, this is recorded, and a
        new worker continues with the next injection."""
        begin, dead_at = time.time(), -1
        for _ in range(DEATHS):
            if records.Lines(self.file).open() >= self.count:
                print(f"{self.what} {self.file.stem}: {time.time() - begin:.0f} s", file=sys.stderr, flush=True)
                return
            status = self._worker(self.what)
            if status > 0:
                raise RuntimeError(f"{self.file.stem}: the worker ended with {status}")
            if status < 0:
                now = records.Lines(self.file).open()
                print(f"{self.what} {self.file.stem}: number {now} died of {-status}", file=sys.stderr, flush=True)
                if now == dead_at:  # the second death at the same injection: it was not an accident
                    if self.what == "clean":
                        raise RuntimeError(f"{self.file.stem}: clean run {now} died of signal {-status}")
                    self._worker("died")
                dead_at = now
        raise RuntimeError(f"{self.file.stem}: {DEATHS} workers died")

    def _worker(self, what: str) -> int:
        arguments = [what, self.name, str(self.count), str(self.file), self.configuration]
        return _run(arguments, self.file, CONFIGURATIONS.get(self.configuration, {}))


def main() -> int:
    parser = argparse.ArgumentParser(description="Detection rate and false alarms of the self-test.")
    parser.add_argument("--injections", type=positive, default=INJECTIONS, help="in all, at least")
    parser.add_argument("--processes", type=positive, default=2, help="at a time")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder for the results of each injection")
    arguments = parser.parse_args()
    seconds = _seconds(arguments.folder)
    with ThreadPoolExecutor(arguments.processes) as pool, _end_of_all():
        list(
            pool.map(
                Work.run,
                (*_injections(arguments.folder, arguments.injections), *_clean(arguments.folder)),
            )
        )
    campaign = report.Campaign(
        described(),
        str(torch.__version__),
        seconds,
        {probe: records.injections(arguments.folder, probe) for probe in PROBES},
        records.injections(arguments.folder, CONTROL),
        {probe: records.clean_runs(arguments.folder, probe) for probe in PROBES},
    )
    page = report.page(campaign)
    if arguments.injections >= INJECTIONS:  # only a complete campaign replaces the page
        write("injections", page)
    else:
        print("\n".join(page))
    return 1 if any(run.faults for runs in campaign.clean.values() for run in runs) else 0


@contextlib.contextmanager
def _end_of_all() -> Iterator[None]:
    """Stop all workers if one fails, or if the campaign is interrupted."""
    try:
        yield
    finally:
        _ended.set()


def _injections(folder: Path, count: int) -> Iterator[Work]:
    whole = sum(WEIGHTS.get(probe, 1.0) for probe in PROBES)
    for probe in PROBES:
        share = math.ceil(count * WEIGHTS.get(probe, 1.0) / whole)
        yield Work("injections", probe, share, folder / f"{probe}.jsonl")
    yield Work("injections", CONTROL, min(CONTROLLED, count), folder / f"{CONTROL}.jsonl")


def _clean(folder: Path) -> Iterator[Work]:
    for configuration in CONFIGURATIONS:
        if configuration == AVX_512 and torch.cpu.get_capabilities().get("avx512_f") is not True:
            continue  # MKL would use instructions that this processor lacks
        for probe in PROBES:
            file = folder / f"clean-{configuration.replace(' ', '_')}-{probe}.jsonl"
            yield Work("clean", probe, len(clean_settings(probe)), file, configuration)


def _run(arguments: Sequence[str], file: Path, variables: dict[str, str]) -> int:
    """Return the exit status of a worker, negative for a signal. A worker that writes nothing for too long is
    stopped."""
    where = {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent)))}
    process = subprocess.Popen(
        [sys.executable, "-m", "fault_injection.worker", *arguments], env={**os.environ, **where, **variables}
    )
    try:
        begin = time.time()
        while process.poll() is None:
            if _ended.wait(0.2):
                raise InterruptedError("the campaign is over")
            if time.time() - max(begin, file.stat().st_mtime) > SILENCE:
                process.kill()
        return process.wait()
    finally:
        process.kill()
        process.wait()


def _seconds(folder: Path) -> dict[str, float]:
    """Return how many seconds each probe takes in a run of the self-test. Measured once, then read from `folder`."""
    file = folder / "seconds.json"
    if not file.exists():
        argv = [sys.executable, "-m", "envbuild.selftest", "--json", "--level", LEVEL]
        done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=HERE.parent)
        found = {probe["probe"]: probe["seconds"] for probe in json.loads(done.stdout)["probes"]}
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found), encoding="utf-8")
    measured: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return measured


if __name__ == "__main__":
    program(main)
