"""Profiles that share torch, in one command: their images share layers, one profile fails, and the command is
interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .support import Project, Proved, docker, inspect, until

pytestmark = pytest.mark.engine

# They take long enough to be interrupted.
SCRIPTS = {"passes.py": "import time\ntime.sleep(3)\n", "fails.py": "import time\ntime.sleep(3)\nfail('on purpose')\n"}


@pytest.fixture(scope="module")
def names(run_id: str) -> list[str]:
    return [f"e2e-several-{which}-{run_id}" for which in ("good", "bad")]


@pytest.fixture(scope="module")
def several(light: Proved, workplace: Path, names: list[str]) -> Project:
    """A profile whose own script passes, and one whose script fails. They have the same packages, and differ in a
    variable."""
    project = light.project.copy(workplace / "several")
    for name, script in zip(names, SCRIPTS, strict=True):
        shutil.copy(project.profile(light.name), project.profile(name))
        project.change(
            name, env={"WHICH": script}, selftest={"level": "quick", "require": ["env.libs"], "script": script}
        )
        shutil.copy(project.lock(light.name), project.lock(name))
        project.profile(name).with_name(script).write_text(SCRIPTS[script], encoding="utf-8")
    project.profile(light.name).unlink()
    return project


def test_a_passing_profile_is_verified_though_another_fails(several: Project, names: list[str]) -> None:
    done = several.start("make", "--all", "--json").finish(600)
    found = {row["profile"]: row for row in done.document["profiles"]}
    assert [found[name]["state"] for name in names] == ["verified", "failed"], done.stderr
    assert (done.code, ["error" in found[name] for name in names]) == (5, [False, True])
    assert "own.script" in found[names[1]]["error"]["message"]
    images = [
        docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"envbuild/{name}").split() for name in names
    ]
    good, bad = (inspect(tags[0])["RootFS"]["Layers"] for tags in images)
    assert good[:-1] == bad[:-1]
    assert f"envbuild/{names[0]}:verified" in images[0] and f"envbuild/{names[1]}:verified" not in images[1]

    again = several.run("make", *names)
    assert (again.code, again.stdout.count(" verified ")) == (5, 1)
    assert "self-test     up to date" in again.stderr


def test_an_interruption_ends_every_process_and_container(several: Project, names: list[str]) -> None:
    """The images of the test above are tested again, both at the same time."""
    shutil.rmtree(several.state / "envbuild" / "evidence", ignore_errors=True)
    running = several.start("make", *names, "--json")
    running.says("own.script", 300)
    children = descendants(running.pid)
    assert children
    done = running.interrupt()
    assert (done.code, done.error["kind"]) == (130, "interrupted")
    until("its processes have ended", lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 20)
    owners = docker("ps", "--all", "--format", '{{.Label "io.envbuild.owner"}}').splitlines()
    assert not [owner for owner in owners if any(f":{pid}:" in owner for pid in children)]
    assert several.half_written() == []


def descendants(pid: int) -> list[int]:
    own = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
           for child in (task / "children").read_text(encoding="utf-8").split()]  # fmt: skip
    return [*own, *(found for child in own for found in descendants(child))]
