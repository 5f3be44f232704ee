"""Probes work at the same time if the memory suffices, but none works while a probe that must run alone does; results
keep the catalogue's order."""

import dataclasses
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from envbuild.selftest.harness import host_memory, probe_scheduler
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.project_test_spec_reader import ProjectTestSpec
from envbuild.selftest.nvidia.gpu_telemetry import Report, Window
from selftest import stubs
from selftest.harness.test_probe_scheduler import is_over, wait_for
from selftest.harness.test_scheduler_starts import probe
from selftest.reading import Frame, job, outcomes, run, start

pytestmark = pytest.mark.slow

NAMES = [f"work{index}" for index in range(4)] + ["alone", "more0", "more1", "untouched", "last"]
PLENTY = 16 << 30  # bytes


def gpu(free_gib: int, **numbers: int) -> Window:
    return Window.at({"compute_mode": 0, "free_mib": free_gib << 10, **numbers})


@pytest.mark.parametrize(
    ("waiting", "companions"),
    [("1 2 3", "2 3"), ("1 u 3", "u 3"), ("1 2 a 4", "2"), ("a 2", ""), ("1 2 s", "2"), ("s 2", ""), ("1", "")],
)
def test_probes_that_may_run_at_the_same_time(waiting: str, companions: str) -> None:
    found = probe_scheduler.companions([probe(name) for name in waiting.split()])
    assert " ".join(one.name for one in found) == companions


