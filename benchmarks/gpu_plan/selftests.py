"""Runs the self-test: makes its job documents, and reads its frames as they arrive."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
EXPECTED = ROOT / "benchmarks" / "gpu_expected.json"
# Results of a probe that must be the same in every run on one GPU, by name of the trait.
REPEATS = {"gemm.exact": ("sha256",), "train.step": ("weights", "losses")}
INPUTS_VARIABLE = (
    "GPU_CHECK_INPUTS"  # the variable of shifted_inputs.py that selects the inputs; 0: the probes' usual inputs
)
_STDERR_KEPT = 1500  # the number of characters from the end of stderr that are kept if a run did not complete

Frame = dict[str, Any]


@dataclass
class Run:
    """The frames of a run that have arrived. `problem`: why its output ended early; "" if it is complete."""

    name: str
    frames: list[Frame] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""

    @property
    def outcomes(self) -> dict[str, Frame]:
        return {frame["probe"]: frame for frame in self.frames if frame["kind"] == "probe"}

    def with_status(self, status: str) -> list[str]:
        return [probe for probe, frame in self.outcomes.items() if frame["status"] == status]


class Order(NamedTuple):
    """A run to start. Its command prints the frames for a job document with this nonce to stdout."""

    name: str
    command: Sequence[str]
    nonce: str
    environment: Mapping[str, str]


def job(gpu: str | None, **fields: Any) -> Frame:
    """Return the job document of a run on the GPU with this name; None: on the CPU. `fields`: its other keys."""
    expect = {"gpus": [gpu], **json.loads(EXPECTED.read_text(encoding="utf-8"))} if gpu else {}
    device = "cuda" if gpu else "cpu"
    return {"version": 1, "nonce": secrets.token_hex(16), "device": device, "expect": expect, **fields}


def program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module which uses the GPU. For a simulated GPU, launch.py comes first."""
    return [sys.executable, "-m", "gpu_plan.launch", module, *arguments]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's variables, overridden by `extra`, with the checkout's packages importable. OpenMP's threads
    do not spin while they wait, as in the self-test itself."""
    ours = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]
    given = dict(extra or {})
    before = [path for path in (given.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")) if path]
    path = os.pathsep.join([*before, *ours])
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **given, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def start(order: Order, stderr: Path) -> subprocess.Popen[bytes]:
    with stderr.open("wb") as errors:
        return subprocess.Popen(
            order.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            env=environment(order.environment),
        )  # fmt: skip


def follow(orders: Sequence[Order], scratch: Path, on_frame: Callable[[str, Frame], None]) -> list[Run]:
    """Start these runs at the same time and wait for all. `on_frame` receives the name of the run and each frame as it
    arrives."""
    runs = [Run(order.name) for order in orders]
    begin = time.monotonic()
    errors = [scratch / f"{order.name}.stderr" for order in orders]
    processes = [start(order, file) for order, file in zip(orders, errors, strict=True)]
    pending = [b""] * len(orders)
    with selectors.DefaultSelector() as selector:
        for index, process in enumerate(processes):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, index)
        while selector.get_map():
            for key, _ in selector.select():
                index = key.data
                data = os.read(key.fd, 1 << 16)
                *lines, pending[index] = (pending[index] + data).split(b"\n")
                if not data:
                    selector.unregister(key.fileobj)
                    lines, runs[index].seconds = [pending[index]] if pending[index] else [], time.monotonic() - begin
                for line in lines:
                    _take(line, orders[index], runs[index], on_frame)
    for run, process, file in zip(runs, processes, errors, strict=True):
        status = process.wait()
        if not run.frames or run.frames[-1]["kind"] != "end":
            stderr = file.read_text(encoding="utf-8", errors="replace").strip()[-_STDERR_KEPT:]
            ended = f"it ended after {len(run.outcomes)} probes with exit status {status}"
            run.problem = (run.problem or ended) + (f"; its stderr ends: {stderr}" if stderr else "")
    return runs


def _take(line: bytes, order: Order, run: Run, on_frame: Callable[[str, Frame], None]) -> None:
    frame = parse(line, order.nonce, len(run.frames))
    if frame is None:
        run.problem = run.problem or f"line {len(run.frames) + 1} of its output is not a valid frame"
    else:
        run.frames.append(frame)
        on_frame(run.name, frame)


def parse(line: bytes, nonce: str, sequence: int) -> Frame | None:
    """Return the document of a frame; None if it is damaged or belongs to a different run."""
    parts = line.decode("utf-8", errors="replace").rstrip("\n").split(" ", 4)
    if len(parts) != 5 or parts[:3] != ["ENVBUILD", nonce, str(sequence)]:
        return None
    if f"{zlib.crc32(parts[4].encode()):08x}" != parts[3]:
        return None
    frame: Frame = json.loads(parts[4])
    return frame


def differences(runs: Iterable[Run]) -> list[str]:
    """Return the traits that should be equal in all runs but were not."""
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
