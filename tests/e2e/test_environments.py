"""The proof of an environment goes through a real registry: `install`, `test --record`, `push --python`, and `verify
--python` on another machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from envbuild.lock import lock_file
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository

from .site import NO_ENGINE, Team
from .support import CHECKOUT, REQUIRED, Project, Result, Running

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Machine:
    """A project with its own state, an environment from its lock, and a key."""

    project: Project
    name: str
    team: Team
    key: Path
    place: str

    @classmethod
    def create(cls, root: Path, name: str, team: Team, key: Path, place: str) -> Machine:
        project = Project.create(root).with_required_alone()
        project.write(name, extends="cpu", selftest={"level": "quick", "require": list(REQUIRED)})
        shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", project.lock(name))
        installed = project.run("install", name, str(root / "venv"))
        assert installed.code == 0, installed.stderr
        return cls(project, name, team, key, place)

    @property
    def venv(self) -> Path:
        return self.project.folder.parent / "venv"

    @property
    def tag(self) -> str:
        lock = lock_file.read(self.project.lock(self.name))
        assert lock
        return f"environment-{lock.short}"

    @property
    def signing(self) -> Mapping[str, str]:
        return {**self.team.signing, "ENVBUILD_SIGNING_KEY": str(self.key.with_suffix(".key"))}

    def record(self) -> None:
        done = self.project.run("test", self.name, "--python", str(self.venv), "--record", **self.signing)
        assert done.code == 0, f"{done.stdout}\n{done.stderr}"

    def start_push(self, *arguments: str) -> Running:
        words = ("push", self.name, self.place, "--python", str(self.venv), "--json", *arguments)
        return self.project.start(*words, **self.team.login, **self.signing, **NO_ENGINE)

    def verify(self, key: Path, *arguments: str, login: Path | None = None, tag: str = "") -> Result:
        config = str(login or self.team.registry.login)
        words = ("verify", f"{self.place}{tag}", "--python", str(self.venv), "--key", str(key), "--json", *arguments)
        return self.project.run(*words, DOCKER_CONFIG=config, **NO_ENGINE)


@pytest.fixture(scope="module")
def first(team: Team, workplace: Path, run_id: str) -> Machine:
    place = f"{team.registry.host}/e2e-{run_id}/environment"
    made = Machine.create(workplace / "first", f"e2e-env-{run_id}", team, team.public, place)
    made.record()
    return made


@pytest.fixture(scope="module")
def other(first: Machine, workplace: Path) -> Machine:
    """Another machine with an equal environment."""
    return Machine.create(workplace / "second", first.name, first.team, first.key, first.place)


@pytest.fixture(scope="module")
def second(first: Machine, other: Machine, workplace: Path) -> Machine:
    """The other machine, which has proved its environment with its own key."""
    key = workplace / "second-key"
    words = {"ENVBUILD_KEY_PASSPHRASE": first.team.passphrase}
    assert first.project.run("keygen", "-o", str(key), **words).code == 0
    made = replace(other, key=key.with_suffix(".pub"))
    made.record()
    return made


@pytest.fixture(scope="module")
def pushed(first: Machine) -> Result:
    done = first.start_push().finish()
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    return done


def test_an_equal_environment_elsewhere_is_verified(first: Machine, pushed: Result, other: Machine) -> None:
    """The other machine has no evidence, no image and no engine. It must still be equal for the other tests."""
    document = pushed.document
    assert (document["state"], document["image"], document["statements"]) == ("complete", None, 1)
    assert document["tags"] == [f"{first.place}:{first.tag}", f"{first.place}:environment"]
    for tag in ("", f":{first.tag}", f"@{document['digest']}"):
        done = other.verify(first.key, "--profile", first.name, "--gpu", "cpu", tag=tag)
        assert (done.code, done.document["environment"]) == (0, document["environment"]), (
            f"{done.stdout}\n{done.stderr}"
        )
    file = next(other.venv.glob("lib/python3.*/site-packages/torch/version.py"))
    text = file.read_text(encoding="utf-8")
    file.unlink()  # it is linked to uv's cache
    file.write_text(f"{text}# changed\n", encoding="utf-8")
    changed = other.verify(first.key)
    file.write_text(text, encoding="utf-8")
    assert changed.code == 5 and "files of the locked distributions changed" in changed.words, changed.stdout


def test_pushed_again_it_is_the_same(first: Machine, pushed: Result) -> None:
    again = first.start_push().finish()
    assert (again.code, again.document["digest"]) == (0, pushed.document["digest"]), again.stderr


def test_a_missing_login_is_reported(first: Machine, pushed: Result) -> None:
    done = first.verify(first.key, login=first.team.registry.stranger)
    assert (done.code, f"docker login {first.team.registry.host}" in done.words) == (7, True)


def test_two_machines_that_push_at_the_same_time_lose_nothing(
    first: Machine, second: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is verified with each machine's key. Then the list of statements is replaced by the first
    machine's, as a push does that read the list before the second machine wrote it."""
    running = [machine.start_push() for machine in (first, second)]
    for done in (one.finish() for one in running):
        assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    for machine in (first, second):
        done = first.verify(machine.key)
        assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    monkeypatch.setenv("DOCKER_CONFIG", str(first.team.registry.login))
    place = Repository(Reference.parse(first.place))
    (own, *others) = [tag for tag in place.tags() if tag.startswith(f"{first.tag}-")]
    assert len(others) == 1, "a tag for each statement"
    for tag in (own, *others):
        statement = place.manifest(tag)
        assert statement
        for listed in (first.tag, "environment"):
            place.put_manifest(listed, statement)
        for machine in (first, second):
            assert first.verify(machine.key, tag=f":{first.tag}").code == 0


def test_without_a_key_nothing_is_pushed(first: Machine) -> None:
    words = ("push", first.name, first.place, "--python", str(first.venv), "--json")
    done = first.project.run(*words, **first.team.login, **NO_ENGINE)
    assert done.code == 2 and "refuses such evidence" in done.words, done.stdout
