"""hw.health over an NVML that tells of faults, or tells nothing."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from . import hardware, stubs
from .reading import Frame, job, outcomes, run

CASES = [name for name in hardware.CASES if name.startswith("hw.health:")]


def told(folder: Path, libraries: dict[str, str], *probes: str) -> dict[str, Frame]:
    frames, _, _ = run("hardware", job(device="cuda", probes=list(probes)), folder / "frames", **libraries)
    return {name.partition(":")[2]: frame for name, frame in outcomes(frames).items()}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    folder = tmp_path_factory.mktemp("health")
    return told(folder, stubs.build(folder), *CASES)


def test_a_healthy_card_passes_and_old_errors_are_only_told(cases: dict[str, Frame]) -> None:
    frame = cases["right"]
    assert frame["status"] == "passed", frame
    sound = {"uncorrected": 0, "ever": 3, "pending": False, "failed": False}
    assert frame["traits"]["cards"] == {"0000:1A:00.0": [sound, sound], "0000:1B:00.0": [sound, sound]}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("ecc", "GPU 0000:1A:00.0: 5 uncorrected memory errors since the driver was loaded: drain the card"),
        ("pending", "GPU 0000:1A:00.0: memory that went bad waits to be replaced: drain the card and reset it"),
        ("failed", "GPU 0000:1A:00.0: memory that went bad could not be replaced: drain the card for good"),
        ("retiring", "GPU 0000:1A:00.0: memory that went bad waits to be replaced"),
        ("xid", "the driver reported Xid 79 meanwhile: see the host's log, and drain the card"),
        ("lost", "nvmlDeviceGetTotalEccErrors: GPU is lost: drain the card"),
    ],
)
def test_a_fault_is_named(cases: dict[str, Frame], case: str, words: str) -> None:
    frame = cases[case]
    assert (frame["status"], frame["failure"]) == ("failed", "hardware"), frame
    assert frame["reason"].startswith(words), frame["reason"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unanswered", "NVML tells nothing of this card's memory"),
        ("silent", "NVML tells nothing of this card's memory"),
        ("unloaded", "nvmlInit says Driver Not Loaded"),
        ("stopped", "the driver does not start"),
    ],
)
def test_what_cannot_be_asked_is_a_skip(cases: dict[str, Frame], case: str, reason: str) -> None:
    assert (cases[case]["status"], cases[case]["reason"]) == ("skipped", reason)


def test_an_error_that_says_nothing_of_the_card_is_told(cases: dict[str, Frame]) -> None:
    said = dict.fromkeys(("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows"), "Unknown Error")
    assert cases["unanswered"]["traits"] == {"nvml_unanswered": said, "application_xids": []}


def test_an_applications_xid_is_only_told(cases: dict[str, Frame]) -> None:
    frame = cases["application"]
    assert (frame["status"], frame["traits"]["application_xids"]) == ("passed", [31]), frame


def test_without_nvml_it_is_a_skip(tmp_path: Path) -> None:
    frame = told(tmp_path, stubs.build(tmp_path, nvml=False), "hw.health:right")["right"]
    assert frame["status"] == "skipped" and frame["reason"].startswith("libnvidia-ml.so.1 cannot be used")


def test_without_libcuda_it_is_a_skip(tmp_path: Path) -> None:
    frame = told(tmp_path, stubs.build(tmp_path, cuda=False), "hw.health:right")["right"]
    assert frame["status"] == "skipped" and "libcuda.so.1" in frame["reason"]
