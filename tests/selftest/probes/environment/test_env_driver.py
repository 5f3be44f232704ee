"""env.driver with drivers that are missing, too old, inconsistent, or do not start."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envbuild.facts import database
from envbuild.selftest.nvidia import nvidia_driver_query
from envbuild.selftest.probes.environment.env_driver import DriverVersions, driver_faults
from selftest import hardware, stubs
from selftest.named import DRIVER
from selftest.reading import Frame, job, outcomes, run


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (a@b)", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65", "580.65"),
        ("NVRM version: of another form", None),
    ],
)
def test_the_kernel_modules_version_is_read(tmp_path: Path, line: str, version: "str | None") -> None:
    (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    assert nvidia_driver_query.kernel_module_version(tmp_path / "version") == version
    assert nvidia_driver_query.kernel_module_version(tmp_path / "absent") is None


def test_a_libcudas_release_is_in_its_files_name() -> None:
    assert nvidia_driver_query.file_version("/usr/lib/libcuda.so.550.54.15") == "550.54.15"
    assert nvidia_driver_query.file_version("/usr/local/cuda/compat/libcuda.so.580.65.06") == "580.65.06"
    assert nvidia_driver_query.file_version("/usr/lib/libcuda.so.1") is None


FITS = DriverVersions("550.54.15", "550.54.15", (12, 4))


@pytest.mark.parametrize(
    ("found", "cuda", "minimum", "words"),
    [
        (FITS, "12.4", {"cuda": "525.60.13", "profile": "550.54.15"}, ()),
        (FITS, "12.8", {"cuda": "525.60.13"}, ()),
        (FITS, "12.4", {}, ()),
        (FITS, None, {"cuda": "600"}, ()),
        (FITS, "12.4", {"profile": "550.54.15.1"}, ("older than 550.54.15.1, which the profile declares",)),
        (FITS, "13.0", {"cuda": "580"}, ("older than 580, which CUDA 13.0 needs", "supports CUDA 12.4 at most")),
        (DriverVersions("550.54.15", "580.65.06", (13, 0)), "13.0", {"cuda": "580"}, ()),
        (DriverVersions("520.61.05", "525.60.13", (12, 0)), "12.1", {"profile": "525"}, ("driver 520.61.05 is older",)),
        (DriverVersions(None, None, None), "13.0", {"cuda": "580", "profile": "580"}, ()),
        (DriverVersions("99.9", None, (9, 0)), "9.0", {"cuda": "384.81"}, ("driver 99.9 is older than 384.81",)),
    ],
)  # fmt: skip
def test_an_outdated_driver_is_reported(
    found: DriverVersions, cuda: "str | None", minimum: dict[str, str], words: Any
) -> None:
    messages = list(driver_faults(found, cuda, minimum))
    assert len(messages) == len(words)
    for line, part in zip(messages, words, strict=True):
        assert part in line and line.endswith(("upgrade the driver", "(datacentre GPUs only)"))


def run_cases(folder: Path, libraries: dict[str, str], *probes: str) -> dict[str, Frame]:
    """Run cases of hardware.py through the harness, with a torch that reports CUDA 13.0."""
    minimum = {"cuda": "580", "profile": "525.60.13"}
    document = job(device="cuda", probes=list(probes), expect={"driver": minimum})
    return outcomes(run("hardware", document, folder / "frames", **libraries)[0])


@pytest.fixture(scope="module")
def recent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    """Every case, with a libcuda that supports CUDA 13."""
    folder = tmp_path_factory.mktemp("recent")
    libraries = {**stubs.build(folder, release="580.65.06"), "STUB_CUDA": "13000"}
    return run_cases(folder, libraries, *(name for name in hardware.CASES if name.startswith("env.driver:")))


def named(result: Frame) -> list[str]:
    result = {**result, "probe": result["probe"].partition(":")[0]}
    return [advisory.id for advisory in database.advisories() if advisory.matches(result)]


@pytest.mark.slow
def test_a_driver_that_fits_passes(recent: dict[str, Frame]) -> None:
    result = recent["env.driver:right"]
    assert result["status"] == "passed", result
    assert result["traits"]["module"] == "580.65.06"
    assert result["traits"]["libcuda"].endswith("/libcuda.so.580.65.06")
    assert (result["traits"]["newest_cuda"], result["traits"]["cuInit"]) == ("13.0", 0)


def test_compatibility_libraries_meet_cudas_minimum(recent: dict[str, Frame]) -> None:
    assert recent["env.driver:compat"]["status"] == "passed"


def test_a_driver_older_than_declared_is_named(recent: dict[str, Frame]) -> None:
    result = recent["env.driver:old"]
    assert (result["status"], result["failure"]) == ("failed", "version")
    assert (
        result["reason"] == "driver 520.61.05 is older than 525.60.13, which the profile declares: upgrade the driver"
    )


@pytest.mark.slow
def test_an_old_driver_is_named_with_its_advisory(tmp_path: Path) -> None:
    libraries = stubs.build(tmp_path, release="535.104.05")
    result = run_cases(tmp_path, libraries, "env.driver:compat")["env.driver:compat"]
    assert (result["status"], result["failure"]) == ("failed", "version")
    assert result["reason"].startswith("driver 535.104.05 is older than 580, which CUDA 13.0 needs")
    assert "libcuda supports CUDA 12.4 at most" in result["detail"]
    assert named(result) == DRIVER["compat"]


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("unready", "802, CUDA_ERROR_SYSTEM_NOT_READY"),
        ("geforce", "804, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
        ("unknown", "999, CUDA_ERROR_UNKNOWN"),
    ],
)
def test_a_driver_that_does_not_start_is_named(recent: dict[str, Frame], case: str, code: str) -> None:
    result = recent[f"env.driver:{case}"]
    assert (result["failure"], result["at"], result["reason"]) == ("exception", "cuInit", f"cuInit: error {code}")
    assert named(result) == DRIVER.get(case, [])


def test_no_gpu_for_this_process_is_a_skip(recent: dict[str, Frame]) -> None:
    result = recent["env.driver:empty"]
    assert (result["status"], result["reason"].partition(":")[0]) == (
        "skipped",
        "the driver reports no GPU to this process",
    )


@pytest.mark.slow
def test_no_driver_at_all_is_a_skip(tmp_path: Path) -> None:
    if nvidia_driver_query.kernel_module_version():
        pytest.skip("there is a driver")
    result = run_cases(tmp_path, {}, "env.driver:right")["env.driver:right"]
    assert result["status"] == "skipped" and result["reason"].startswith("no NVIDIA driver found: libcuda.so.1")


@pytest.mark.slow
def test_a_driver_whose_libraries_were_left_out_fails(tmp_path: Path) -> None:
    libraries = stubs.build(tmp_path, cuda=False)
    result = run_cases(tmp_path, libraries, "env.driver:right")["env.driver:right"]
    assert (result["status"], result["failure"]) == ("failed", "mismatch")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in result["reason"]
