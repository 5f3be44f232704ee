"""Ctrl-C in every step of make: exit 130, no container, nothing half written, and earlier files stay."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import pytest

from .support import Proved, Result, Running, containers, docker, handle, inspect, until

pytestmark = pytest.mark.engine


@pytest.fixture
def here(light: Proved, scratch: Path) -> Proved:
    return light.copy(scratch)


@pytest.fixture
def large(quick: Proved, scratch: Path) -> Proved:
    """A project with the real torch, whose layers and self-test take some seconds."""
    return quick.copy(scratch).with_required_alone()


def files(here: Proved) -> dict[Path, bytes]:
    """Return everything in the project and the state folder, except the files at which processes wait."""
    folders = (here.project.folder, here.project.state)
    return {
        path: path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def interrupt(running: Running, after: str | None) -> Result:
    """Interrupt make after the step `after`, and check that it left nothing."""

    def finished() -> list[str]:
        lines = running.stderr.splitlines(keepends=True)
        return [line.split("  ")[1] for line in lines if line.startswith("  ") and line[2] != " " and line[-1] == "\n"]

    # its last output may not have arrived yet
    until(f"{after} as the last finished step", lambda: finished()[-1:] == ([after] if after else []), 5)
    ended = running.interrupt()
    assert ended.code == 130, ended.stderr
    assert ended.error["kind"] == "interrupted"
    assert containers(running.pid) == []
    return ended


def children(pid: int) -> list[str]:
    """Return the command lines of a process's children; threads and children may end while they are read."""
    found: list[str] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found.append((Path("/proc") / child / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.parametrize(("step", "after"), [("load profile", None), ("resolve", "load profile")])
def test_before_anything_is_written(here: Proved, scratch: Path, step: str, after: str | None) -> None:
    before = files(here)
    interrupt(here.project.hold(scratch / "sign", f"{step} start", "make", here.name, "--json"), after)
    assert files(here) == before


def test_while_the_lock_is_written(here: Proved, scratch: Path) -> None:
    here.project.change(here.name, env={"NEW": "1"})
    before = files(here)
    interrupt(here.project.hold(scratch / "sign", "lock write", "make", here.name, "--json"), "preflight")
    assert files(here) == before


def test_while_the_dockerfile_is_written(here: Proved, scratch: Path) -> None:
    here.project.dockerfile(here.name).unlink()
    before = files(here)
    interrupt(here.project.hold(scratch / "sign", "render write", "make", here.name, "--json"), "lock")
    assert files(here) == before


def test_during_the_build(large: Proved, scratch: Path) -> None:
    before, image = files(large), handle(large.tag)
    running = large.project.hold(scratch / "sign", "build start", "make", large.name, "--no-cache", "--json")
    (scratch / "sign").unlink()
    time.sleep(2)  # it writes torch's layer, which takes longer
    interrupt(running, "render")
    assert files(large) == before
    assert handle(large.tag) == image


def test_while_the_build_record_is_written(here: Proved, scratch: Path) -> None:
    (record,) = here.records()
    record.unlink()
    before = files(here)
    interrupt(here.project.hold(scratch / "sign", "audit write", "make", here.name, "--json"), "load")
    assert files(here) == before


def test_during_the_selftest(large: Proved) -> None:
    shutil.rmtree(large.project.state / "envbuild" / "evidence")
    before = files(large)
    running = large.project.start("make", large.name, "--json")
    until("a container of the self-test", lambda: containers(running.pid), 180)
    interrupt(running, "build")
    assert files(large) == before


def test_while_evidence_is_written_and_the_next_make_completes(here: Proved, scratch: Path) -> None:
    shutil.rmtree(here.project.state / "envbuild" / "evidence")
    interrupt(here.project.hold(scratch / "sign", "evidence write", "make", here.name, "--json"), "self-test")
    assert here.project.statements() == []
    assert here.project.half_written() == []
    again = here.project.run("make", here.name, "--json")
    assert (again.code, again.document["state"]) == (0, "verified")


def test_before_the_tag_moves_and_the_next_make_moves_it(here: Proved, scratch: Path) -> None:
    verified = handle(here.verified)
    docker("image", "rm", here.verified)
    interrupt(here.project.hold(scratch / "sign", "tag start", "make", here.name, "--json"), "evidence")
    assert handle(here.verified) is None
    again = here.project.run("make", here.name, "--json")
    assert again.code == 0
    assert [step["name"] for step in again.document["steps"] if not step["cached"]][2:] == ["tag"]
    assert inspect(here.verified)["Id"] == verified
