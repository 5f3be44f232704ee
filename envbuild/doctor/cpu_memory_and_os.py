"""Reads the CPU, memory and operating system of a machine, for evidence, benchmarks and `doctor`. Uses only the
standard library."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

UNKNOWN = "unknown CPU"


@dataclass(frozen=True)
class Machine:
    """The machine without its GPUs. `cores`: logical cores. `memory`: bytes, 0 where unknown. `system`: kernel,
    architecture and C library."""

    cpu: str
    cores: int
    memory: int
    system: str
    python: str

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.system}, Python {self.python}"


def read(root: Path = Path("/")) -> Machine:
    """Reads the machine. `root`: the folder that contains the machine's /proc."""
    cpu, memory = _field(root / "proc" / "cpuinfo", "model name"), _field(root / "proc" / "meminfo", "MemTotal")
    kib = memory.partition(" ")[0]
    return replace(unread(), cpu=cpu[:200] or UNKNOWN, memory=int(kib) * 1024 if kib.isdigit() else 0)


def unread() -> Machine:
    """Returns the values that Python knows without reading files in /proc."""
    return Machine(
        cpu=UNKNOWN,
        cores=os.cpu_count() or 0,
        memory=0,
        system=platform.platform(terse=True),
        python=platform.python_version(),
    )


def _field(file: Path, name: str) -> str:
    """Returns the first value of `name` in a file of `name: value` lines; "" if the file or the name is missing."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
