"""The working folder, the environment and old wheels must not change the contents of a lock without a message."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.conftest import forget
from unit.support import (
    PROFILE,
    CommandResult,
    Index,
    envbuild,
    image_of,
    quick_pip,
    serving,
    write_profile,
    write_wheel,
)

from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock

DATE = "{}-06-01T00:00:00Z"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index that pip is configured with: torch, pip and two versions of alpha. uv's own configuration files are
    read."""
    quick_pip(monkeypatch)
    monkeypatch.delenv("UV_NO_CONFIG")
    folder = tmp_path / "served"
    write_wheel(folder, "pip", "26.0")
    write_wheel(folder, "torch", "2.13.0")
    for version in ("1.0", "2.0"):
        write_wheel(folder, "alpha", version)
    with serving(Index(folder)) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found


def profile(project: Path, *packages: str, **changes: Any) -> None:
    base = {"image": f"registry.example/debian@{image_of().id}"}
    data = {**PROFILE, "base": base, "torch": "2.13.0", "apt": [], "packages": list(packages), **changes}
    write_profile(project, data)


def locked(project: Path) -> Lock:
    found = lock_file.read(project / "profiles" / "sample.lock.yaml")
    assert found
    return found


def run(*options: str) -> CommandResult:
    return envbuild("lock", "sample", *options, "--json")


def refusal(result: CommandResult) -> str:
    error = result.document["error"]
    assert result.code == error["code"] == 3, result
    return "\n".join([error["message"], error["hint"] or "", *(fault["message"] for fault in error["faults"])])


def dated(index: Index, **years: int) -> None:
    """Set upload times: each version of alpha gets the given year, as in v1_0=2020; the others get today."""
    by_version = {f"alpha-{key[1:].replace('_', '.')}": year for key, year in years.items()}
    index.dates = {
        file.name: DATE.format(next((y for stem, y in by_version.items() if file.name.startswith(stem)), 2026))
        for file in index.folder.iterdir()
    }


def sdist(index: Index, version: str) -> None:
    (index.folder / f"alpha-{version}.tar.gz").write_bytes(b"never opened")


# settings that uv would read


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Index]:
    write_wheel(tmp_path / "hostile", "alpha", "9.0")
    with serving(Index(tmp_path / "hostile")) as found:
        yield found


SETTINGS = {
    "override-dependencies": 'override-dependencies = ["alpha==1.0"]',
    "constraint-dependencies": 'constraint-dependencies = ["alpha<2"]',
    "exclude-newer": 'exclude-newer = "2024-01-01T00:00:00Z"',
    "index": 'index = [{name = "hostile", url = "HOSTILE"}]',
    "pip.extra-index-url": 'pip = {extra-index-url = ["HOSTILE"], index-strategy = "unsafe-best-match"}',
}


@pytest.mark.attack(
    "a file in the project", "uv settings change the versions of a lock", "ignored, and reported with file and key"
)
@pytest.mark.parametrize("above", [False, True], ids=["here", "above"])
@pytest.mark.parametrize("file", ["pyproject.toml", "uv.toml"])
@pytest.mark.parametrize("key", SETTINGS)
def test_uv_settings_of_a_project_do_not_reach_a_lock(
    project: Path, index: Index, hostile: Index, key: str, file: str, above: bool
) -> None:
    profile(project, "alpha")
    dated(index, v1_0=2023, v2_0=2025)
    text = SETTINGS[key].replace("HOSTILE", hostile.address)
    folder = project.parent if above else project
    (folder / file).write_text(text if file == "uv.toml" else f"[tool.uv]\n{text}\n", encoding="utf-8")
    done = run()
    assert done.code == 0, done.stderr
    assert locked(project).versions["alpha"] == "2.0" and hostile.requests == []
    (note,) = done.document["notes"]
    assert note.startswith(f"{'../' if above else ''}{file}: ") or note.startswith(str(folder / file))
    assert key in note and "set versions in the profile, under packages: or pins:" in note


