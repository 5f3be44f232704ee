"""uv.lock, pylock.toml and environment.yml as requirements: what installs on linux/amd64, and what is left out or
refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from packaging.markers import Marker

from envbuild.profile import environment_and_lock_file_readers, requirements_reader
from envbuild.profile.requirements_reader import Requirements
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util.errors import ProfileError
from unit.support import PROFILE, write_profile

UV = """version = 1
[[package]]
name = "app"
source = { editable = "." }
dependencies = [
    { name = "alpha", extra = ["fast"] },
    { name = "beta", version = "1.0", marker = "python_full_version < '3.12'" },
    { name = "beta", version = "2.0", marker = "python_full_version >= '3.12'" },
    { name = "winonly", marker = "sys_platform == 'win32'" },
    { name = "tool" },
]

[[package]]
name = "alpha"
version = "3.1"
source = { registry = "https://index.example/simple" }
dependencies = [{ name = "gamma" }]

[package.optional-dependencies]
fast = [{ name = "delta" }]

[[package]]
name = "beta"
version = "1.0"
source = { registry = "https://index.example/simple" }

[[package]]
name = "beta"
version = "2.0"
source = { registry = "https://index.example/simple" }

[[package]]
name = "gamma"
version = "4.0"
source = { registry = "https://index.example/simple" }

[[package]]
name = "delta"
version = "5.0"
source = { registry = "https://index.example/simple" }

[[package]]
name = "unused"
version = "6.0"
source = { registry = "https://index.example/simple" }

[[package]]
name = "winonly"
version = "7.0"
source = { registry = "https://index.example/simple" }

[[package]]
name = "tool"
version = "0.1"
source = { editable = "tools/tool" }
"""
PYLOCK = """lock-version = "1.0"
created-by = "test"
[[packages]]
name = "alpha"
version = "3.1"
index = "https://index.example/simple"
[[packages]]
name = "winonly"
version = "7.0"
marker = "sys_platform == 'win32'"
[[packages]]
name = "optional"
version = "1.0"
marker = "'dev' in dependency_groups"
"""
CONDA = """name: app
channels: [conda-forge]
dependencies:
  - python=3.10
  - pytorch::pytorch=2.1
  - pytorch-cuda=12.1
  - ffmpeg
  - numpy=1.26.4=py310hb13e2d6_0
  - scipy=1.11
  - pandas>=2,<3
  - librosa
  - pip:
      - alpha==3.1
      - --extra-index-url https://index.example/simple
      - -e git+https://git.example/taming#egg=taming
