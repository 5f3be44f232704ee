"""The real GPU image in a registry: the image has no test result, and `verify` reports this; the signed build statement
and the SBOM of the image still count.

A push compresses its 5.5 GB for minutes, and a rebuild writes them again, so only `make test-images` runs these tests.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from .site import Team, installing, reasons, wheel
from .support import OTHER_CUBLAS, Project, Result, command, docker, machine_cache

pytestmark = [pytest.mark.engine, pytest.mark.images]

# Does what `push` does with a verified image, but without checking the evidence and without the tag `verified`.
SAY = """
import sys
from envbuild.pipeline import push_save_and_load
from envbuild.attest import keys_and_signatures, registry_attestations
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from envbuild.attest.in_toto_statements import Subject
from envbuild.image.docker_engine import Engine
from envbuild.lock import lock_file
from envbuild.resolve import profile_reader_and_overrides
name, tag, target = sys.argv[1:]
source, reference = profile_reader_and_overrides.load(name), Reference.parse(target)
place, image = Repository(reference), Engine().find(tag)
manifest = place.manifest(reference.target)
assert manifest.config == image.id
subject = Subject(tag, image.id, reference.repository, manifest.digest)
statements = push_save_and_load.statements_of(source, lock_file.read(source.known_lock), image, subject)
registry_attestations.publish(place, manifest, statements, keys_and_signatures.configured_signer())
"""


@pytest.fixture(scope="module")
def gpu_team(team: Team, gpu_project: Project) -> Team:
    return replace(team, project=gpu_project)


@pytest.fixture(scope="module")
def place(gpu_team: Team, gpu_made: Result, gpu_name: str, gpu_tag: str, run_id: str) -> str:
    """An image under its lock's tag, with a signed build statement and SBOM, but without a test result."""
    there = f"{gpu_team.registry.host}/e2e-{run_id}/gpu"
    target = f"{there}:{gpu_tag.rpartition(':')[2]}"
    docker("tag", gpu_tag, target)
    docker("push", "--quiet", target, env=gpu_team.login)
    env = {**gpu_team.project.environment, **gpu_team.login, **gpu_team.signing}
    command(sys.executable, "-c", SAY, gpu_name, gpu_tag, target, env=env, cwd=gpu_team.project.folder)
    return there


@pytest.fixture(scope="module")
def ref(place: str, gpu_tag: str) -> str:
    return f"{place}:{gpu_tag.rpartition(':')[2]}"


def test_without_a_proof_it_is_not_pushed(gpu_team: Team, gpu_made: Result, gpu_name: str) -> None:
    done = gpu_team.push(gpu_name, f"{gpu_team.registry.host}/never")
    assert (done.code, done.error["kind"]) == (4, "not-proved")
    assert "h20: unverified" in done.error["hint"]


def test_its_lock_gives_the_same_image_which_is_not_proof(gpu_team: Team, ref: str) -> None:
    """All of its 5.5 GB are built again without a cache."""
    done = gpu_team.rebuild(ref)
    assert reasons(done) == ["gpu"]
    assert done.document["reasons"][0]["detail"] == "h20: unverified"
    assert "the lock gives the same image" in done.stderr


def test_a_child_that_installs_another_cublas_is_refused_for_that(
    gpu_team: Team, ref: str, place: str, gpu_other: Result, gpu_tag: str, scratch: Path
) -> None:
    assert gpu_other.code == 0, gpu_other.stderr
    (file,) = machine_cache("wheels").glob(f"*/nvidia_cublas_cu12-{OTHER_CUBLAS}-*.whl")
    child = f"{place}:cublas"
    gpu_team.build_child(gpu_tag, child, scratch, installing("nvidia-cublas-cu12", OTHER_CUBLAS), wheels=file.parent)
    done = gpu_team.verify(child, "--base", place)
    assert set(reasons(done)) == {"gpu", "replaced"}
    details = [reason["detail"] for reason in done.document["reasons"] if reason["id"] == "replaced"]
    assert all("nvidia-cublas-cu12" in detail for detail in details)
    assert any(OTHER_CUBLAS in detail for detail in details)


def test_a_child_that_installs_something_else_has_no_more_against_it_than_its_base(
    gpu_team: Team, ref: str, place: str, gpu_tag: str, scratch: Path
) -> None:
    child = f"{place}:harmless"
    folder = wheel(scratch, "harmless", "1.0").parent
    steps = f'{installing("harmless")}\nRUN python -c "import torch, harmless"'
    gpu_team.build_child(gpu_tag, child, scratch, steps, wheels=folder)
    assert gpu_team.reasons(child, "--base", place) == gpu_team.reasons(ref) == ["gpu"]
