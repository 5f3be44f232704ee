"""A part of the campaigns of tests/endurance on the existing engine, and tests that show that these campaigns can
fail."""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from endurance import campaign, full, memory, soak, together
from endurance.disks import Disk, disk, usable

from .support import Project, Proved, containers, docker, required_alone

needs_disks = pytest.mark.skipif(usable() is not None, reason=str(usable()))


@pytest.fixture
def small(scratch: Path) -> Iterator[Disk]:
    with disk(scratch / "disk", 64 << 20) as made:
        yield made


# full disks


@needs_disks
@pytest.mark.parametrize("what", ["lock", "keygen", "export requirements", "show --html", "export schema > file"])
def test_a_command_says_that_the_disk_is_full_and_goes_on_when_there_is_room(
    small: Disk, scratch: Path, what: str
) -> None:
    found = full.Site(scratch, None, small, small).command(what)
    assert (found.code, found.faults) == (6, ()), found


@needs_disks
@pytest.mark.engine
@pytest.mark.parametrize(("place", "step"), [("project", "lock"), ("state", "audit"), ("state", "evidence")])
def test_a_full_disk_is_named_and_nothing_is_half_written(
    light: Proved, small: Disk, scratch: Path, place: str, step: str
) -> None:
    here = light.copy(small.folder if place == "state" else scratch / "copy")
    project = here.project
    if place == "project":
        shutil.move(project.folder, small.folder / "project")
        project = replace(project, folder=small.folder / "project")
        project.change(here.name, env={"NEW": "1"})
    shutil.rmtree(project.state / "envbuild" / ("evidence" if step == "evidence" else "builds"))
    before = full.contents(project.folder) | full.contents(project.state)
    verb = "make" if step == "evidence" else "build"
    running = project.hold(scratch / "sign", f"{step} start", verb, here.name, "--json")
    small.fill()
    (scratch / "sign").unlink()
    done = running.finish()
    assert (done.code, done.error["kind"]) == (6, "disk"), done.stdout
    assert str(small.folder) in done.error["message"] and re.search(r": 0\.0 of \d+\.\d MB free", done.error["message"])
    assert full.contents(project.folder) | full.contents(project.state) == before
    assert containers(running.pid) == []
    small.empty()
    again = project.run(verb, here.name, "--json")
    assert (again.code, again.document["state"]) == (0, "verified" if verb == "make" else "built"), again.stderr


@needs_disks
@pytest.mark.engine
def test_prune_makes_room_on_a_disk_that_has_none(engine: None, small: Disk, scratch: Path) -> None:
    """The error of a full disk recommends prune, so prune itself must need no space, not even for new folders and lock
    files."""
    project = Project.create(scratch / "prune").with_cache(small.folder, "wheels", "debs")
    project = replace(project, state=small.folder / "state")
    project.cached("bases").unlink()
    old = project.cached("wheels") / ("a" * 64)
    old.mkdir()
    (old / "old.whl").write_bytes(b"x" * 20_000_000)
    small.fill()
    done = project.run("prune", "--json")
    assert done.code == 0, done.stdout
    assert not old.exists() and shutil.disk_usage(small.folder).free >= 20_000_000


def test_leftovers_in_the_temporary_folder_are_found(scratch: Path) -> None:
    temporary = scratch / "tmp"
    temporary.mkdir()
    project = Project.create(scratch).with_cache(scratch).with_env(TMPDIR=str(temporary))
    assert full._half_written(project) == []
    (temporary / "pip-unpack-x").mkdir()
    assert full._half_written(project) == [temporary / "pip-unpack-x"]


@needs_disks
def test_a_full_disk_is_full(small: Disk) -> None:
    small.fill()
    with pytest.raises(OSError, match="No space left"):
        (small.folder / "x").write_bytes(b"x" * 10_000)
    small.empty()
    small.fill(leave=1 << 20)
    assert 0 < shutil.disk_usage(small.folder).free <= 2 << 20
    (small.folder / "x").write_bytes(b"x" * 10_000)


# many processes at once


@pytest.mark.engine
def test_some_processes_make_the_same_profiles_while_they_change(
    images: None, scratch: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in required_alone().items():
        monkeypatch.setenv(key, value)
    found = together.crowd(scratch, "", run_id, 3, 2, 10)
    assert found.faults == [] and len(found.makes) >= 3 and found.tested >= 2


# repeated runs


@pytest.mark.engine
def test_where_nothing_changed_nothing_grows(light: Proved, scratch: Path) -> None:
    here = light.copy(scratch)
    assert here.project.run("make", here.name).code == 0

    def seen() -> dict[str, object]:
        context = here.project.cached("contexts") / here.name
        files = full.contents(here.project.folder) | full.contents(here.project.state)
        # images of equal age are listed in arbitrary order
        images = sorted(docker("image", "ls", "--quiet", f"envbuild/{here.name}").split())
        hashed = {str(path): hashlib.sha256(raw).hexdigest() for path, raw in files.items()}
        return {**hashed, "context": len(list(context.rglob("*"))), "images": images}

    before = seen()
    for _ in range(2):
        done = here.project.run("make", here.name, "--json")
        assert (done.code, done.document["state"]) == (0, "verified")
        now = seen()
        changed = {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)}
        assert changed == {}, done.stderr