@pytest.mark.attack(
    "an environment variable", "UV_OVERRIDE, UV_EXCLUDE_NEWER, ... change a lock", "ignored, and reported by name"
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UV_OVERRIDE", "FILE"),
        ("UV_CONSTRAINT", "FILE"),
        ("UV_EXCLUDE_NEWER", "2024-01-01T00:00:00Z"),
        ("UV_RESOLUTION", "lowest"),
    ],
)
def test_variables_that_choose_versions_do_not_reach_a_lock(
    project: Path, index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    profile(project, "alpha")
    dated(index, v1_0=2023, v2_0=2025)
    (tmp_path / "lines.txt").write_text("alpha==1.0\n", encoding="utf-8")
    monkeypatch.setenv(name, value.replace("FILE", str(tmp_path / "lines.txt")))
    done = run()
    assert done.code == 0, done.stderr
    assert locked(project).versions["alpha"] == "2.0"
    assert f"environment: these variables are ignored: {name};" in done.document["notes"][0]


@pytest.mark.attack(
    "a file in the project", ".venv or .python-version of the working folder is run by uv", "uv runs elsewhere"
)
def test_an_interpreter_of_the_working_folder_is_not_run(project: Path, index: Index, tmp_path: Path) -> None:
    profile(project, "alpha")
    program = project / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    (project / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n", encoding="utf-8")
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    (project / ".python-version").write_text("3.99\n", encoding="utf-8")
    assert run().code == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.legitimate("a site", "the user's uv.toml names the index, with a relative find-links", "used as it was")
def test_indexes_of_the_users_uv_toml_apply(project: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    profile(project, "alpha", "beta")
    monkeypatch.delenv("PIP_INDEX_URL")
    forget()
    folder = Path(os.environ["XDG_CONFIG_HOME"]) / "uv"
    write_wheel(folder / "links", "beta", "1.0")
    text = 'find-links = ["links"]\noverride-dependencies = ["alpha==1.0"]\n'
    text += f'[[index]]\nurl = "{index.address}"\ndefault = true\n'
    (folder / "uv.toml").write_text(text, encoding="utf-8")
    done = run()
    assert done.code == 0, done.stderr
    assert locked(project).versions == {"pip": "26.0", "torch": "2.13.0", "alpha": "2.0", "beta": "1.0"}
    assert "override-dependencies" in done.document["notes"][0]  # not an index: reported


@pytest.mark.legitimate("a site", "pip is configured with an index and a relative find-links folder", "used as it was")
def test_indexes_and_links_of_pip_apply(project: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    profile(project, "alpha", "beta")
    write_wheel(project / "links", "beta", "1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", "links")
    done = run()
    assert done.code == 0, done.stderr
    assert locked(project).versions["beta"] == "1.0" and done.document["notes"] == []


# wheels that were not requested


@pytest.mark.attack(
    "an index", "only a pre-release has a usable wheel", "refused: the newest release and its missing wheel are named"
)
def test_a_prerelease_that_was_not_requested_is_refused(project: Path, index: Index) -> None:
    profile(project, "alpha")
    for file in index.folder.glob("alpha*"):
        file.unlink()
    write_wheel(index.folder, "alpha", "0.3.1.dev5")
    sdist(index, "2.0")
    message = refusal(run())
    assert "only a pre-release fits, and no requirement names one: alpha" in message
    assert "alpha 0.3.1.dev5: the newest release, 2.0, has no wheel for Python 3.11" in message
    assert "extensions: in the profile" in message and "alpha==0.3.1.dev5" in message


@pytest.mark.attack(
    "an index", "a dependency's only usable wheel is a pre-release", "refused, with the package that requires it"
)
def test_a_prerelease_of_a_dependency_is_refused(project: Path, index: Index) -> None:
    profile(project, "beta")
    write_wheel(index.folder, "beta", "1.0", ["alpha>2"])
    write_wheel(index.folder, "alpha", "3.0rc1")
    assert "alpha 3.0rc1 (required by beta): the newest release, 2.0, does not fit" in refusal(run())


@pytest.mark.legitimate("a user", "a requirement or a locked package names a pre-release", "locked")
@pytest.mark.parametrize("package", ["alpha==3.0rc1", "alpha>=3.0rc1", "beta"])
def test_a_prerelease_that_is_named_is_locked(project: Path, index: Index, package: str) -> None:
    profile(project, package)
    write_wheel(index.folder, "beta", "1.0", ["alpha==3.0rc1"])
    write_wheel(index.folder, "alpha", "3.0rc1")
    done = run()
    assert done.code == 0, done.stderr
    assert locked(project).versions["alpha"] == "3.0rc1"


@pytest.mark.legitimate("a user", "locked packages name several pre-releases, of which one requires another", "locked")
def test_several_prereleases_that_are_named_are_locked(project: Path, index: Index) -> None:
    profile(project, "beta")
    write_wheel(index.folder, "beta", "1.0", ["alpha==3.0rc1"])
    write_wheel(index.folder, "alpha", "3.0rc1", ["gamma==2.0b2"])
    write_wheel(index.folder, "gamma", "2.0b2")
    write_wheel(index.folder, "gamma", "1.0")
    done = run()
    assert done.code == 0, done.stderr
    assert (locked(project).versions["alpha"], locked(project).versions["gamma"]) == ("3.0rc1", "2.0b2")


@pytest.mark.attack("an index", "one of two pre-releases is named by no package", "refused, and only that one is named")
def test_a_prerelease_that_is_not_named_is_refused_next_to_one_that_is(project: Path, index: Index) -> None:
    profile(project, "beta")
    write_wheel(index.folder, "beta", "1.0", ["alpha==3.0rc1", "gamma>1"])
    write_wheel(index.folder, "alpha", "3.0rc1")
    write_wheel(index.folder, "gamma", "1.0")
    write_wheel(index.folder, "gamma", "2.0b2")
    assert "only a pre-release fits, and no requirement names one: gamma\n" in refusal(run())


@pytest.mark.attack(
    "an index", "only a wheel of years ago is usable", "refused: both versions and the ways out are named"
)
def test_a_wheel_of_years_ago_is_refused(project: Path, index: Index) -> None:
    profile(project, "alpha")
    sdist(index, "3.0")
    dated(index, v1_0=2019, v2_0=2020, v3_0=2026)
    message = refusal(run())
    assert "far behind the newest release, and not requested: alpha 2.0" in message
    assert (
        "alpha 2.0 is 1 release, 72 months behind 3.0: 3.0 has no wheel for Python 3.11, glibc 2.28, x86_64" in message
    )
    assert "extensions: in the profile" in message and "--accept-old alpha" in message


@pytest.mark.attack(
    "an index", "the torch pin leaves only a version of years ago", "refused: the contradiction is the reason named"
)
def test_an_old_version_that_torch_leaves_is_refused_with_the_true_reason(project: Path, index: Index) -> None:
    profile(project, "alpha")
    write_wheel(index.folder, "alpha", "3.0", ["torch>=2.15"])
    dated(index, v1_0=2019, v2_0=2020, v3_0=2026)
    message = refusal(run())
    assert "alpha 2.0 is 1 release, 72 months behind 3.0: 3.0 has a wheel, but does not fit" in message
    assert "why not alpha 3.0: " in message and "torch>=2.15" in message and "no wheel" not in message


@pytest.mark.attack("an index", "it has no dates, and 79 releases without a wheel", "refused by their number")
@pytest.mark.parametrize("newer", [78, 79])
def test_without_dates_releases_are_counted(project: Path, index: Index, newer: int) -> None:
    profile(project, "alpha")
    for number in range(newer):
        sdist(index, f"3.{number}")
    done = run()
    if newer == 78:
        assert done.code == 0, done.stderr
        (note,) = done.document["notes"]
        assert note.startswith("sample: alpha 2.0 is 78 releases behind 3.77: 3.77 has no wheel for Python 3.11")
        assert note.endswith(
            "; to compile a package from source, add it to extensions: in the profile (docs/profiles.md)"
        )
    else:
        assert "alpha 2.0 is 79 releases behind 3.78" in refusal(done)


@pytest.mark.attack(
    "an index", "the newest release has no wheel, and one before it does not fit", "both are named, with the way out"
)
def test_a_newest_release_without_a_wheel_is_named_next_to_one_that_does_not_fit(project: Path, index: Index) -> None:
    profile(project, "alpha")
    write_wheel(index.folder, "alpha", "3.0", ["torch>=2.15"])
    sdist(index, "4.0")
    done = run()
    assert done.code == 0, done.stderr
    (note,) = done.document["notes"]
    assert "alpha 2.0 is 2 releases behind 4.0: 4.0 has no wheel for Python 3.11" in note
    assert "; 3.0 has a wheel, but does not fit" in note and "extensions: in the profile" in note


@pytest.mark.legitimate("a user", "the old version is pinned: in the profile, or with --pin", "locked")
@pytest.mark.parametrize(("package", "options"), [("alpha==2.0", ()), ("alpha", ("--pin", "alpha=2.0", "--write"))])
def test_a_pinned_old_version_is_locked(project: Path, index: Index, package: str, options: tuple[str, ...]) -> None:
    profile(project, package)
    sdist(index, "3.0")
    dated(index, v1_0=2019, v2_0=2020, v3_0=2026)
    done = run(*options)
    assert done.code == 0, done.stderr
    assert locked(project).versions["alpha"] == "2.0" and locked(project).accepted_old == ()


@pytest.mark.legitimate("a user", "--accept-old NAME", "locked, recorded in the lock, and kept when it is made again")
def test_an_accepted_old_version_is_recorded(project: Path, index: Index) -> None:
    profile(project, "alpha")
    sdist(index, "3.0")
    dated(index, v1_0=2019, v2_0=2020, v3_0=2026)
    assert run("--accept-old", "Alpha").code == 0
    first = locked(project)
    assert first.content["accepted_old"] == [{"name": "alpha", "version": "2.0", "newest": "3.0"}]
    write_wheel(index.folder, "beta", "1.0")
    profile(project, "alpha", "beta")
    done = run()
    assert done.code == 0, done.stderr
    assert locked(project).accepted_old == first.accepted_old
    forget()
    assert run("--upgrade").code == 0


@pytest.mark.legitimate("a user", "an old Python, for which no newer release was made", "locked, with a note")
def test_a_release_for_another_python_is_only_reported(project: Path, index: Index) -> None:
    profile(project, "alpha")
    write_wheel(index.folder, "alpha", "3.0")
    dated(index, v1_0=2019, v2_0=2020, v3_0=2026)
    index.requires = {"alpha-3.0-py3-none-any.whl": ">=3.12"}
    done = run()
    assert done.code == 0, done.stderr
    assert done.document["notes"] == [
        "sample: alpha 2.0 is 1 release, 72 months behind 3.0: 3.0 needs a different Python"
    ]


@pytest.mark.legitimate("a user", "a range excludes newer releases (alpha<2)", "locked without a word")
def test_a_range_is_what_was_asked_for(project: Path, index: Index) -> None:
    profile(project, "alpha<2")
    dated(index, v1_0=2019, v2_0=2026)
    done = run()
    assert (done.code, done.document["notes"]) == (0, [])
    assert locked(project).versions["alpha"] == "1.0"


# a requirements file that names what --pin or the profile sets


def required(project: Path, *lines: str) -> tuple[str, ...]:
    (project / "app").mkdir(exist_ok=True)
    (project / "app" / "requirements.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return ("--requirements", "app/requirements.txt")


def of_project(project: Path) -> dict[str, str]:
    found = lock_file.read(project / "profiles" / "sample-app.lock.yaml")
    assert found
    return found.versions


@pytest.mark.legitimate(
    "a user", "--pin torch with a requirements file that names torch", "the pin is locked, the line left out"
)
def test_a_pin_of_torch_comes_before_a_requirements_file(project: Path, index: Index) -> None:
    profile(project, torch="2.15.0")
    options = required(project, "alpha", "torch>=2.14")
    done = run(*options, "--pin", "torch=2.13.0", "--write")
    assert done.code == 0, done.stderr
    assert of_project(project)["torch"] == "2.13.0"
    reason = "torch>=2.14 is left out: --pin has torch 2.13.0"
    assert done.document["notes"] == [
        f"sample-app: app/requirements.txt:2: {reason} (--pin takes precedence over the profile, "
        "and the profile over the requirements file)"
    ]


CUDA_LEFT = "is left out: --pin has torch 2.13.0 (--pin takes precedence over the profile, and the profile over the"


@pytest.mark.legitimate(
    "a user", "--pin torch and --pin cuda with a requirements file that names torch", "the pins are locked"
)
@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("torch", False),
        ("torch>=2.4", False),
        ("torch==2.11.0", True),
        ("torch<2.12", True),
        ("torch[opt-einsum]==2.11.0", True),
    ],
)
@pytest.mark.parametrize("own", ["2.13.0", "2.11.0"])
def test_pins_of_torch_and_cuda_come_before_a_requirements_file(
    project: Path, index: Index, own: str, line: str, left: bool
) -> None:
    profile(project, torch=own)
    options = required(project, "alpha", line)
    done = run(*options, "--pin", "torch=2.13.0", "--pin", "cuda=13.0", "--write")
    assert done.code == 0, done.stderr
    assert of_project(project).items() >= {"torch": "2.13.0", "alpha": "2.0"}.items()
    notes = done.document["notes"]
    assert [f"app/requirements.txt:2: {line} {CUDA_LEFT}" in note for note in notes] == [True] * left


@pytest.mark.attack("a user's mistake", "--pin cuda of another CUDA than torch's", "refused at --pin, not at the file")
def test_a_pin_of_another_cuda_is_refused_at_the_pin(project: Path, index: Index) -> None:
    profile(project)
    done = run(*required(project, "alpha", "torch==2.11.0"), "--pin", "torch=2.13.0", "--pin", "cuda=12.8")
    assert "torch 2.13.0 is built for CUDA 13.0, not 12.8" in refusal(done)
    assert [(fault["file"], fault["field"]) for fault in done.document["error"]["faults"]] == [("--pin", "cuda")]


@pytest.mark.parametrize(
    ("packages", "lines", "options", "versions", "left"),
    [
        ((), ["torch>=2.14"], (), {"torch": "2.13.0"}, "the profile has torch 2.13.0"),
        ((), ["torch>=2.13"], (), {"torch": "2.13.0"}, None),
        (("alpha==1.0",), ["alpha>=2"], (), {"alpha": "1.0"}, "the profile has alpha 1.0"),
        (("alpha[more] == 1.0",), ["alpha>=2"], (), {"alpha": "1.0"}, "the profile has alpha 1.0"),
        (("alpha==1.0",), ["alpha>=2"], ("--pin", "alpha=2.0"), {"alpha": "2.0"}, None),
        ((), ["alpha>=2"], ("--pin", "alpha=1.0"), {"alpha": "1.0"}, "--pin has alpha 1.0"),
    ],
)
def test_the_command_line_comes_before_the_profile_and_that_before_the_file(
    project: Path,
    index: Index,
    packages: tuple[str, ...],
    lines: list[str],
    options: tuple[str, ...],
    versions: dict[str, str],
    left: str | None,
) -> None:
    profile(project, *packages)
    done = run(*required(project, *lines), *options, *(("--write",) if options else ()))
    assert done.code == 0, done.stderr
    assert of_project(project).items() >= versions.items()
    notes = done.document["notes"]
    assert notes == [] if left is None else len(notes) == 1 and f"{lines[0]} is left out: {left}" in notes[0]


def test_packages_left_out_are_reported_if_resolution_fails(project: Path, index: Index) -> None:
    profile(project)
    result = run(*required(project, "torch>=2.14", "alpha>=7"))
    assert "torch>=2.14 is left out: the profile has torch 2.13.0" in refusal(result)