@pytest.mark.parametrize(
    ("changes", "memory", "gpus", "together"),
    [
        ({}, PLENTY, (), 6),
        ({"level": "standard"}, PLENTY, (), 6),
        ({"level": "full"}, PLENTY, (), 1),
        ({"threads": 1}, PLENTY, (), 1),
        ({"threads": 2}, PLENTY, (), 2),
        ({"own": ProjectTestSpec(shapes=({},))}, PLENTY, (), 1),
        ({"own": ProjectTestSpec(attentions=({},))}, PLENTY, (), 1),
        ({}, 7 << 30, (), 3),
        ({}, 3 << 30, (), 1),
        ({}, 0, (), 1),
        ({"device": "cuda"}, PLENTY, (), 1),
        ({"device": "cuda"}, PLENTY, (gpu(80),), 6),
        ({"device": "cuda"}, PLENTY, (gpu(18),), 2),
        ({"device": "cuda"}, PLENTY, (gpu(17),), 1),
        ({"device": "cuda"}, PLENTY, (gpu(80), gpu(17)), 1),
        ({"device": "cuda"}, PLENTY, (gpu(80, compute_mode=3),), 1),
        ({"device": "cuda"}, 3 << 30, (gpu(80),), 1),
        ({"device": "cuda", "level": "standard"}, PLENTY, (gpu(80),), 5),
        ({"device": "cuda", "level": "standard"}, PLENTY, (gpu(30),), 2),
        ({"device": "cuda", "level": "standard"}, PLENTY, (gpu(24),), 1),
        ({"device": "cuda", "level": "full"}, PLENTY, (gpu(80),), 1),
    ],
)
def test_how_many_work_at_the_same_time(
    changes: dict[str, object], memory: int, gpus: tuple[Window, ...], together: int
) -> None:
    job = dataclasses.replace(JobDocument(nonce="0" * 32, threads=8, device="cpu"), **changes)  # type: ignore[arg-type]
    report = Report({str(index): window for index, window in enumerate(gpus)})
    assert probe_scheduler.run_together(job, memory, report) == together


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    5 kB\n", "max", 5 << 10),
        ("MemAvailable: 5 kB\n", "4096", 4096),
        ("MemAvailable: 5 kB\n", "8192", 5 << 10),
        ("MemTotal: 9 kB\n", "max", 0),
        (None, None, 0),
    ],
)
def test_memory_that_is_left(tmp_path: Path, meminfo: str | None, limit: str | None, expected: int) -> None:
    for name, text in (("meminfo", meminfo), ("limit", limit)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert host_memory.available_bytes(tmp_path / "meminfo", tmp_path / "limit") == expected


def worked(folder: Path, threads: int, device: str = "cpu") -> tuple[dict[str, Frame], dict[str, tuple[float, float]]]:
    """Return the frames of a run, and when each probe began and ended."""
    notes = folder / "notes"
    document = job(device=device, probes=NAMES, threads=threads)
    libraries = stubs.build(folder) if device == "cuda" else {}
    found = outcomes(run("monitored", document, folder / "frames", **libraries, ENVBUILD_TEST_NOTES=str(notes))[0])
    when = {
        what: float(moment) for what, _, moment in (line.rpartition(" ") for line in notes.read_text().splitlines())
    }
    return found, {name: (when[f"begin {name}"], when[f"end {name}"]) for name in NAMES}


def overlapping(when: dict[str, tuple[float, float]]) -> set[frozenset[str]]:
    return {
        frozenset((one, other))
        for one in NAMES
        for other in NAMES
        if one != other and when[one][0] < when[other][1] and when[other][0] < when[one][1]
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_work_at_the_same_time_and_results_keep_their_order(tmp_path: Path, device: str) -> None:
    found, when = worked(tmp_path, 2, device)
    assert list(found) == NAMES
    assert {frame["status"] for frame in found.values()} == {"passed"}
    pairs = overlapping(when)
    if device == "cpu":  # on a GPU the pairs depend on when CUDA has started
        assert frozenset(("work0", "work1")) in pairs and frozenset(("more0", "more1")) in pairs
    assert pairs
    assert not any("alone" in pair for pair in pairs)
    at_once = [sum(begin <= moment < end for begin, end in when.values()) for moment, _ in when.values()]
    assert max(at_once) == 2
    assert max(when[f"work{index}"][1] for index in range(4)) <= when["alone"][0]
    assert when["alone"][1] <= min(begin for begin, _ in (when["more0"], when["more1"]))


def test_one_thread_is_one_probe_at_a_time(tmp_path: Path) -> None:
    assert not overlapping(worked(tmp_path, threads=1)[1])


def test_both_have_what_the_driver_reports_while_they_work(tmp_path: Path) -> None:
    """A report of the driver is not added to a probe that ended before the report, or begins after it."""
    libraries = {**stubs.build(tmp_path), "STUB_NOW": str(tmp_path / "now"), "ENVBUILD_TEST_NOTES": str(tmp_path / "n")}
    names = ["ecc later", "work0", "alone", "more0", "untouched", "ecc later still"]  # in the catalogue's order
    found = outcomes(run("monitored", job(device="cuda", probes=names, threads=2), tmp_path / "frames", **libraries)[0])
    assert list(found) == names
    failed = {name for name, frame in found.items() if frame["status"] == "failed"}
    assert {"ecc later", "work0", "ecc later still"} <= failed
    assert not {"alone", "untouched"} & failed, "untouched ended while more0, the probe before it, still ran"
    assert "2 uncorrected memory errors during the probe" in found["work0"]["reason"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    notes = tmp_path / "notes"
    document = job(device="cpu", probes=["sleeps0", "sleeps1", "last"], threads=2)
    with start("monitored", document, tmp_path / "frames", ENVBUILD_TEST_NOTES=str(notes)) as process:
        wait_for(lambda: notes.exists() and notes.read_text().count("begin sleeps") == 2)
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(children) == 2
        process.send_signal(number)
        process.communicate(timeout=10)
    assert process.returncode == 128 + number
    for pid in children:
        wait_for(lambda pid=pid: is_over(pid))  # type: ignore[misc]
    assert "last" not in notes.read_text()


def test_a_death_and_a_hang_are_those_of_the_probe(tmp_path: Path) -> None:
    names = ["aborts", "sleeps0", "sleeps1", "last"]
    document = job(device="cpu", probes=names, threads=2, timeouts={"sleeps0": 0.5, "sleeps1": 1.5})
    found = outcomes(run("monitored", document, tmp_path / "frames", ENVBUILD_TEST_NOTES=str(tmp_path / "notes"))[0])
    assert [found[name]["failure"] for name in names] == ["signal", "hang", "hang", None]
    assert (found["aborts"]["signal"], found["aborts"]["at"]) == ("SIGABRT", "aborting")
    assert 0.5 < found["sleeps0"]["seconds"] < 1.5 < found["sleeps1"]["seconds"]
    assert "monitored.py" in found["sleeps0"]["detail"]


@pytest.mark.parametrize(
    ("level", "given", "limit"), [("quick", {}, 9), ("standard", {}, 9), ("full", {}, 45), ("full", {"slow": 7}, 7)]
)
def test_a_time_limit_is_longer_at_level_full_unless_the_job_gives_one(
    level: str, given: dict[str, float], limit: float
) -> None:
    slow = Probe("slow", "quick", "cpu", 9, lambda context: None)
    document = JobDocument(nonce="0" * 32, level=level, timeouts=given)
    assert probe_scheduler.time_limit(slow, document) == limit