def row(**changes: float) -> soak.Seen:
    zero = dict.fromkeys(soak.Seen.__dataclass_fields__, 1.0)
    return soak.Seen(**{**zero, **changes})  # type: ignore[arg-type]


def test_growing_figures_are_named() -> None:
    rows = [row(memory=50 + number, files=number % 2) for number in range(20)]
    assert soak.growing(rows, 5) == ["memory grows by 1.000 a make"]
    assert soak.growing([row()] * 20, 5) == []


def test_the_history_of_builds_is_reported_and_not_judged() -> None:
    rows = [row(history=number, data=7) for number in range(20)]
    lines, faults = campaign._grown("nothing changed", rows, 5)
    assert (faults, lines[-1]) == (0, "Nothing grows.")
    assert "| MB of BuildKit's history of builds | 0.0 | 5.0 | 19.0 | +1.0000 | - |" in lines
    assert "| MB of the engine's data, without its history of builds | 7.0 | 7.0 | 7.0 | +0.0000 | 0.1 |" in lines
    assert "not judged: each build adds a record" in " ".join(lines)


def test_the_history_is_found_in_the_engines_data(scratch: Path) -> None:
    assert soak._history(scratch) == []
    (scratch / "buildkit" / "content").mkdir(parents=True)
    (scratch / "buildkit" / "history.db").touch()
    assert [path.name for path in soak._history(scratch)] == ["content", "history.db"]


@pytest.mark.parametrize("makes", [0, 1, 5, 6])
def test_growth_is_not_judged_after_too_few_makes(makes: int) -> None:
    assert soak.growing([row()] * makes, 5) is None
    lines, faults = campaign._grown("nothing changed", [row()] * makes, 5)
    assert faults == 0 and lines == [
        f"{makes} makes, nothing changed: too few to say what grows, for the first 5 settle."
    ]


def test_a_round_with_a_fault_is_not_reported_as_successful() -> None:
    rounds = [full.Round("state", "tag", code, "", ()) for code in (6, 6, 0)]
    bad = [full.Round("state", "tag", code, "", ("lost",)) for code in (-1, 0, 6)]
    lines, faults = campaign._full("it is full", [*rounds, *bad])
    assert faults == 3 and lines[1].startswith("2 ended with exit code 6, ") and "; 1 write nothing there," in lines[1]


@pytest.mark.parametrize(
    ("verified", "image", "faults"),
    [
        (True, "sha256:a", []),
        (False, "", []),
        (False, "sha256:a", []),
        (True, "", ["no tag verified"]),
        (True, "sha256:b", ["a tag verified without evidence"]),
        (False, "sha256:b", ["a tag verified without evidence"]),
    ],
)
def test_a_tag_is_wrong_without_evidence(verified: bool, image: str, faults: list[str]) -> None:
    assert full.wrongly_tagged(verified, image, [Path("evidence/a/x.statement.json")]) == faults


def test_the_step_in_which_the_engine_ended_is_reported() -> None:
    rounds = [full.Round("engine", step, 6, "", (), step == "load") for step in ("build", "load")]
    assert campaign._full("it is full", rounds)[0][-1].startswith("The engine itself ended in: engine/load. ")
    assert campaign._full("it is full", rounds[:1])[0][-1].startswith("| engine | build |")


@pytest.mark.parametrize("alive", [True, False])
def test_an_engine_that_ended_is_started_again(alive: bool, scratch: Path) -> None:
    started: list[int] = []
    own: Any = SimpleNamespace(host="", alive=lambda: alive or bool(started), start=lambda: started.append(1))
    site = full.Site(scratch, own, Disk.__new__(Disk), Disk.__new__(Disk))
    assert (site.revive(), site.revive(), started) == ((False, False, []) if alive else (True, False, [1]))


def test_a_machine_without_memory_limits_is_reported(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    monkeypatch.setattr(memory, "GROUP", scratch)
    rows, faults = campaign.no_memory(scratch, argparse.Namespace())
    assert (rows, faults) == (["Not tried: no cgroup v1 with the controller memory."], 0)


def test_an_unknown_round_is_refused() -> None:
    argv = [sys.executable, campaign.__file__, "--only", "disk/typo", "disks"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "invalid choice: 'disk/typo'" in done.stderr


@pytest.mark.parametrize(("values", "slope"), [([1, 2, 3, 4], 1.0), ([4, 3, 2], -1.0), ([5, 5, 5], 0.0), ([7], 0.0)])
def test_a_slope(values: list[float], slope: float) -> None:
    assert soak.slope(values) == pytest.approx(slope)
