"""Push to a real registry with TLS and a password, and back: verify, cosign, child images, saved images."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from envbuild.lock import lock_file

from .registries import USER
from .site import Team, installing, wheel
from .support import Project, Proved, Result, command, docker, handle, holding, in_layers

pytestmark = pytest.mark.engine

KINDS = ("https://in-toto.io/attestation/test-result/v0.1", "slsaprovenance1", "cyclonedx")
TRUST_NO_SERVICE = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}'


@dataclass(frozen=True)
class Site:
    """The profile `light`, proved and pushed by the team; `place` is its repository."""

    proved: Proved
    team: Team
    place: str
    pushed: Result

    @property
    def digest(self) -> str:
        return str(self.pushed.document["digest"])


@pytest.fixture(scope="module")
def site(light: Proved, team: Team, run_id: str) -> Site:
    place, team = f"{team.registry.host}/e2e-{run_id}/light", replace(team, project=light.project)
    pushed = team.push(light.name, place)
    assert pushed.code == 0, f"{pushed.stdout}\n{pushed.stderr}"
    return Site(light, team, place, pushed)


def test_a_pushed_image_is_verified_without_an_engine(site: Site) -> None:
    done = site.team.verify(f"{site.place}:verified", "--gpu", "cpu", "--max-age", "1d")
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    locked = lock_file.read(site.proved.project.lock(site.proved.name))
    assert locked
    (evidence,) = done.document["evidence"]
    assert (evidence["model"], evidence["state"], evidence["level"]) == ("cpu", "verified", "quick")
    assert {**done.document, "evidence": []} == {
        "reference": f"{site.place}:verified", "state": "verified", "digest": site.digest, "image": site.proved.id,
        "profile": site.proved.name, "lock": locked.id, "level": "quick", "gpus": ["cpu"], "evidence": [], "base": None,
        "changed_settings": {}, "unconfined": [], "environment": None, "reasons": [],
    }  # fmt: skip
    assert handle(f"{site.place}:verified") is None


def test_its_lock_gives_the_same_digests_everywhere(site: Site, run_id: str) -> None:
    """The digest of the manifest is also the same, in every repository; the layers are written again for this test."""
    done = site.team.rebuild(f"{site.place}:verified")
    assert (done.code, done.document["state"]) == (0, "verified"), f"{done.stdout}\n{done.stderr}"
    assert "the lock gives the same image" in done.stderr
    other = site.team.push(site.proved.name, f"{site.team.registry.host}/e2e-{run_id}/other")
    assert (other.code, other.document["digest"]) == (0, site.digest), f"{other.stdout}\n{other.stderr}"


def test_a_missing_login_is_reported(site: Site) -> None:
    done = site.team.verify(f"{site.place}:verified", login=site.team.registry.stranger)
    assert (done.code, f"docker login {site.team.registry.host}" in done.words) == (7, True)


def test_a_second_push_has_nothing_to_do(site: Site) -> None:
    done = site.team.push(site.proved.name, site.place)
    assert (done.code, done.document) == (0, site.pushed.document)
    steps = [line.split("  ")[1] for line in done.stderr.splitlines() if "up to date" in line]
    assert steps[-3:] == ["push image", "evidence", "tags"]


@pytest.fixture(scope="module")
def other_key(site: Site, workplace: Path) -> Path:
    """A public key with which nothing was signed."""
    made = site.proved.project.run("keygen", "-o", str(workplace / "stranger"), ENVBUILD_KEY_PASSPHRASE="x")
    assert made.code == 0, made.stderr
    return workplace / "stranger.pub"


@pytest.mark.parametrize("form", ["older", "bundle"])
@pytest.mark.parametrize("kind", KINDS)
def test_cosign_reads_it(site: Site, cosign: Path, other_key: Path, workplace: Path, kind: str, form: str) -> None:
    root = workplace / "root.json"
    root.write_text(TRUST_NO_SERVICE, encoding="utf-8")
    newer = ("--new-bundle-format", "--trusted-root", root) if form == "bundle" else ()
    verification = (
        "verify-attestation",
        "--insecure-ignore-tlog",
        *newer,
        "--type",
        kind,
        f"{site.place}@{site.digest}",
    )
    env = {"DOCKER_CONFIG": str(site.team.registry.login), "SSL_CERT_FILE": str(site.team.registry.authority)}
    assert '"payload"' in command(cosign, *verification, "--key", site.team.public, env=env)
    with pytest.raises(AssertionError, match="accepted signatures do not match"):
        command(cosign, *verification, "--key", other_key, env=env)


def test_killed_at_each_step_verified_is_not_there_and_the_next_push_finishes(
    site: Site, scratch: Path, run_id: str
) -> None:
    place = f"{site.team.registry.host}/e2e-{run_id}/killed"
    project = site.proved.project.with_env(**site.team.login, **site.team.signing)
    for step in ("push image", "evidence", "tags"):
        project.hold(scratch / step, f"{step} start", "push", site.proved.name, place).kill()
        assert site.team.verify(f"{place}:verified").code == 7
    assert site.team.push(site.proved.name, place).code == 0
    assert site.team.reasons(f"{place}:verified") == []


def test_packed_with_zstd_it_is_verified_and_pulled_as_the_same_image(site: Site, run_id: str) -> None:
    place = f"{site.team.registry.host}/e2e-{run_id}/zstd"
    done = site.team.push(site.proved.name, place, "--zstd")
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    assert done.document["digest"] != site.digest
    assert site.team.reasons(f"{place}:verified", "--gpu", "cpu") == []
    docker("pull", "--quiet", f"{place}:verified", env=site.team.login)
    try:
        is_what = ("image", "inspect", "--format", "{{json .RootFS}} {{json .Config}} {{.Created}}")
        assert docker(*is_what, f"{place}:verified") == docker(*is_what, site.proved.tag)
    finally:
        docker("image", "rm", f"{place}:verified")
    again = site.team.push(site.proved.name, place)  # the existing compression is kept
    assert (again.code, again.document) == (0, done.document)


# child images


@pytest.fixture
def child(site: Site, scratch: Path, run_id: str) -> Iterator[str]:
    yield f"{site.team.registry.host}/e2e-{run_id}/app"
    for tag in docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"*/e2e-{run_id}/app").split():
        docker("image", "rm", tag)


def build(site: Site, name: str, folder: Path, installed: str, version: str, more: str = "") -> None:
    wheels = wheel(folder, installed, version).parent
    site.team.build_child(site.proved.tag, name, folder, f"{installing(installed, version)}\n{more}", wheels=wheels)


def test_a_child_that_adds_a_package_is_verified_by_its_base(site: Site, child: str, scratch: Path) -> None:
    """Its steps also import torch, which writes bytecode, and change settings."""
    more = 'RUN python -c "import torch"\nENV APP_PORT=1\nWORKDIR /app\nCMD ["serve"]'
    build(site, f"{child}:app", scratch, "harmless", "1.0", more)
    assert site.team.reasons(f"{child}:app") == ["no-evidence", "base"]
    found = site.team.verify(f"{child}:app", "--base", site.place)
    assert (found.code, found.document["base"]) == (0, f"{site.place}@{site.digest}"), found.stdout
    assert found.document["changed_settings"] == {"Cmd": ["serve"], "Env": {"APP_PORT": "1"}, "WorkingDir": "/app"}


@pytest.mark.parametrize("how", ["install", "remove", "preload"])
def test_a_child_that_touches_a_locked_library_is_refused(site: Site, child: str, scratch: Path, how: str) -> None:
    name = "mpmath" if how == "install" else "harmless"
    more = {"remove": "RUN pip uninstall --yes mpmath", "preload": "ENV LD_PRELOAD=/x.so"}.get(how, "")
    build(site, f"{child}:{how}", scratch, name, "9.9", more)
    found = site.team.reasons(f"{child}:{how}", "--base", site.place)
    assert set(found) == {"environment" if how == "preload" else "replaced"}


# on another machine


def test_a_bundle_is_verified_and_loaded_on_the_other_side(site: Site, scratch: Path) -> None:
    project, file = site.proved.project, scratch / "quick.tar"
    done = project.run("save", site.proved.name, "-o", str(file), **site.team.signing)
    assert done.code == 0, done.stderr
    other = Project.create(scratch / "elsewhere")
    before = handle(site.proved.tag)
    assert before
    refused = other.run("load", str(file), "--json")
    assert (refused.code, refused.document["reasons"][0]["id"]) == (5, "no-key")
    loaded = other.run("load", str(file), "--key", str(site.team.public), "--json")
    assert loaded.code == 0, f"{loaded.stdout}\n{loaded.stderr}"
    assert loaded.document["tag"] == site.proved.tag
    docker("tag", before, site.proved.tag)


def test_a_pinned_dockerfile_names_the_digest(site: Site, scratch: Path) -> None:
    file = scratch / "Dockerfile"
    file.write_text(f"FROM {site.place}:verified\n", encoding="utf-8")
    env = site.team.login
    assert site.proved.project.run("pin-digests", "--check", str(file), **env).code == 8
    assert site.proved.project.run("pin-digests", str(file), **env).code == 0
    assert file.read_text(encoding="utf-8") == f"FROM {site.place}:verified@{site.digest}\n"
    assert site.proved.project.run("pin-digests", "--check", str(file), **env).code == 0


def test_no_secret_is_anywhere(site: Site, workplace: Path) -> None:
    """test_clones also builds the same image with different secrets."""
    team, project = site.team, site.proved.project
    login = base64.b64encode(f"{USER}:{team.registry.password}".encode()).decode()
    private = "".join(team.public.with_suffix(".key").read_text(encoding="utf-8").splitlines()[1:3])
    authority = team.registry.authority.read_text(encoding="utf-8").splitlines()[2]
    known = [team.passphrase, team.index, team.registry.password, login, private, authority]
    output = site.pushed.stdout + site.pushed.stderr + team.verify(f"{site.place}:verified").stdout
    output += docker("history", "--no-trunc", site.proved.tag) + docker("inspect", site.proved.tag)
    places = (project.state, project.folder, workplace / "registry" / "data")
    for secret in known:
        assert secret not in output
        assert holding(secret, *places) == []
    assert not in_layers(site.proved.tag, [secret.encode() for secret in known])
    locked = lock_file.read(project.lock(site.proved.name))
    assert locked
    assert holding(locked.wheels[0].wheel.sha256, places[-1])  # control: a value that is in a statement is found