"""


def read(project: Path, name: str, text: str, python: str = "3.11") -> Requirements:
    (project / name).write_text(text, encoding="utf-8")
    return requirements_reader.read(project / name, python)


@pytest.mark.parametrize(("python", "beta"), [("3.11", "1.0"), ("3.12", "2.0")])
def test_a_uv_lock_gives_what_the_project_needs_here(project: Path, python: str, beta: str) -> None:
    found = read(project, "uv.lock", UV, python)
    lines = {text: place.line for text, place in found.lines}
    assert set(lines) == {"alpha==3.1", f"beta=={beta}", "gamma==4.0", "delta==5.0"}
    assert lines["alpha==3.1"] == UV[: UV.index('name = "alpha"\nversion')].count("\n")
    assert found.faults == [] and ["tools/tool" in note for note in found.notes] == [True]


@pytest.mark.parametrize("marker", ["nonsense", "extras == 'x'", "dependency_groups < 'x'", "(" * 5000])
def test_an_invalid_marker_is_a_fault_with_package_and_line(project: Path, marker: str) -> None:
    uv = read(project, "uv.lock", UV.replace("sys_platform == 'win32'", marker))
    assert [(fault.message, fault.line) for fault in uv.faults] == [("winonly, required by app: invalid marker", 2)]
    pylock = read(project, "pylock.toml", PYLOCK.replace("sys_platform == 'win32'", marker))
    assert [(fault.message, fault.line) for fault in pylock.faults] == [("winonly: invalid marker", 7)]


@pytest.mark.parametrize("extra", ["1", "true", '"fast"'])
def test_an_extra_that_is_not_a_list_is_ignored(project: Path, extra: str) -> None:
    found = read(project, "uv.lock", UV.replace('["fast"]', extra))
    assert {text for text, _ in found.lines} == {"alpha==3.1", "beta==1.0", "gamma==4.0"}


@pytest.mark.parametrize(("pins", "beta"), [({}, "1.0"), ({"python": "3.12"}, "2.0")])
def test_a_lock_is_read_for_the_python_of_a_pin(project: Path, pins: dict[str, str], beta: str) -> None:
    write_profile(project, {**PROFILE, "packages": []})
    (project / "uv.lock").write_text(UV, encoding="utf-8")
    loaded = profile_reader_and_overrides.load("sample", pins, project / "uv.lock")
    assert f"beta=={beta}" in loaded.profile.packages


@pytest.mark.parametrize("python", ["2", "3.x", "four"])
def test_an_invalid_python_is_a_fault_of_the_pin_and_not_of_the_lock(project: Path, python: str) -> None:
    write_profile(project, {**PROFILE, "packages": []})
    (project / "uv.lock").write_text(UV, encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        profile_reader_and_overrides.load("sample", {"python": python}, project / "uv.lock")
    assert [fault.field for fault in caught.value.faults] == ["python"]


@pytest.mark.parametrize(
    "source", ['{ git = "https://git.example/gamma#0123" }', '{ url = "https://a.example/g.whl" }']
)
def test_a_package_of_a_lock_that_no_index_has_is_a_fault_with_its_line(project: Path, source: str) -> None:
    text = UV.replace('version = "4.0"\nsource = { registry = "https://index.example/simple" }', f"source = {source}")
    (fault,) = read(project, "uv.lock", text).faults
    assert fault.message.startswith("gamma: the index does not have this source")
    assert fault.line == UV[: UV.index('name = "gamma"\nversion')].count("\n")


@pytest.mark.parametrize(("name", "text"), [("uv.lock", UV), ("pylock.toml", PYLOCK)])
def test_a_lock_for_another_python_is_a_fault(project: Path, name: str, text: str) -> None:
    head, newline, rest = text.partition("\n")
    given = f"{head}{newline}requires-python = '>=3.12'\n{rest}"
    (fault,) = read(project, name, given).faults
    assert fault.line == 2 and "the profile's 3.11" in fault.message
    assert read(project, name, given, "3.12").faults == []


def test_a_pylock_gives_its_packages_without_groups_and_other_platforms(project: Path) -> None:
    found = read(project, "pylock.toml", PYLOCK)
    assert [(text, place.line) for text, place in found.lines] == [("alpha==3.1", 3)]
    vcs = PYLOCK.replace('index = "https://index.example/simple"', 'vcs = { type = "git" }')
    assert [fault.line for fault in read(project, "pylock.dev.toml", vcs).faults] == [3]


def test_an_environment_of_conda_gives_names_of_the_index(project: Path) -> None:
    found = read(project, "environment.yml", CONDA)
    assert [text for text, _ in found.lines] == [
        "torch==2.1.*", "numpy==1.26.4", "scipy==1.11.*", "pandas>=2,<3", "librosa", "alpha==3.1",
    ]  # fmt: skip
    assert [note.split(":")[1] for note in found.notes] == ["4", "6", "7", "14"]
    (fault,) = found.faults
    assert (fault.line, "option -e" in fault.message) == (15, True)


@pytest.mark.parametrize(
    ("given", "requirement"),
    [
        ("numpy[version='>=1.2,<2']", "numpy>=1.2,<2"),
        ('conda-forge::numpy [build=py310_0, version="1.26.*"]', "numpy==1.26.*"),
        ("numpy[version=1.26.4,build=py310_0]", "numpy==1.26.4.*"),
        ("numpy[build=py310_0]", "numpy"),
    ],
)
def test_the_version_in_the_brackets_of_a_conda_package_counts(project: Path, given: str, requirement: str) -> None:
    found = read(project, "environment.yml", f"dependencies:\n  - {given}\n")
    assert [text for text, _ in found.lines] == [requirement] and found.faults == []


@pytest.mark.parametrize("item", ["numpy: 1.26", "pip: alpha", "{pip: [alpha], numpy: 1}", "null", "1.5", "[numpy]"])
def test_an_entry_that_is_not_a_conda_package_is_a_fault(project: Path, item: str) -> None:
    found = read(project, "environment.yml", f"dependencies:\n  - scipy\n  - {item}\n")
    assert [text for text, _ in found.lines] == ["scipy"]
    assert [(fault.line, "not a package specification" in fault.message) for fault in found.faults] == [(3, True)]


def test_every_conda_package_with_another_name_on_the_index_is_looked_up_there() -> None:
    readers = environment_and_lock_file_readers
    for known, name in readers._INDEX_NAMES.items():
        assert name and not readers._PROFILE_HAS.fullmatch(known) and not readers._SYSTEM.fullmatch(known)


def test_an_empty_section_for_pip_is_accepted(project: Path) -> None:
    found = read(project, "environment.yml", "dependencies:\n  - scipy\n  - pip:\n")
    assert [text for text, _ in found.lines] == ["scipy"] and found.faults == []


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("uv.lock", "a = [", "not valid TOML"),
        ("uv.lock", "version = 1\n", "has no tables"),
        ("uv.lock", '[[package]]\nname = "alpha"\nversion = "1"\n', "no project of its own"),
        ("pylock.toml", "packages = 3\n", "has no tables"),
        ("environment.yml", "name: app\n", "no list `dependencies`"),
        ("environment.yml", "a: &x 1\nb: *x\n", "alias"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(project: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read(project, name, text)
    assert words in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("error", [AssertionError, TypeError, ValueError])
def test_a_comparison_that_packaging_does_not_define_is_an_invalid_marker(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Releases of packaging raise different errors for such a comparison."""

    def evaluate(*words: object, **more: object) -> bool:
        raise error

    monkeypatch.setattr(Marker, "evaluate", evaluate)
    with pytest.raises(ProfileError, match="invalid marker"):
        environment_and_lock_file_readers.marker_applies("extras == 'x'", "3.11")


