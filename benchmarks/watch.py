"""Measures the seconds, the peak memory and the bytes written to the disk while a function runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_SAMPLE_SECONDS = 0.2
_SECTOR = 512

T = TypeVar("T")


@dataclass(frozen=True)
class Taken:
    """`memory`: the peak of anonymous memory of the watched processes and their descendants, in bytes, sampled every
    0.2 s. `written`: bytes that any process wrote to the disk, including the data flushed at the end."""

    seconds: float
    memory: int
    written: int


def taken(work: Callable[[], T], roots: Iterable[int], device: Path) -> tuple[T, Taken]:
    """Measure `work`. `roots`: processes that are watched with all their descendants, in addition to the processes that
    `work` starts. This process and its earlier children are not watched. `device`: a path on the disk."""
    peak, ended = [0], threading.Event()
    watched, earlier = set(roots), set(_processes())

    def sample() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            found = _processes()
            own = {pid for pid, one in found.items() if one.parent == os.getpid() and pid not in earlier}
            peak[0] = max(peak[0], _anonymous(found, watched | own))

    os.sync()
    before, begin = _written(device), time.perf_counter()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        value = work()
        seconds = time.perf_counter() - begin
    finally:
        ended.set()
        thread.join()
    os.sync()
    return value, Taken(seconds, peak[0], _written(device) - before)


@dataclass(frozen=True)
class _Process:
    """`held`: bytes of anonymous memory."""

    parent: int
    held: int


def _processes() -> dict[int, _Process]:
    """Return all processes of the machine, by id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "status").read_text(encoding="utf-8")
            except OSError:
                continue  # the process has ended in the meantime
            rows = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            held = int(rows.get("RssAnon", "0 kB").split()[0]) * 1024
            found[int(folder.name)] = _Process(int(rows["PPid"]), held)
    return found


def _anonymous(found: dict[int, _Process], roots: set[int]) -> int:
    return sum(one.held for pid, one in found.items() if _below(pid, roots, found))


def _below(pid: int, roots: set[int], found: dict[int, _Process]) -> bool:
    while pid in found:
        if pid in roots:
            return True
        pid = found[pid].parent
    return False


def _written(path: Path) -> int:
    """Return the bytes written to the disk under `path` since the machine started; 0 if `path` is not on a block
    device."""
    device = path.stat().st_dev
    file = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return int(file.read_text(encoding="utf-8").split()[6]) * _SECTOR if file.is_file() else 0
