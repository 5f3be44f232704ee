"""Profiles that share torch, in one command: their images share layers, one profile fails, and the command is
interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .support import CHECKOUT, Project, docker, inspect, until

pytestmark = pytest.mark.engine

REQUIRED = ["env.libs", "gemm.crash"]


@pytest.fixture
def names(run_id: str) -> list[str]:
    return [f"e2e-several-{which}-{run_id}" for which in ("one", "two", "bad")]


@pytest.fixture
def several(images: None, scratch: Path, names: list[str]) -> Project:
    """Two profiles that pass, and one whose own script fails. They have the same packages, and differ in a variable."""
    project = Project.create(scratch).with_required_alone()
    for name, env in zip(names, ("1", "2", "3"), strict=True):
        tests = {"level": "quick", "require": REQUIRED}
        bad = {"script": "fails.py"} if "bad" in name else {}
        project.write(name, extends="cpu", env={"WHICH": env}, selftest={**tests, **bad})
        shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", project.lock(name))
    (project.folder / "profiles" / "fails.py").write_text("fail('on purpose')\n", encoding="utf-8")
    return project


def test_a_passing_profile_is_verified_though_another_fails(several: Project, names: list[str]) -> None:
    done = several.start("make", "--all", "--json").finish(600)
    found = {row["profile"]: row for row in done.document["profiles"]}
    assert [found[name]["state"] for name in names] == ["verified", "verified", "failed"], done.stderr
    assert (done.code, ["error" in found[name] for name in names]) == (5, [False, False, True])
    assert "own.script" in found[names[2]]["error"]["message"]
    one, two = (inspect(f"envbuild/{name}:verified")["RootFS"]["Layers"] for name in names[:2])
    assert one[:-1] == two[:-1]
    assert not docker("image", "ls", "--quiet", f"envbuild/{names[2]}:verified").strip()

    again = several.run("make", *names[:2])
    assert (again.code, again.stdout.count(" verified ")) == (0, 2)
    assert "self-test     up to date" in again.stderr


def test_an_interruption_ends_every_process_and_container(several: Project, names: list[str]) -> None:
    running = several.start("make", *names[:2], "--json")
    running.says("gemm.crash", 300)
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
