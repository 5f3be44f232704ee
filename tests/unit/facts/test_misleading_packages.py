"""The index's apex is not NVIDIA's: every request for it is refused, and the message says how to get NVIDIA's apex."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.facts import misleading_packages
from envbuild.fetch import wheel_resolution_and_download
from envbuild.util.errors import ProfileError
from unit.support import PROFILE, envbuild, quick_pip, write_profile, write_wheel

MEANT = "NVIDIA's is built from source: name it under extensions"


@pytest.mark.parametrize(
    "text",
    [
        "apex", " APEX ", "apex==0.1", "Apex >= 0.9; python_version > '3'", "apex[cpp_ext]~=0.1", "apex(>1)",
        "apex @ git+https://github.com/NVIDIA/apex", "apex @ file:///x.whl", "git+https://github.com/NVIDIA/apex",
        "git+ssh://git@github.com:NVIDIA/apex.git@6424da3b", "https://x.example/y.zip#egg=apex", "./apex", "/src/apex/",
        "apex-0.1.tar.gz", "apex-0.1-py3-none-any.whl",
        "https://x.example/apex-0.1-cp311-cp311-linux_x86_64.whl", "git+https://x.example/fork/apex@main#egg=other",
    ],
)  # fmt: skip
def test_requirements_that_mean_the_package(text: str) -> None:
    assert MEANT in (misleading_packages.refusal_reason(text) or "")


@pytest.mark.parametrize(
    "text",
    [
        "numpy",
        "apex-x",
        "nvidia-apex",
        "apexpy==2.0",
        "x.apex",
        "apex-charts>1",
        "https://x.example/apexes/y",
        "apex_x-0.1.tar.gz",
        "",
    ],
)
def test_requirements_that_do_not_mean_the_package(text: str) -> None:
    assert misleading_packages.refusal_reason(text) is None


def refusals(*arguments: str) -> list[str]:
    """Run a command, and return file, line and field of each fault that refuses the package."""
    done = envbuild(*arguments, "--json")
    assert done.code == 3
    faults = done.document["error"]["faults"]
    return [f"{f['file']}:{f['line']}: {f['field']}" for f in faults if MEANT in f["message"]]


def test_in_packages_and_pins_of_a_profile(project: Path) -> None:
    write_profile(project, {**PROFILE, "packages": ["numpy", "apex[x]>1", "apex @ git+https://github.com/NVIDIA/apex"]})
    assert len(refusals("show", "sample")) == 2
    write_profile(project, {**PROFILE, "pins": {"apex": "0.1"}})
    assert [field.rpartition(": ")[2] for field in refusals("show", "sample")] == ["pins.apex"]
    write_profile(project, PROFILE)
    assert refusals("lock", "sample", "--pin", "apex=0.1") == ["--pin:1: pins.apex"]


def test_in_a_projects_requirements_and_what_they_include(project: Path) -> None:
    write_profile(project, PROFILE)
    (project / "more").mkdir()
    (project / "more" / "base.txt").write_text("numpy\nAPEX[cpp]==0.1 --hash=sha256:00\n", encoding="utf-8")
    (project / "requirements.txt").write_text("-r more/base.txt\ngit+https://x.example/apex\n", encoding="utf-8")
    (project / "editable.txt").write_text("-e git+https://github.com/NVIDIA/apex#egg=apex\n", encoding="utf-8")
    (project / "pyproject.toml").write_text("[project]\ndependencies = [\n'apex',\n]\n", encoding="utf-8")
    for file, places in {
        "requirements.txt": ["more/base.txt:2", "requirements.txt:2"],
        "editable.txt": ["editable.txt:1"],
        "pyproject.toml": ["pyproject.toml:3"],
    }.items():
        found = refusals("lock", "sample", "--requirements", file)
        assert [":".join(place.split(":")[:2]) for place in found] == places


def test_where_another_package_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index may have a wheel of the package, or only its source, as the public index does."""
    quick_pip(monkeypatch)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    write_wheel(tmp_path, "vissl", "1.0", ["apex"])
    (tmp_path / "apex-0.9.10.tar.gz").write_bytes(b"never opened")
    with pytest.raises(ProfileError) as caught:
        wheel_resolution_and_download.resolve_wheels(["vissl"], "3.11", "2.36", {})
    assert MEANT in str(caught.value.hint)
    write_wheel(tmp_path, "apex", "0.9")
    with pytest.raises(ProfileError, match=f"vissl needs apex: .*{MEANT}"):
        wheel_resolution_and_download.resolve_wheels(["vissl"], "3.11", "2.36", {})


def test_in_what_a_new_profile_extends(project: Path) -> None:
    write_profile(project, {**PROFILE, "packages": ["apex"]})
    assert len(refusals("init", "mine", "--from", "sample")) == 1
