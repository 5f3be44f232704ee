"""Reports of the driver during a probe are added to that probe's outcome, whatever its status; a missing counter makes
no probe fail."""

import ctypes
import json
import os
from pathlib import Path

import pynvml
import pytest

pytest.importorskip("torch")

from envbuild.selftest.nvidia import nvml_ctypes
from envbuild.selftest.nvidia.gpu_monitor import Monitor
from selftest import stubs
from selftest.reading import Frame, job, outcomes, run, run_new_python

FAULTS = ("xid", "after xid", "application", "ecc", "pending", "failed", "skips", "dies")


def results(folder: Path, *probes: str, **libraries: str) -> dict[str, Frame]:
    libraries = {**(libraries or stubs.build(folder)), "STUB_NOW": str(folder / "now")}
    document = job(device="cuda", probes=list(probes), threads=1)  # one probe at a time
    return outcomes(run("monitored", document, folder / "frames", **libraries)[0])


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    return results(tmp_path_factory.mktemp("monitor"), "sound", *FAULTS, "slowly", "denied", "without ecc", "lost")


@pytest.mark.slow
def test_a_sound_gpu_is_described_and_nothing_more(frames: dict[str, Frame]) -> None:
    frame = frames["sound"]
    assert (frame["status"], frame["failure"], frame["detail"]) == ("passed", None, None), frame
    summary = frame["traits"]["nvml"]["0000:1A:00.0"]
    assert summary == {
        "celsius": [40, 71],
        "milliwatts": [350000, 350000],
        "sm_mhz": [1980, 1980],
        "memory_mhz": [2619, 2619],
        "free_mib": [96 << 10, 96 << 10],
        "limited": [],
        "grew": {},
    }
    assert set(frame["traits"]) == {"nvml"}


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("xid", "the driver reported Xid 79 during the probe: see the host's log, and drain the GPU"),
        ("ecc", "2 uncorrected memory errors during the probe: drain the GPU and reset it"),
        ("pending", "faulty memory is waiting to be replaced: drain the GPU and reset it"),
        ("failed", "faulty memory could not be replaced: drain the GPU permanently"),
        ("skips", "1 uncorrected memory errors during the probe: drain the GPU and reset it"),
        ("dies", "8 uncorrected memory errors during the probe: drain the GPU and reset it"),
        ("lost", "nvmlDeviceGetTotalEccErrors: GPU is lost: drain the GPU"),
    ],
)
def test_a_fault_fails_the_probe_during_which_it_came(frames: dict[str, Frame], probe: str, reason: str) -> None:
    frame = frames[probe]
    assert (frame["status"], frame["failure"]) == ("failed", "hardware"), frame
    assert frame["reason"] == f"GPU 0000:1A:00.0: {reason}"


def test_findings_of_the_probe_itself_are_kept(frames: dict[str, Frame]) -> None:
    assert (frames["dies"]["signal"], frames["dies"]["at"]) == ("SIGABRT", "working")
    assert frames["dies"]["detail"].startswith("died of SIGABRT")
    assert frames["skips"]["detail"] == "there is nothing to do"


@pytest.mark.parametrize("probe", ["after xid", "application", "slowly", "denied", "without ecc"])
def test_no_other_probe_fails(frames: dict[str, Frame], probe: str) -> None:
    assert frames[probe]["status"] == "passed", frames[probe]


def test_errors_of_applications_are_only_noted(frames: dict[str, Frame]) -> None:
    assert frames["application"]["traits"]["application_xids"] == [31]


def test_growth_and_clock_limits_are_noted(frames: dict[str, Frame]) -> None:
    summary = frames["slowly"]["traits"]["nvml"]["0000:1A:00.0"]
    assert summary["limited"] == ["power cap", "hardware thermal slowdown"]
    grown = {"remapped": 1, "pcie_replays": 5, "nvlink_crc_data": 1, "nvlink_replays": 1, "nvlink_recoveries": 1}
    assert summary["grew"] == grown


