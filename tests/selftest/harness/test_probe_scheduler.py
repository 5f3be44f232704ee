"""Each way in which a probe's process can end has its own failure name; the run continues after each."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from selftest.reading import Frame, job, outcomes, read, run, run_new_python, start

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with a function `divide`: a division by zero raises SIGFPE, as in cuBLAS's heuristic."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("library")
    source, built = folder / "divide.c", folder / "libdivide.so"
    source.write_text("int divide(int a, int b) { return a / b; }\n")
    subprocess.run([compiler, "-O0", "-shared", "-fPIC", "-o", built, source], check=True)
    return built


@pytest.fixture(scope="module")
def faults(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    """Run every fault once, and return probe -> its result, and "run" -> exit status, stderr and all frames."""
    path = tmp_path_factory.mktemp("faults") / "frames"
    document = job(threads=2, timeouts={"hang": 0.7})
    frames, status, err = run("faults", document, path, ENVBUILD_TEST_LIBRARY=str(library))
    return {**outcomes(frames), "run": {"status": status, "stderr": err, "frames": frames}}


def expect(frame: Frame, failure: str, **fields: object) -> None:
    assert (frame["status"], frame["failure"]) == ("failed", failure), frame
    for name, value in fields.items():
        assert frame[name] == value, (name, frame)


@pytest.mark.slow
def test_a_good_probe_passes_with_its_figure_and_the_jobs_threads(faults: dict[str, Frame]) -> None:
    frame = faults["good"]
    assert (frame["status"], frame["failure"], frame["at"], frame["detail"]) == ("passed", None, None, None)
    assert frame["traits"] == {"threads": 2}
    (figure,) = frame["figures"]
    assert figure.pop("seconds") > 0
    assert figure == {
        "case": "sum",
        "dtype": "float32",
        "shape": [512, 512],
        "error": 0.0,
        "bound": 1.0,
        "ratio": 0.0,
        "beyond_rounding": 0.0,
        "checks": 1,
    }


def test_the_run_goes_on_and_counts(faults: dict[str, Frame]) -> None:
    frames = faults["run"]["frames"]
    states = [frame["status"] for frame in frames if frame["kind"] == "probe"]
    end = frames[-1]
    assert [end["passed"], end["failed"], end["skipped"]] == [
        states.count(status) for status in ("passed", "failed", "skipped")
    ]
    assert faults["run"]["status"] == 5


def test_a_division_by_zero_in_a_library_is_sigfpe_at_its_step(faults: dict[str, Frame]) -> None:
    expect(faults["fpe"], "signal", signal="SIGFPE", at="linear bf16 2x1024x18432 bias", reason="died of SIGFPE")
    assert "Floating point exception" in faults["fpe"]["detail"]


def test_a_bad_pointer_is_sigsegv_with_the_stack_and_the_last_step(faults: dict[str, Frame]) -> None:
    expect(faults["segv"], "signal", signal="SIGSEGV", at="step two")
    assert "Segmentation fault" in faults["segv"]["detail"] and "in segv" in faults["segv"]["detail"]


def test_a_hang_is_dumped_and_ended(faults: dict[str, Frame]) -> None:
    expect(faults["hang"], "hang", at="waiting", reason="no end after 0.7 s", signal=None)
    assert "sleeping_in_a_named_function" in faults["hang"]["detail"]
    assert 0.7 < faults["hang"]["seconds"] < 2


def test_a_hang_that_holds_the_interpreter_is_dumped_and_ended(faults: dict[str, Frame]) -> None:
    expect(faults["hang-in-c"], "hang")
    assert "hang_in_c" in faults["hang-in-c"]["detail"]


def test_a_hang_that_ignores_sigabrt_is_killed(faults: dict[str, Frame]) -> None:
    expect(faults["hang-stubborn"], "hang")
    assert 1.0 < faults["hang-stubborn"]["seconds"] < 3


def test_a_process_that_cannot_be_reaped_is_left_behind(faults: dict[str, Frame]) -> None:
    if faults["wedged"]["status"] == "skipped":
        pytest.skip(faults["wedged"]["reason"])
    expect(faults["wedged"], "wedged")
    assert faults["wedged"]["seconds"] < 4


def test_killed_from_outside_is_memory_or_a_limit(faults: dict[str, Frame]) -> None:
    expect(faults["killed"], "oom", signal="SIGKILL", at="allocating", reason="killed: out of memory or a limit")


def test_memory_refused_is_named(faults: dict[str, Frame]) -> None:
    expect(faults["memory"], "oom", signal=None)


def test_an_exception_has_its_first_line_and_its_traceback(faults: dict[str, Frame]) -> None:
    reason = "RuntimeError: CUDA error: an illegal memory access was encountered"
    expect(faults["exception"], "exception", reason=reason, at="doing")
    assert "Traceback" in faults["exception"]["detail"] and "second line" in faults["exception"]["detail"]


def test_a_probe_names_its_own_failure(faults: dict[str, Frame]) -> None:
    expect(faults["reported-failure"], "mismatch", reason="one is two")


def test_the_first_fault_names_the_failure_and_the_others_are_reported(faults: dict[str, Frame]) -> None:
    expect(faults["later-cases"], "bound", at="first", reason="first is off (and 1 more)")
    assert "second is NaN" in faults["later-cases"]["detail"]


def test_a_fault_is_not_undone_by_a_later_skip(faults: dict[str, Frame]) -> None:
    expect(faults["fault-then-skip"], "bound", at="first", reason="first is off")
    assert "the second cannot be tried" in faults["fault-then-skip"]["detail"]


@pytest.mark.parametrize("name", ["silent", "cut", "corrupt", "doubled"])
def test_status_zero_without_a_whole_result_does_not_pass(faults: dict[str, Frame], name: str) -> None:
    expect(faults[name], "incomplete", figures=[])


def test_an_exit_status_alone_does_not_pass(faults: dict[str, Frame]) -> None:
    expect(faults["exit-three"], "exit", reason="exited with status 3")
    expect(faults["sys-exit"], "exit", reason="the probe called exit(0)")


def test_a_megabyte_of_noise_neither_blocks_nor_is_all_kept(faults: dict[str, Frame]) -> None:
    assert faults["noise"]["status"] == "passed"
    assert 1 << 16 <= faults["run"]["stderr"].count(b"x") < 1 << 18


def test_only_the_end_of_a_stream_is_kept() -> None:
    from envbuild.selftest.harness.probe_supervisor import KEPT, OutputTail

    tail = OutputTail(passed_on=False)
    for _ in range(4):
        tail.feed(b"x" * KEPT)
    tail.feed(b"the end")
    assert len(tail.text()) == KEPT and tail.text().endswith("xthe end")


def test_forged_frames_do_not_reach_the_frames(faults: dict[str, Frame]) -> None:
    expect(faults["forged"], "exception", reason="RuntimeError: the forger has run")
    assert b"ENVBUILD" in faults["run"]["stderr"]


def test_a_process_left_running_is_ended(faults: dict[str, Frame]) -> None:
    assert faults["orphan"]["status"] == "passed" and faults["orphan"]["seconds"] < 5
    assert is_over(faults["orphan"]["traits"]["orphan"])


def test_figures_that_are_not_finite_stay_strict_json(faults: dict[str, Frame]) -> None:
    nan, inf = faults["nan-figure"]["figures"]
    assert (nan["error"], nan["ratio"]) == ("nan", "nan")
    assert (inf["error"], inf["ratio"]) == ("inf", "inf")


def test_skipped_has_its_reason(faults: dict[str, Frame]) -> None:
    assert (faults["skip"]["status"], faults["skip"]["reason"]) == ("skipped", "no reason but this")
    assert (faults["needs-gpu"]["status"], faults["needs-gpu"]["reason"]) == ("skipped", "needs a GPU")


def test_a_probe_cannot_read_what_the_harness_is_given(faults: dict[str, Frame]) -> None:
    assert faults["stdin"]["status"] == "passed"


def test_a_detail_is_bounded(faults: dict[str, Frame]) -> None:
    details = [frame["detail"] for name, frame in faults.items() if name != "run" and frame["detail"]]
    assert all(len(detail.encode()) <= 8192 for detail in details)


@pytest.mark.slow
def test_a_deeper_probe_runs_only_where_its_level_or_its_name_is_asked(
    tmp_path: Path, faults: dict[str, Frame]
) -> None:
    assert "deep" not in faults
    required, _, _ = run("faults", job(probes=["good", "deep"], level="quick"), tmp_path / "frames")
    assert list(outcomes(required)) == ["good", "deep"]


@pytest.mark.slow
def test_a_memory_cap_holds_for_the_probe(tmp_path: Path) -> None:
    document = job(probes=["good", "gigabyte"], memory_mb=512)
    frames, _, _ = run("limits", document, tmp_path / "frames")
    results = outcomes(frames)
    assert results["good"]["status"] == "passed"
    expect(results["gigabyte"], "oom")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_ends_the_probe_too(tmp_path: Path, number: signal.Signals) -> None:
    note = tmp_path / "pid"
    document = job(probes=["interruptible"])
    with start("faults", document, tmp_path / "frames", ENVBUILD_TEST_PID=str(note)) as process:
        wait_for(lambda: note.exists() and note.read_text() != "")
        process.send_signal(number)
        process.communicate(timeout=10)
    assert process.returncode == 128 + number
    wait_for(lambda: is_over(int(note.read_text())))
    with pytest.raises(AssertionError):
        read((tmp_path / "frames").read_bytes())  # no end frame: never taken for a finished run


@pytest.mark.slow
def test_the_parent_calls_nothing_of_torch(tmp_path: Path) -> None:
    assert parents_calls("faults", "good", tmp_path) == {"calls": [], "threads": 1}


@pytest.mark.slow
def test_a_parent_that_calls_torch_would_be_seen(tmp_path: Path) -> None:
    calls = parents_calls("limits", "touching", tmp_path)["calls"]
    assert "is_available" in calls and any(call.endswith("zeros") for call in calls)


def parents_calls(module: str, probe: str, folder: Path) -> Frame:
    err = run_new_python(module, job(probes=[probe]), folder / "frames", ENVBUILD_TEST_PROFILE="1")
    found: Frame = json.loads(err.decode().splitlines()[-1])
    return found


def is_over(pid: int) -> bool:
    """True for a process that is gone or a zombie that its new parent has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
