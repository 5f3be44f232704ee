"""A base image by tag: the lock records the digest, and keeps it until an upgrade is requested. The registry is in this
process; wheels are not resolved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envbuild.image import container_definition_export
from envbuild.lock import base_image_tag_lookup, lock_changes, lock_creation_and_update, lock_file, outdated_pins
from envbuild.lock.lock_creation_and_update import BASE
from envbuild.lock.lock_file import EVERYTHING, Lock
from envbuild.registry import oci_types
from envbuild.registry.registry_client import Repository
from envbuild.util.errors import LockError, NetworkError, ProfileError
from envbuild.util.untrusted_input_errors import Refusal
from unit.conftest import forget
from unit.image.base_images import PushedBase, debian
from unit.registries import Registry, docker_login, serving
from unit.support import PROFILE, envbuild, lock_for, plan_of

OLD, NEW = PushedBase([debian("3.11.1")]), PushedBase([debian("3.11.2")])


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry()) as found:
        yield found


@pytest.fixture(autouse=True)
def wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace uv: every package has one version."""
    monkeypatch.setattr(
        lock_creation_and_update,
        "_locked_wheels",
        lambda plan, *others: lock_creation_and_update._Chosen(lock_for(plan).wheels),
    )


def move(registry: Registry, base: PushedBase, tag: str = "v1") -> str:
    """Point the tag to an image. Return its name with its digest."""
    digest = base.push(registry)
    registry.manifests[tag] = registry.manifests[digest]
    return f"{registry.host}/team/base@{digest}"


def profile(registry: Registry, tag: str = "v1") -> dict[str, Any]:
    return {**PROFILE, "base": {"image": f"{registry.host}/team/base:{tag}"}, "apt": []}


def updated(project: Path, data: dict[str, Any], before: Lock | None, *upgrade: str) -> Lock:
    forget()
    return lock_creation_and_update.update_lock(plan_of(project, data), before, frozenset(upgrade))


def test_the_lock_records_the_tag_and_its_digest(registry: Registry, project: Path) -> None:
    image = move(registry, OLD)
    made = updated(project, profile(registry), None)
    tag = f"{registry.host}/team/base:v1"
    assert (made.image, made.image_tag, made.content["base"]) == (image, tag, {"image": image, "tag": tag})
    file = project / "profiles" / "sample.lock.yaml"
    lock_file.write(made, file, "sample")
    assert lock_file.read(file) == made
    dockerfile = container_definition_export.standalone_dockerfile(made, "sample")
    assert f"ARG BASE={image}\n" in dockerfile
    assert f"# The tag {tag} pointed to it when the lock was made.\n" in dockerfile


def test_a_tag_that_moves_changes_no_lock_without_an_upgrade(registry: Registry, project: Path) -> None:
    old = move(registry, OLD)
    first = updated(project, profile(registry), None)
    new = move(registry, NEW)
    registry.requests.clear()
    assert updated(project, profile(registry), first) is first
    changed = updated(project, {**profile(registry), "env": {"A": "b"}}, first)
    assert (changed.image, registry.requests) == (old, [])
    for upgrade in (BASE, EVERYTHING):
        after = updated(project, profile(registry), first, upgrade)
        assert (after.image, after.image_tag) == (new, first.image_tag)
        assert list(lock_changes.version_changes(first, after)) == [f"base image {old} -> {new}"]
    assert updated(project, profile(registry), first, "numpy").image == old


def test_another_tag_and_a_digest_are_looked_up_only_if_needed(registry: Registry, project: Path) -> None:
    first, new = move(registry, OLD), move(registry, NEW, "v2")
    before = updated(project, profile(registry), None)
    assert updated(project, profile(registry, "v2"), before).image == new
    registry.requests.clear()
    by_digest = {**PROFILE, "base": {"image": first}, "apt": []}
    after = updated(project, by_digest, before, EVERYTHING)
    assert (after.image, after.image_tag, registry.requests) == (first, None, [])


def test_a_tag_of_an_index_is_locked_as_the_index(registry: Registry, project: Path) -> None:
    index = {"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": []}
    digest = registry.put(oci_types.INDEX, index, "v1")
    assert str(updated(project, profile(registry), None).image).endswith(f"@{digest}")


