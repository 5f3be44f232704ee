"""envbuild from its wheel, outside a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .support import CHECKOUT, Project, Result, Running, command

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def installed(workplace: Path) -> Path:
    """Return the command in an environment with the wheel and its dependencies."""
    wheels, venv = workplace / "wheel", workplace / "venv"
    command(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, CHECKOUT)
    (wheel,) = wheels.glob("*.whl")
    command(sys.executable, "-m", "venv", "--without-pip", venv)
    command(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--quiet", wheel)
    return venv / "bin" / "envbuild"


@pytest.fixture
def empty(scratch: Path) -> Project:
    project = Project.create(scratch)
    for folder in ("profiles", "dockerfiles"):
        (project.folder / folder).rmdir()
    return project


def run(program: Path, project: Project, *arguments: str) -> Result:
    env = {name: value for name, value in project.environment.items() if name != "PYTHONPATH"}
    return Running([str(program), *arguments], project.folder, env).finish()


def test_it_is_not_the_checkout(installed: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = subprocess.check_output(
        [installed.with_name("python"), "-c", "import envbuild; print(envbuild.__file__)"], env=env, cwd="/", text=True
    )
    assert where.startswith(str(installed.parent.parent))


def test_shipped_profiles_work_in_an_empty_folder(installed: Path, empty: Project) -> None:
    shown = run(installed, empty, "show", "cpu", "--json")
    assert (shown.code, shown.document["profile"], shown.document["pins"]["torch"]) == (0, "cpu", "2.13.0+cpu")
    checked = run(installed, empty, "lock", "--check", "cpu", "--json")
    assert (checked.code, checked.document["profiles"][0]["changes"]) == (0, [])
    assert list(empty.folder.iterdir()) == []


def test_a_lock_and_a_dockerfile_are_written_here(installed: Path, empty: Project) -> None:
    locked = run(installed, empty, "lock", "cpu", "--json")
    assert locked.code == 0, locked.stdout
    assert locked.document["profiles"][0]["lock_file"] == "profiles/cpu.lock.yaml"
    row = locked.document["profiles"][0]
    assert (row["dockerfile"], row["dockerfile_written"]) == ("dockerfiles/cpu.Dockerfile", True)
    assert (empty.folder / row["dockerfile"]).is_file()
    assert run(installed, empty, "lock", "--check", "cpu").code == 0


def test_a_report_is_written_here(installed: Path, empty: Project) -> None:
    done = run(installed, empty, "show", "cpu", "--html", "cpu.html", "--json")
    assert (done.code, done.document["file"], done.document["state"]) == (0, "cpu.html", "missing")
    assert "<title>cpu: missing</title>" in (empty.folder / "cpu.html").read_text(encoding="utf-8")


def test_own_profiles_come_first(installed: Path, empty: Project) -> None:
    empty.profile("cpu").parent.mkdir()
    empty.write("cpu", description="my own", base={"bootstrap": "trixie"}, python="3.13", torch="2.13.0+cpu")
    empty.write("mine", extends="cpu")
    for name in ("cpu", "mine"):
        shown = run(installed, empty, "show", name, "--json")
        assert (shown.document["description"], shown.document["pins"]["python"]) == ("my own", "3.13")
