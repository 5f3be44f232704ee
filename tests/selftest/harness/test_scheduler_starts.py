"""CUDA is started for the next probes while one works, but not while one runs alone, or if no memory or processor is
free.

In the runs here the GPU has memory for one working probe and two that start, but not for two working probes."""

import dataclasses
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from envbuild.selftest.harness import probe_scheduler
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.project_test_spec_reader import ProjectTestSpec
from envbuild.selftest.nvidia.gpu_telemetry import Report, Window
from selftest import stubs
from selftest.harness.test_probe_scheduler import is_over, wait_for
from selftest.monitored import START
from selftest.reading import job, outcomes, run, start

WHOLE = {"compute_mode": 0, "free_mib": 80 << 10}
SMALL = {"STUB_TOTAL": "17"}  # GiB


def probe(name: str) -> Probe:
    """Return a probe with properties by the letters in its name: a, alone; u, untouched; s, a script."""
    needs = "script" if "s" in name else "cpu"
    return Probe(name, "quick", needs, 60, lambda context: None, untouched="u" in name, alone="a" in name)


@pytest.mark.parametrize(
    ("waiting", "ahead"),
    [
        ("1 2 3 4", "2 3"),
        ("1 u 3 4", "3 4"),
        ("1 a 3", "a"),
        ("a 2 3", ""),
        ("1 ua 3", ""),
        ("1 2 a 4", "2 a"),
        ("1 s", ""),
        ("1", ""),
    ],
)
def test_probes_that_start_in_advance(waiting: str, ahead: str) -> None:
    found = probe_scheduler.next_in_line([probe(name) for name in waiting.split()], 2)
    assert " ".join(one.name for one in found) == ahead


@pytest.mark.parametrize(("waiting", "ahead"), [("1 2 3 4 5", "3 4"), ("1 2 a 3", "a"), ("1 2", "")])
def test_probes_that_start_in_advance_while_two_run(waiting: str, ahead: str) -> None:
    found = probe_scheduler.next_in_line([probe(name) for name in waiting.split()], 2, running=["1", "2"])
    assert " ".join(one.name for one in found) == ahead


@pytest.mark.parametrize(
    ("changes", "numbers", "by_one", "by_two"),
    [
        ({}, [WHOLE], 2, 2),
        ({"level": "standard"}, [WHOLE], 2, 2),
        ({"level": "full"}, [WHOLE], 0, 0),
        ({"threads": 3}, [WHOLE], 2, 1),
        ({"threads": 2}, [WHOLE], 1, 0),
        ({"threads": 1}, [WHOLE], 0, 0),
        ({"own": ProjectTestSpec(shapes=({},))}, [WHOLE], 0, 0),
        ({"own": ProjectTestSpec(attentions=({},))}, [WHOLE], 0, 0),
        ({}, [{**WHOLE, "compute_mode": 3}], 0, 0),
        ({}, [{"free_mib": 80 << 10}], 0, 0),
        ({}, [{"compute_mode": 0}], 0, 0),
        ({}, [WHOLE, {**WHOLE, "free_mib": 9 << 10}], 0, 0),
        ({}, [WHOLE, {**WHOLE, "free_mib": 10 << 10}], 1, 0),
        ({}, [WHOLE, {**WHOLE, "free_mib": 19 << 10}], 2, 1),
        ({}, [WHOLE, {"free_mib": 80 << 10}], 0, 0),
        ({"level": "standard"}, [{**WHOLE, "free_mib": 15000}], 0, 0),
        ({}, [], 0, 0),
    ],
)
def test_how_many_start_ahead(
    changes: dict[str, object], numbers: list[dict[str, int]], by_one: int, by_two: int
) -> None:
    """`by_one`: while one probe runs; `by_two`: while two run."""
    job = dataclasses.replace(JobDocument(nonce="0" * 32, device="cuda", threads=16), **changes)  # type: ignore[arg-type]
    report = Report({str(index): Window.at(one) for index, one in enumerate(numbers)})
    assert probe_scheduler.start_ahead(job, report, working=1) == by_one
    assert probe_scheduler.start_ahead(job, report, working=2) == by_two


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, float]]:
    """The times of events in a run of probes that start CUDA and then work (monitored.py)."""
    folder = tmp_path_factory.mktemp("ahead")
    libraries = {**stubs.build(folder), **SMALL, "ENVBUILD_TEST_NOTES": str(folder / "notes")}
    names = [f"work{index}" for index in range(4)] + ["alone", "more0", "more1", "untouched", "last"]
    document = job(device="cuda", probes=names, threads=3)
    found = outcomes(run("monitored", document, folder / "frames", **libraries)[0])
    assert [frame["status"] for frame in found.values()] == ["passed"] * len(names), found
    lines = [line.rpartition(" ") for line in (folder / "notes").read_text().splitlines()]
    return [(what, float(moment)) for what, _, moment in lines]


@pytest.mark.slow
def test_probes_work_one_after_the_other_in_order(notes: list[tuple[str, float]]) -> None:
    worked = [what for what, _ in sorted(notes, key=lambda line: line[1]) if not what.startswith("start")]
    names = [f"work{index}" for index in range(4)] + ["alone", "more0", "more1", "untouched", "last"]
    assert worked == [f"{moment} {name}" for name in names for moment in ("begin", "end")]


def test_starts_overlap_with_work_and_with_each_other(notes: list[tuple[str, float]]) -> None:
    when = dict(line for line in notes if not line[0].startswith("start"))
    starts = [moment for what, moment in notes if what == "start"]
    assert len(starts) == 8
    assert sum(moment < when["begin work0"] for moment in starts) == 3  # the start of its own process, and of two ahead
    works = [(when[f"begin {name}"], when[f"end {name}"]) for name in ("work0", "work1", "more0", "more1")]
    assert any(moment < end and moment + START > begin for moment in starts for begin, end in works)


def test_nothing_starts_while_a_probe_runs_alone(notes: list[tuple[str, float]]) -> None:
    when = dict(line for line in notes if not line[0].startswith("start"))
    during = [
        (what, at) for what, at in notes if when["begin alone"] <= at <= when["end alone"] and "alone" not in what
    ]
    assert not during
    begun = sum(what == "start" and at < when["begin alone"] for what, at in notes)
    ended = sum(what == "started" and at < when["begin alone"] for what, at in notes)
    assert begun == ended == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interruption_leaves_none_that_was_started(tmp_path: Path, number: signal.Signals) -> None:
    libraries = {**stubs.build(tmp_path), **SMALL, "ENVBUILD_TEST_NOTES": str(tmp_path / "notes")}
    document = job(device="cuda", probes=[f"work{index}" for index in range(4)], threads=4)
    with start("monitored", document, tmp_path / "frames", **libraries) as process:
        wait_for(lambda: (tmp_path / "notes").exists() and "begin work0" in (tmp_path / "notes").read_text())
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(children) == 4  # the monitor, the probe and two that start ahead
        process.send_signal(number)
        process.communicate(timeout=10)
    for pid in children:
        wait_for(lambda pid=pid: is_over(pid))  # type: ignore[misc]
    assert "begin work1" not in (tmp_path / "notes").read_text()
