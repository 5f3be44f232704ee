"""From this machine to a real registry with TLS and a password, and back: push, verify, cosign, children, bundles."""

from __future__ import annotations

import base64
import secrets
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .registries import USER, Registry
from .support import Project, Proved, Result, command, docker, handle, in_layers

pytestmark = pytest.mark.engine

KINDS = ("https://in-toto.io/attestation/test-result/v0.1", "slsaprovenance1", "cyclonedx")
TRUST_NO_SERVICE = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}'


@dataclass(frozen=True)
class Site:
    """The profile `quick`, proved and signed by a key of its own, in a registry. `place` is its repository there."""

    proved: Proved
    registry: Registry
    place: str
    passphrase: str
    public: Path
    pushed: Result

    @property
    def digest(self) -> str:
        return str(self.pushed.document["digest"])

    @property
    def signing(self) -> dict[str, str]:
        key = str(self.public.with_suffix(".key"))
        return {"ENVBUILD_SIGNING_KEY": key, "ENVBUILD_KEY_PASSPHRASE": self.passphrase}

    def push(self, place: str | None = None) -> Result:
        wanted = ("push", self.proved.name, place or self.place, "--json")
        return self.proved.project.run(*wanted, DOCKER_CONFIG=str(self.registry.login), **self.signing)

    def verify(self, ref: str, *arguments: str, login: Path | None = None) -> Result:
        """Where there is no engine."""
        config = str(login or self.registry.login)
        wanted = ("verify", ref, "--key", str(self.public), *arguments, "--json")
        return self.proved.project.run(*wanted, DOCKER_CONFIG=config, DOCKER_HOST="unix:///nowhere")

    def reasons(self, ref: str, *arguments: str) -> list[str]:
        done = self.verify(ref, *arguments)
        found = [reason["id"] for reason in done.document["reasons"]]
        assert done.code == (5 if found else 0), f"{done.stdout}\n{done.stderr}"
        return found


@pytest.fixture(scope="module")
def site(quick: Proved, registry: Registry, workplace: Path, run_id: str) -> Site:
    passphrase, key = secrets.token_hex(16), workplace / "team"
    made = quick.project.run("keygen", "-o", str(key), ENVBUILD_KEY_PASSPHRASE=passphrase)
    assert made.code == 0, made.stderr
    place = f"{registry.host}/e2e-{run_id}/quick"
    before = Site(quick, registry, place, passphrase, key.with_suffix(".pub"), made)
    pushed = before.push()
    assert pushed.code == 0, f"{pushed.stdout}\n{pushed.stderr}"
    return Site(quick, registry, place, passphrase, key.with_suffix(".pub"), pushed)


def test_what_was_pushed_is_verified_without_an_engine(site: Site) -> None:
    done = site.verify(f"{site.place}:verified", "--gpu", "cpu", "--max-age", "1d")
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    assert done.document == {
        "ref": f"{site.place}:verified", "digest": site.digest, "verified": True, "gpus": ["cpu"], "reasons": [],
    }  # fmt: skip
    assert handle(f"{site.place}:verified") is None


def test_without_a_login_it_says_so(site: Site) -> None:
    done = site.verify(f"{site.place}:verified", login=site.registry.stranger)
    assert (done.code, f"docker login {site.registry.host}" in done.words) == (7, True)


def test_pushed_again_there_is_nothing_to_do(site: Site) -> None:
    done = site.push()
    assert (done.code, done.document) == (0, site.pushed.document)
    steps = [line.split("  ")[1] for line in done.stderr.splitlines() if "up to date" in line]
    assert steps[-3:] == ["push image", "evidence", "tags"]


@pytest.mark.parametrize("form", ["older", "bundle"])
@pytest.mark.parametrize("kind", KINDS)
def test_cosign_reads_it(site: Site, cosign: Path, workplace: Path, kind: str, form: str) -> None:
    root = workplace / "root.json"
    root.write_text(TRUST_NO_SERVICE, encoding="utf-8")
    newer = ("--new-bundle-format", "--trusted-root", root) if form == "bundle" else ()
    asked = ("verify-attestation", "--insecure-ignore-tlog", *newer, "--type", kind, f"{site.place}@{site.digest}")
    env = {"DOCKER_CONFIG": str(site.registry.login), "SSL_CERT_FILE": str(site.registry.authority)}
    assert '"payload"' in command(cosign, *asked, "--key", site.public, env=env)
    other = workplace / f"other-{form}-{KINDS.index(kind)}"
    site.proved.project.run("keygen", "-o", str(other), ENVBUILD_KEY_PASSPHRASE="x")
    with pytest.raises(AssertionError, match="accepted signatures do not match"):
        command(cosign, *asked, "--key", other.with_suffix(".pub"), env=env)


def test_killed_before_the_tags_verified_is_not_there_and_the_next_push_finishes(
    site: Site, scratch: Path, run_id: str
) -> None:
    place = f"{site.registry.host}/e2e-{run_id}/killed"
    env = {"DOCKER_CONFIG": str(site.registry.login), **site.signing}
    project = site.proved.project.with_env(**env)
    running = project.hold(scratch / "holding", "tags start", "push", site.proved.name, place)
    running.kill()
    assert site.verify(f"{place}:verified").code == 7
    assert site.push(place).code == 0
    assert site.reasons(f"{place}:verified") == []


# images that are built on it


def wheel(folder: Path, name: str, version: str) -> Path:
    file = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: e2e\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