@pytest.mark.slow
def test_a_link_below_what_it_can_be_is_noted_where_the_gpu_worked(tmp_path: Path) -> None:
    slow = {**stubs.build(tmp_path), "STUB_GENERATION": "3"}
    summaries = [
        results(tmp_path, "after xid", **slow, STUB_LIMITED=mask)["after xid"]["traits"]["nvml"]["0000:1A:00.0"]
        for mask in ("4", "1")
    ]
    assert summaries[0]["pcie_below_most"] == {"pcie_generation": [3, 5], "pcie_width": [16, 16]}
    assert "pcie_below_most" not in summaries[1]


@pytest.mark.slow
def test_a_gpu_without_ecc_is_watched(tmp_path: Path) -> None:
    """For such a GPU, NVML reports neither error counts nor remapped rows from the start."""
    found = results(tmp_path, "sound", "xid", **stubs.build(tmp_path), STUB_ERROR="3")
    assert [frame["status"] for frame in found.values()] == ["passed", "failed"]
    assert "Xid 79" in found["xid"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "answers", "why"),
    [
        ({"nvml": False}, {}, "libnvidia-ml.so.1 cannot be used"),
        ({"cuda": False}, {}, "libcuda.so.1"),
        ({}, {"STUB_NVML": "9"}, "nvmlInit failed: Driver Not Loaded"),
        ({}, {"STUB_INIT": "999"}, "the driver does not start"),
    ],
)
def test_without_a_driver_nothing_fails_and_that_is_noted(
    tmp_path: Path, without: dict[str, bool], answers: dict[str, str], why: str
) -> None:
    frame = results(tmp_path, "xid", **stubs.build(tmp_path, **without), **answers)["xid"]  # type: ignore[arg-type]
    assert frame["status"] == "passed" and why in frame["traits"]["unwatched"], frame


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "why"),
    [("hangs", "NVML's monitor: no answer after 5 s"), ("crashes", "NVML's monitor: died of SIGABRT")],
)
def test_a_driver_that_fails_its_watcher_fails_no_probe(tmp_path: Path, probe: str, why: str) -> None:
    found = results(tmp_path, "sound", probe, "afterwards")
    assert [frame["status"] for frame in found.values()] == ["passed"] * 3
    assert found[probe]["traits"]["unwatched"] == found["afterwards"]["traits"]["unwatched"] == why


def test_the_monitor_ends_with_its_harness() -> None:
    watching = Monitor()
    pid = watching._pid
    watching.end()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


@pytest.mark.slow
def test_the_parent_calls_nothing_of_torch_and_has_no_thread(tmp_path: Path) -> None:
    watched = {**stubs.build(tmp_path), "STUB_NOW": str(tmp_path / "now"), "ENVBUILD_TEST_PROFILE": "1"}
    err = run_new_python("monitored", job(device="cuda", probes=["sound", "ecc"]), tmp_path / "frames", **watched)
    assert json.loads(err.decode().splitlines()[-1]) == {"calls": [], "threads": 1}


def test_numbers_and_layouts_are_nvmls() -> None:
    assert ctypes.sizeof(nvml_ctypes.Field) == ctypes.sizeof(pynvml.c_nvmlFieldValue_t)
    assert nvml_ctypes.Field.value.offset == pynvml.c_nvmlFieldValue_t.value.offset
    kinds = {"nvlink_crc_flits": "CRC_FLIT", "nvlink_crc_data": "CRC_DATA", "nvlink_replays": "REPLAY"}
    for name, kind in {**kinds, "nvlink_recoveries": "RECOVERY"}.items():
        assert nvml_ctypes.NVLINK[name] == getattr(pynvml, f"NVML_FI_DEV_NVLINK_{kind}_ERROR_COUNT_TOTAL")
    reasons = (
        "GpuIdle",
        "UserDefinedClocks",
        "SwPowerCap",
        "HwSlowdown",
        "SyncBoost",
        "SwThermalSlowdown",
        "HwThermalSlowdown",
        "HwPowerBrakeSlowdown",
        "DisplayClockSetting",
    )
    masks = [getattr(pynvml, f"nvmlClocksThrottleReason{reason}") for reason in reasons]
    assert list(nvml_ctypes.CLOCK_LIMITS.values()) == masks
