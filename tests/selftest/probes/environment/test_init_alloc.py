"""init.alloc: equal shares of the free memory, and a GPU that its compute mode makes inaccessible."""

import math
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.environment import init_alloc
from selftest import stubs
from selftest.reading import Frame, job, outcomes, run

FREE = 64 << 20


def test_every_process_gets_the_same_share_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes share a GPU's memory, so a process that measures late must not count the memory that the other
    processes use."""
    card, empty = mmap.mmap(-1, 8), torch.empty
    card[:] = struct.pack("q", FREE)

    def share(device: str, count: int) -> int:
        time.sleep(0.05 * (os.getpid() % count))
        return int(struct.unpack("q", card[:])[0]) // count

    def holding(size: int, **options: Any) -> torch.Tensor:
        card[:] = struct.pack("q", struct.unpack("q", card[:])[0] - size)
        return empty(size, **options)

    monkeypatch.setattr(init_alloc, "_share", share)
    monkeypatch.setattr(torch, "empty", holding)
    endings = init_alloc.allocate_in_parallel("cpu", 4)
    assert [(ending.failure, ending.reported["held"]) for ending in endings] == [(None, FREE // 4)] * 4


def test_a_process_that_dies_early_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones

    def start(*args: Any, **options: Any) -> torch.Tensor:
        if os.getpid() % 2:
            os._exit(3)
        return ones(*args, **options)

    monkeypatch.setattr(torch, "ones", start)
    begin = time.monotonic()
    endings = init_alloc.allocate_in_parallel("cpu", 4)
    assert all((ending.failure is None) == ("off" in ending.reported) for ending in endings)
    assert time.monotonic() - begin < init_alloc.SECONDS / 4


@pytest.mark.parametrize(("errors", "worst"), [((0.0, 1.0, 100.0), 100.0), ((0.0, 2.0, None, 100.0), math.nan)])
def test_the_largest_error_of_the_processes_is_reported(
    monkeypatch: pytest.MonkeyPatch, errors: "tuple[float | None, ...]", worst: float
) -> None:
    """A process that reported nothing counts as NaN, which is the worst error."""
    endings = [forked_work.ForkEnding(reported={} if error is None else {"off": error}) for error in errors]
    monkeypatch.setattr(init_alloc, "allocate_in_parallel", lambda device, count: endings)
    context = Context(JobDocument("0" * 32))
    init_alloc.init_alloc(context)
    (figure,) = context.figures
    assert str(figure.error) == str(worst)
    assert f"wrong by {worst:g}" in context.faults[0].reason


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    folder: Path = tmp_path_factory.mktemp("alloc")
    names = ["exclusive", "taken", "prohibited", "held", "unanswered"]
    document = job(probes=[f"init.alloc:{name}" for name in names])
    found = outcomes(run("hardware", document, folder / "frames", **stubs.build(folder / "stubs"))[0])
    return {name.partition(":")[2]: frame for name, frame in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "mode", "words"),
    [
        (
            "taken",
            "EXCLUSIVE_PROCESS",
            "compute mode is EXCLUSIVE_PROCESS: nvidia-smi --compute-mode=DEFAULT",
        ),
        ("prohibited", "PROHIBITED", "the GPU's compute mode is PROHIBITED: nvidia-smi"),
        ("held", "DEFAULT", "its compute mode is DEFAULT: another process occupies the GPU"),
        ("unanswered", None, "NVML does not report its compute mode: another process"),
    ],
)
def test_an_inaccessible_gpu_is_not_a_bad_library(
    seeds: dict[str, Frame], seed: str, mode: "str | None", words: str
) -> None:
    frame = seeds[seed]
    assert (frame["status"], frame["failure"], frame["traits"]["compute_mode"]) == ("failed", "exception", mode)
    assert "1 of 1 processes failed at the first product: RuntimeError: CUDA error: CUDA-capable" in frame["reason"]
    assert words in frame["reason"] and "library" not in frame["reason"], frame["reason"]


def test_where_one_process_at_a_time_may_use_the_gpu_eight_are_not_asked_for(seeds: dict[str, Frame]) -> None:
    frame = seeds["exclusive"]
    assert frame["status"] == "passed", frame["reason"]
    assert [figure["case"] for figure in frame["figures"]] == ["1 process"]
    assert "EXCLUSIVE_PROCESS" in frame["traits"]["8 processes at once"]["left_out"]