def test_two_profiles_that_are_locked_together_get_one_digest(registry: Registry, project: Path) -> None:
    move(registry, OLD)
    tag = f"{registry.host}/team/base:v1"
    found = base_image_tag_lookup.image_of_tag(tag)
    move(registry, NEW)
    assert base_image_tag_lookup.image_of_tag(tag) == found


def test_a_registry_that_does_not_answer_is_an_error(project: Path) -> None:
    data = {**PROFILE, "base": {"image": "127.0.0.1:1/team/base:v1"}, "apt": []}
    with pytest.raises(
        NetworkError, match=r"the tag of the base image 127\.0\.0\.1:1/team/base:v1 cannot be"
    ) as caught:
        updated(project, data, None)
    assert "does not answer" in str(caught.value.hint) and "check the name and the network" in str(caught.value.hint)
    assert "docker login" not in str(caught.value.hint)


def test_a_missing_tag_and_a_missing_login_are_errors(
    registry: Registry, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProfileError, match=f"has no base image {registry.host}/team/base:v1"):
        updated(project, profile(registry), None)
    image = move(registry, OLD)
    registry.user, registry.password = "me", "secret"
    with pytest.raises(NetworkError) as caught:
        updated(project, profile(registry), None)
    assert "401" in str(caught.value.hint)
    docker_login(tmp_path, monkeypatch, **{registry.host: "me:secret"})
    assert updated(project, profile(registry), None).image == image


def test_the_digest_is_that_of_the_bytes_that_the_registry_sends(registry: Registry, project: Path) -> None:
    image = move(registry, OLD)
    media, raw = registry.manifests["v1"]
    headers = {"Content-Type": media, "Docker-Content-Digest": f"sha256:{'0' * 64}"}
    path = "/v2/team/base/manifests/v1"
    registry.lies[path] = (200, headers, raw)
    with pytest.raises(Refusal):
        updated(project, profile(registry), None)
    registry.lies[path] = (200, {"Content-Type": media}, raw)
    assert updated(project, profile(registry), None).image == image
    registry.lies[path] = (200, {"Content-Type": media}, b" " * (oci_types.MAX_MANIFEST + 1))
    with pytest.raises(Refusal):
        updated(project, profile(registry), None)


def test_the_tag_of_another_image_is_refused_in_a_lock(registry: Registry, project: Path) -> None:
    move(registry, OLD)
    made = updated(project, profile(registry), None)
    file = project / "profiles" / "sample.lock.yaml"
    lock_file.write(dataclasses.replace(made, image_tag="docker.io/other:v1"), file, "sample")
    with pytest.raises(LockError) as caught:
        lock_file.read(file)
    assert "different names" in str(caught.value.faults)


def test_lock_check_and_show_need_no_registry(
    registry: Registry, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(registry, OLD)
    plan_of(project, profile(registry))  # writes the profile
    assert envbuild("lock", "sample").code == 0
    move(registry, NEW)
    forget()
    registry.requests.clear()
    monkeypatch.setattr(Repository, "__init__", lambda *_: pytest.fail("asks the registry"))
    assert envbuild("lock", "--check", "sample").code == 0
    assert "(unchanged)" in envbuild("lock", "sample").stdout
    assert "lock: current" in envbuild("show", "sample").stdout
    assert registry.requests == []


def test_outdated_names_the_image_to_which_the_tag_points_now(
    registry: Registry, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outdated_pins, "_newest", lambda *_: {})
    old, plan = move(registry, OLD), plan_of(project, profile(registry))
    made = updated(project, profile(registry), None)
    assert outdated_pins.find_outdated(plan, made) == []
    new = move(registry, NEW)
    forget()
    assert outdated_pins.find_outdated(plan, made) == [outdated_pins.Outdated(BASE, old, new)]
    del registry.manifests["v1"]
    forget()
    missing = outdated_pins.Outdated(BASE, old, "tag missing in the registry")
    assert outdated_pins.find_outdated(plan, made) == [missing]
