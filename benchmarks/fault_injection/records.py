"""Reads and writes the files of a campaign. A line for each injection or clean run is written when it ends; the lines
are read when a campaign is continued."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# The effect of an injection: no result changes by more than rounding may change it; some elements of a result do; all
# elements of a result do; or the probe ends with an error or a signal.
MASKED, PARTIAL, WHOLE, STOPPED = "masked", "can escape", "whole result", "stopped"
OUTCOMES = (MASKED, PARTIAL, WHOLE, STOPPED)

ROOT = Path(__file__).parents[2]
_SOURCES = (
    *("envbuild/selftest/**/*.py", "benchmarks/fault_injection/model.py", "benchmarks/fault_injection/injector.py"),
    *(f"benchmarks/fault_injection/{name}.py" for name in ("runner", "units", "worker")),
)


@dataclass(frozen=True)
class Record:
    """One injection: its place, the fault, and its effect (runner.Effect)."""

    unit: str
    operator: str
    dtype: str
    kind: str
    place: str
    bits: str
    outcome: str
    detected: bool
    changed: int
    count: int
    units: float  # see runner.Effect


@dataclass(frozen=True)
class CleanRun:
    """A run of all units of a probe without a fault. `faults`: what the probe reported nevertheless."""

    configuration: str
    level: str
    threads: int
    offset: int
    faults: tuple[str, ...]


class OtherSources(Exception):
    """The results in a file were made with different sources or a different torch."""


class Lines:
    """A file of records. Its first line identifies the sources with which they were made. An incomplete last line is
    ignored."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def open(self) -> int:
        """Prepare the file for more records, and return the number of its records. Raises OtherSources."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        whole = self.file.read_bytes() if self.file.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        header = {"sources": sources(), "torch": str(torch.__version__)}
        if not kept:
            kept = json.dumps(header).encode() + b"\n"
        elif json.loads(kept.split(b"\n", 1)[0]) != header:
            raise OtherSources(f"{self.file}: made with other sources or another torch; delete it to start again")
        if kept != whole:
            self.file.write_bytes(kept)
        return kept.count(b"\n") - 1

    def add(self, record: Record | CleanRun) -> None:
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(list(dataclasses.astuple(record))) + "\n")

    def read(self) -> Iterator[list[Any]]:
        if self.file.exists():
            for line in self.file.read_text(encoding="utf-8").splitlines(keepends=True)[1:]:
                if line.endswith("\n"):
                    yield json.loads(line)


def injections(folder: Path, name: str) -> list[Record]:
    return [Record(*line) for line in Lines(folder / f"{name}.jsonl").read()]


def clean_runs(folder: Path, name: str) -> list[CleanRun]:
    found = (Lines(file) for file in sorted(folder.glob(f"clean-*-{name}.jsonl")))
    return [
        CleanRun(configuration, level, threads, offset, tuple(faults))
        for lines in found
        for configuration, level, threads, offset, faults in lines.read()
    ]


def sources() -> str:
    """Return the sha256 of everything that determines the results: the self-test, the fault model and the injector."""
    whole = hashlib.sha256()
    for pattern in _SOURCES:
        for file in sorted(ROOT.glob(pattern)):
            whole.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return whole.hexdigest()
