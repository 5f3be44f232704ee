"""hw.health with an NVML that reports faults, or does not answer."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from selftest import hardware, stubs
from selftest.reading import Frame, job, outcomes, run

CASES = [name for name in hardware.CASES if name.startswith("hw.health:")]


def run_cases(folder: Path, libraries: dict[str, str], *probes: str) -> dict[str, Frame]:
    frames, _, _ = run("hardware", job(device="cuda", probes=list(probes)), folder / "frames", **libraries)
    return {name.partition(":")[2]: frame for name, frame in outcomes(frames).items()}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    folder = tmp_path_factory.mktemp("health")
    return run_cases(folder, stubs.build(folder), *CASES)


@pytest.mark.slow
def test_a_healthy_gpu_passes_and_old_errors_are_only_noted(cases: dict[str, Frame]) -> None:
    frame = cases["right"]
    assert frame["status"] == "passed", frame
    sound = {"corrected": 99, "uncorrected": 0, "ever": 3, "pending": 0, "failed": 0}
    assert frame["traits"]["gpus"] == {"0000:1A:00.0": [sound, sound], "0000:1B:00.0": [sound, sound]}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("ecc", "GPU 0000:1A:00.0: 5 uncorrected memory errors since the driver was loaded: drain the GPU"),
        ("pending", "GPU 0000:1A:00.0: faulty memory is waiting to be replaced: drain the GPU and reset it"),
        ("failed", "GPU 0000:1A:00.0: faulty memory could not be replaced: drain the GPU permanently"),
        ("retiring", "GPU 0000:1A:00.0: faulty memory is waiting to be replaced"),
        ("lost", "nvmlDeviceGetTotalEccErrors: GPU is lost: drain the GPU"),
    ],
)
def test_a_fault_is_named(cases: dict[str, Frame], case: str, words: str) -> None:
    frame = cases[case]
    assert (frame["status"], frame["failure"]) == ("failed", "hardware"), frame
    assert frame["reason"].startswith(words), frame["reason"]


@pytest.mark.parametrize("case", ["without_ecc", "denied"])
def test_a_gpu_whose_memory_nvml_does_not_count_passes_while_its_xids_are_watched(
    cases: dict[str, Frame], case: str
) -> None:
    frame = cases[case]
    assert (frame["status"], frame["reason"], frame["traits"]["nvml_unanswered"]) == ("passed", None, {}), frame
    assert set(frame["traits"]["gpus"]["0000:1A:00.0"][0].values()) == {None}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unanswered", "NVML reports neither memory errors nor Xid errors of this GPU"),
        ("silent", "NVML reports neither memory errors nor Xid errors of this GPU"),
        ("unloaded", "nvmlInit failed: Driver Not Loaded"),
        ("stopped", "the driver does not start"),
    ],
)
def test_a_gpu_that_cannot_be_queried_is_skipped(cases: dict[str, Frame], case: str, reason: str) -> None:
    assert (cases[case]["status"], cases[case]["reason"]) == ("skipped", reason)


def test_an_error_without_information_about_the_gpu_is_noted(cases: dict[str, Frame]) -> None:
    error = cases["unanswered"]["traits"]["nvml_unanswered"]
    readings = ("TotalEccErrors", "RemappedRows", "ComputeMode")
    assert error == {f"nvmlDeviceGet{name}": "Unknown Error" for name in readings}


@pytest.mark.slow
def test_without_nvml_it_is_a_skip(tmp_path: Path) -> None:
    frame = run_cases(tmp_path, stubs.build(tmp_path, nvml=False), "hw.health:right")["right"]
    assert frame["status"] == "skipped" and frame["reason"].startswith("libnvidia-ml.so.1 cannot be used")


@pytest.mark.slow
def test_without_libcuda_it_is_a_skip(tmp_path: Path) -> None:
    frame = run_cases(tmp_path, stubs.build(tmp_path, cuda=False), "hw.health:right")["right"]
    assert frame["status"] == "skipped" and "libcuda.so.1" in frame["reason"]
