"""The lines of a profile, and when the driver of this machine matters."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.doctor import nvml_reader
from envbuild.doctor.machine_readings import DriverReading
from envbuild.pipeline import cuda_line_selection_for_machine
from envbuild.resolve import cuda_line_lookup
from envbuild.util import user_folders
from envbuild.util.errors import SettingsError, UsageError
from unit.support import PROFILE, envbuild, write_profile

NEWER = {"extends": "h200", "gpus": ["h20"]}
OLDER = {"extends": "h20-cu12"}
COMPAT = {"sha256": "b" * 64, "url": "https://mirror.example/compat.deb"}
LOCAL = "unix:///run/docker.sock"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    """A machine with an old driver and a local engine, and a GPU with two lines."""
    monkeypatch.setattr(nvml_reader, "read", lambda: DriverReading("550.54.14"))
    monkeypatch.setenv("DOCKER_HOST", LOCAL)
    monkeypatch.delenv("CI", raising=False)
    write_profile(project, NEWER, "new")
    write_profile(project, OLDER, "new-cu12")
    write_profile(project, PROFILE, "cpu-only")


def configure(text: str) -> None:
    user_folders.config_file().parent.mkdir(parents=True, exist_ok=True)
    user_folders.config_file().write_text(text, encoding="utf-8")


def test_the_lines_of_a_gpu_are_the_profiles_of_its_name() -> None:
    found = cuda_line_lookup.gpu_lines("new")
    assert [(one.profile, one.label, one.driver) for one in found] == [
        ("new", "current", "580.65.06"), ("new-cu12", "cu12", "525.60.13"),
    ]  # fmt: skip
    assert cuda_line_lookup.gpu_lines("cpu-only") == []


@pytest.mark.parametrize(
    ("name", "other", "driver"), [("new", "new-cu12", "525.60.13"), ("new-cu12", "new", "580.65.06")]
)
def test_show_names_the_other_line(name: str, other: str, driver: str) -> None:
    assert f"  other profile for this GPU: {other}, for driver {driver} or newer\n" in envbuild("show", name).stdout
    assert envbuild("show", name, "--json").document["other_lines"] == [{"profile": other, "driver": driver}]
    assert envbuild("show", "cpu-only", "--json").document["other_lines"] == []


def test_auto_takes_the_line_for_this_machines_driver() -> None:
    assert cuda_line_selection_for_machine.select_line("new").line.profile == "new"
    assert cuda_line_selection_for_machine.select_line("new", line="auto").line.profile == "new-cu12"
    assert cuda_line_selection_for_machine.select_line("new-cu12").reason == "the profile's full name"


def test_a_site_may_ask_for_the_line_of_the_driver() -> None:
    configure("line: auto\n")
    assert cuda_line_selection_for_machine.select_line("new").line.profile == "new-cu12"


@pytest.mark.parametrize("why", ["locked", "ci", "slurm", "kubernetes", "remote"])
def test_the_driver_of_this_machine_does_not_matter(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("line: auto\n" + (f"on: {why}\n" if why in ("slurm", "kubernetes") else ""))
    if why == "ci":
        monkeypatch.setenv("CI", "true")
    if why == "remote":
        monkeypatch.setenv("DOCKER_HOST", "tcp://builder.example:2376")
    found = cuda_line_selection_for_machine.select_line("new", locked=why == "locked")
    assert (found.line.profile, found.driver) == ("new", None)
    assert (
        cuda_line_selection_for_machine.select_line("new", locked=why == "locked", driver="550.54.14").line.profile
        == "new-cu12"
    )


def test_the_driver_of_the_settings_comes_before_that_of_this_machine() -> None:
    configure('driver: "595.45.04"\n')
    assert cuda_line_selection_for_machine.select_line("new", line="auto").line.profile == "new"


@pytest.mark.parametrize("name", ["cpu-only", "profiles/new.yaml"])
def test_a_path_has_no_other_lines_and_a_cpu_profile_none(name: str) -> None:
    assert cuda_line_selection_for_machine.select_line(name).line.profile == name
    with pytest.raises(UsageError):
        cuda_line_selection_for_machine.select_line(name, line="cu12")


def test_a_name_that_is_no_profile_stands_for_itself() -> None:
    assert cuda_line_selection_for_machine.line_or_name("nosuch").line.profile == "nosuch"


@pytest.mark.parametrize("text", ["line: newest", "line: cu1", "driver: 550", "driver: v550", "line: {}"])
def test_invalid_settings_are_reported(text: str) -> None:
    configure(text)
    with pytest.raises(SettingsError):
        cuda_line_selection_for_machine.line_or_name("new")


def test_compatibility_libraries_in_the_loaders_path_are_forced(project: Path) -> None:
    forced = {**NEWER, "driver": {"compat": COMPAT}, "env": {"LD_LIBRARY_PATH": "/usr/local/cuda/compat"}}
    write_profile(project, forced, "forced")
    write_profile(project, {**forced, "env": {}}, "chosen")
    (line,), (other,) = cuda_line_lookup.gpu_lines("forced"), cuda_line_lookup.gpu_lines("chosen")
    assert "error 803" in str(line.refusal("595.45.04"))
    assert other.refusal("595.45.04") is None
