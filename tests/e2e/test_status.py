"""`status` detects each change since the proof."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .broken import Workshop
from .support import CHECKOUT, PACKAGE, Proved, docker, python_path

pytestmark = pytest.mark.engine


def test_a_tag_moved_by_hand(quick: Proved, broken: Workshop, verified: str) -> None:
    docker("tag", broken.image("forged"), quick.verified)
    status = quick.project.run("status", quick.name, "--json")
    assert (status.code, status.document["state"]) == (5, "tampered")
    assert "moved by hand" in status.words


def test_a_tag_given_by_hand(quick: Proved, scratch: Path, verified: str) -> None:
    """The image is right, but this state folder has no evidence for it."""
    here = quick.copy(scratch)
    shutil.rmtree(here.project.state / "envbuild" / "evidence")
    status = here.project.run("status", quick.name, "--json")
    assert (status.code, status.document["state"]) == (5, "tampered")


def test_a_changed_profile_is_out_of_date(quick: Proved, scratch: Path) -> None:
    here = quick.copy(scratch)
    here.project.change(here.name, env={"NEW": "1"})
    status = here.project.run("status", here.name, "--json")
    assert (status.code, status.document["state"]) == (8, "stale")
    assert "environment changed in the profile" in status.words


def test_a_changed_selftest(quick: Proved, scratch: Path) -> None:
    shutil.copytree(PACKAGE, scratch / "envbuild", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("profiles", "dockerfiles"):
        shutil.copytree(CHECKOUT / folder, scratch / folder)
    source = scratch / "envbuild" / "selftest" / "numerics" / "tolerances.py"
    assert source.is_file()
    with source.open("a", encoding="utf-8") as file:
        file.write("# a comment\n")
    commented = quick.project.run("status", quick.name, PYTHONPATH=python_path(scratch))
    versions = scratch / "envbuild" / "selftest" / "probes" / "versions.json"
    numbers = json.loads(versions.read_text(encoding="utf-8"))
    versions.write_text(json.dumps({**numbers, "gemm.exact": numbers["gemm.exact"] + 1}), encoding="utf-8")
    status = quick.project.run("status", quick.name, "--json", PYTHONPATH=python_path(scratch))
    assert commented.code == 0
    assert (status.code, status.document["state"]) == (8, "stale")
    assert "proved by a different version of the self-test (changed probes: gemm.exact)" in status.words


def test_built_and_not_proved_and_then_removed(light: Proved, scratch: Path) -> None:
    project, name = light.project.copy(scratch), light.name.replace("light", "gone")
    project.write(name, extends=light.name, env={"GONE": "1"})
    project.lock(name).write_bytes(project.lock(light.name).read_bytes())
    built = project.run("build", name, "--json")
    assert (built.code, built.document["state"], built.document["evidence"]) == (0, "built", [])
    unproved = project.run("status", name, "--json")
    assert (unproved.code, unproved.document["state"]) == (4, "unverified")

    docker("image", "rm", *built.document["tags"])
    status = project.run("status", name, "--json")
    assert (status.code, status.document["state"]) == (6, "missing")
    assert "envbuild make" in status.words