@pytest.fixture
def child(site: Site, scratch: Path, run_id: str) -> Iterator[str]:
    yield f"{site.registry.host}/e2e-{run_id}/app"
    for tag in docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"*/e2e-{run_id}/app").split():
        docker("image", "rm", tag)


def build(site: Site, name: str, folder: Path, installed: Path, more: str = "") -> None:
    text = f"FROM {site.proved.tag}\nCOPY {installed.name} /tmp/\n"
    text += f"RUN --network=none pip install --no-index --no-deps /tmp/{installed.name}\n{more}"
    (folder / "Dockerfile").write_text(text, encoding="utf-8")
    docker("buildx", "build", "--quiet", "--load", "--provenance=false", "--tag", name, folder)
    docker("push", "--quiet", name, env={"DOCKER_CONFIG": str(site.registry.login)})


def test_a_child_that_adds_a_package_is_verified_by_its_base(site: Site, child: str, scratch: Path) -> None:
    build(site, f"{child}:good", scratch, wheel(scratch, "harmless", "1.0"), 'RUN python -c "import torch"\n')
    assert site.reasons(f"{child}:good") == ["no-evidence", "base"]
    assert site.reasons(f"{child}:good", "--base", site.place) == []


@pytest.mark.parametrize("how", ["install", "remove", "preload"])
def test_a_child_that_touches_a_locked_library_is_refused(site: Site, child: str, scratch: Path, how: str) -> None:
    name = "mpmath" if how == "install" else "harmless"
    more = {"remove": "RUN pip uninstall --yes mpmath\n", "preload": "ENV LD_PRELOAD=/x.so\n"}.get(how, "")
    build(site, f"{child}:{how}", scratch, wheel(scratch, name, "9.9"), more)
    found = site.reasons(f"{child}:{how}", "--base", site.place)
    assert set(found) == {"environment" if how == "preload" else "replaced"}


# elsewhere


def test_a_bundle_is_verified_and_loaded_on_the_other_side(site: Site, scratch: Path) -> None:
    project, file = site.proved.project, scratch / "quick.tar"
    done = project.run("bundle", "export", site.proved.name, "-o", str(file), **site.signing)
    assert done.code == 0, done.stderr
    other = Project.create(scratch / "elsewhere")
    before = handle(site.proved.tag)
    assert before
    refused = other.run("bundle", "import", str(file), "--json")
    assert (refused.code, refused.document["reasons"][0]["id"]) == (5, "no-key")
    loaded = other.run("bundle", "import", str(file), "--key", str(site.public), "--json")
    assert loaded.code == 0, f"{loaded.stdout}\n{loaded.stderr}"
    assert loaded.document["tag"] == site.proved.tag
    docker("tag", before, site.proved.tag)


def test_the_lock_in_the_evidence_gives_the_same_image(site: Site, run_id: str) -> None:
    wanted = ("verify", f"{site.place}:verified", "--key", str(site.public), "--rebuild", "--json")
    done = site.proved.project.run(*wanted, DOCKER_CONFIG=str(site.registry.login))
    assert (done.code, done.document["verified"]) == (0, True), f"{done.stdout}\n{done.stderr}"
    assert docker("image", "ls", "--quiet", f"envbuild/{site.proved.name}-rebuild") == ""


def test_another_clone_with_another_zone_locale_and_user_gives_the_same_image(
    site: Site, scratch: Path, run_id: str
) -> None:
    name, other = f"e2e-clone-{run_id}", Project.create(scratch / "a" / "deeper" / "place")
    shutil.copy(site.proved.project.profile(site.proved.name), other.profile(name))
    shutil.copy(site.proved.project.lock(site.proved.name), other.lock(name))
    somebody = {"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "LANG": "C", "USER": "somebody", "LOGNAME": "somebody"}
    done = other.run("build", name, "--no-cache", "--locked", "--json", **somebody)
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    assert done.document["image"]["id"] == site.proved.id


def test_a_pinned_dockerfile_names_the_digest(site: Site, scratch: Path) -> None:
    file = scratch / "Dockerfile"
    file.write_text(f"FROM {site.place}:verified\n", encoding="utf-8")
    env = {"DOCKER_CONFIG": str(site.registry.login)}
    assert site.proved.project.run("pin", "--check", str(file), **env).code == 8
    assert site.proved.project.run("pin", str(file), **env).code == 0
    assert file.read_text(encoding="utf-8") == f"FROM {site.place}:verified@{site.digest}\n"
    assert site.proved.project.run("pin", "--check", str(file), **env).code == 0


def test_no_secret_is_anywhere(site: Site, workplace: Path) -> None:
    login = base64.b64encode(f"{USER}:{site.registry.password}".encode()).decode()
    known = [site.passphrase, site.registry.password, login]
    told = site.pushed.stdout + site.pushed.stderr + site.verify(f"{site.place}:verified").stdout
    told += docker("history", "--no-trunc", site.proved.tag) + docker("inspect", site.proved.tag)
    written = [path for root in (site.proved.project.state, site.proved.project.folder, workplace / "registry" / "data")
               for path in root.rglob("*") if path.is_file() and path.stat().st_size < 50_000_000]  # fmt: skip
    for secret in known:
        assert secret not in told
        assert [path for path in written if secret.encode() in path.read_bytes()] == []
    private = site.public.with_suffix(".key").read_bytes()
    assert [path for path in written if private[40:200] in path.read_bytes()] == []
    assert not in_layers(site.proved.tag, [secret.encode() for secret in known])