def test_a_name_that_a_lock_lists_thousands_of_times_is_refused(project: Path) -> None:
    """Each dependency fits each package of its name: a file of 8 MB would give 10,000,000,000 pairs."""
    root = '[[package]]\nname = "app"\nsource = { virtual = "." }\ndependencies = ['
    text = root + '{ name = "a" },' * 1001 + "]\n" + '[[package]]\nname = "a"\n' * 1000
    with pytest.raises(ProfileError, match="more than 1000000 dependencies"):
        read(project, "uv.lock", text)


def test_a_section_for_pip_at_the_end_of_a_long_file_is_read_once(project: Path) -> None:
    """Reading took minutes when each entry of the section was read with all lines before it."""
    start = time.process_time()
    text = "#\n" * 300_000 + "dependencies:\n  - pip:\n" + "    - alpha\n" * 1000
    assert read(project, "environment.yml", text).lines[-1][1].line == 301_002
    assert time.process_time() - start < 20


def test_more_entries_than_the_limit_are_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements_reader, "MAX_ENTRIES", 9)
    assert len(read(project, "environment.yml", "dependencies:\n" + "  - alpha\n" * 9).lines) == 9
    with pytest.raises(ProfileError, match="more than 9 entries"):
        read(project, "environment.yml", "dependencies:\n" + "  - alpha\n" * 10)


def test_messages_do_not_quote_a_lock_outside_the_project(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    text = UV.replace("tools/tool", "secret-folder").replace(
        'name = "gamma"\nversion = "4.0"\nsource = { registry', 'name = "gamma"\nsource = { git'
    )
    found = read(other, "uv.lock", text)
    said = " ".join([*found.notes, *map(str, found.faults)])
    assert found.faults and found.notes and "gamma" not in said and "secret" not in said
    with pytest.raises(ProfileError) as caught:
        read(other, "environment.yml", "secret\n")
    assert "secret" not in f"{caught.value.message} {[*map(str, caught.value.faults)]}"
