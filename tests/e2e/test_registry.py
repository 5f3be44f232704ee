"""A base from a private registry: TLS by an authority of our own, user and password, no mmdebstrap."""

from __future__ import annotations

import base64
import io
import secrets
import shutil
import ssl
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from envbuild.image import base
from envbuild.plan import lock

from .support import Project, Proved, command, docker, handle, inspect, path_without, until

pytestmark = pytest.mark.engine

USER = "reader"


@dataclass(frozen=True)
class Registry:
    """`login` is a DOCKER_CONFIG that may pull, `stranger` one that may not; `base` an image in it, by digest."""

    host: str
    password: str
    login: Path
    stranger: Path
    base: str


@pytest.fixture(scope="module")
def program(workplace: Path) -> Path:
    """Debian's docker-registry: the one installed, else unpacked from its package."""
    installed = shutil.which("docker-registry")
    if installed:
        return Path(installed)
    if not shutil.which("apt-get"):
        pytest.skip("no docker-registry is installed, and there is no apt-get to fetch it with")
    folder = workplace / "registry-package"
    folder.mkdir()
    done = subprocess.run(["apt-get", "download", "docker-registry"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    command("dpkg", "-x", next(folder.glob("*.deb")), folder)
    return folder / "usr" / "bin" / "docker-registry"


@pytest.fixture(scope="module")
def address(engine: None, run_id: str) -> Iterator[str]:
    """An address of this machine that is not loopback, for which an engine checks no certificate."""
    network = f"e2e-{run_id}"
    docker("network", "create", network)
    yield docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", network).strip()
    docker("network", "rm", network)


@pytest.fixture(scope="module")
def registry(program: Path, address: str, quick: Proved, workplace: Path, run_id: str) -> Iterator[Registry]:
    folder = workplace / "registry"
    folder.mkdir()
    password = secrets.token_hex(16)
    command(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=envbuild e2e", "-addext", f"subjectAltName=IP:{address}",
        "-keyout", folder / "key.pem", "-out", folder / "ca.pem",
    )  # fmt: skip
    hashed = command("perl", "-e", "print crypt($ARGV[0], q($2y$05$) . $ARGV[1])", password, secrets.token_hex(11))
    (folder / "htpasswd").write_text(f"{USER}:{hashed}\n", encoding="utf-8")
    host = f"{address}:5443"
    (folder / "config.yml").write_text(
        f"""version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http:
  addr: {host}
  secret: {secrets.token_hex(8)}
  tls: {{certificate: {folder}/ca.pem, key: {folder}/key.pem}}
auth: {{htpasswd: {{realm: e2e, path: {folder}/htpasswd}}}}
""",
        encoding="utf-8",
    )
    trusted = Path("/etc/docker/certs.d") / host
    log = (folder / "log").open("wb")
    with subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=log) as process:
        try:
            until(f"the registry to answer, see {folder}/log", lambda: answers(host, folder / "ca.pem"))
            login, stranger = folder / "login", folder / "stranger"
            stranger.mkdir()
            with pytest.raises(AssertionError, match="certificate"):
                log_in(host, password, login)  # the engine does check
            trusted.mkdir(parents=True)
            shutil.copy(folder / "ca.pem", trusted / "ca.crt")
            log_in(host, password, login)
            yield Registry(host, password, login, stranger, push(host, quick, login, run_id))
        finally:
            shutil.rmtree(trusted, ignore_errors=True)
            process.terminate()


def answers(host: str, authority: Path) -> bool:
    """Whether the registry is up, and lets nobody in."""
    try:
        urllib.request.urlopen(f"https://{host}/v2/", context=ssl.create_default_context(cafile=str(authority)))
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    raise AssertionError("the registry asks for no password")


def log_in(host: str, password: str, config: Path) -> None:
    docker("login", "--username", USER, "--password-stdin", host, stdin=password, env={"DOCKER_CONFIG": str(config)})


def push(host: str, quick: Proved, login: Path, run_id: str) -> str:
    """Our own bookworm base as an image in the registry, by digest, and no longer in the engine."""
    found = lock.read(quick.project.lock(quick.name))
    assert found
    return push_tar(host, base.tar_file(found), login, f"{host}/e2e-{run_id}:base")


def push_tar(host: str, tar: Path, login: Path, name: str) -> str:
    docker("import", tar, name)
    docker("push", "--quiet", name, env={"DOCKER_CONFIG": str(login)})
    (digest,) = (item for item in inspect(name)["RepoDigests"] if item.startswith(host))
    docker("image", "rm", name)
    assert handle(name) is None
    return str(digest)


@pytest.fixture(scope="module")
def private(registry: Registry, workplace: Path) -> Project:
    return Project.create(workplace / "from-registry").with_env(
        PATH=path_without(workplace / "no-mmdebstrap", "mmdebstrap")
    )


@pytest.fixture(scope="module")
def name(private: Project, registry: Registry, run_id: str) -> str:
    made = f"e2e-registry-{run_id}"
    private.write(
        made, base={"image": registry.base}, python="3.11", torch="2.13.0+cpu", packages=["numpy"],
        selftest={"level": "quick", "require": ["env.libs", "gemm.exact"]},
    )  # fmt: skip
    return made


def test_without_a_login_it_says_so(private: Project, name: str, registry: Registry) -> None:
    done = private.run("build", name, "--json", DOCKER_CONFIG=str(registry.stranger))
    assert (done.code, done.error["kind"]) == (7, "network")
    assert registry.base in done.error["message"]
    assert "401" in done.words or "authoriz" in done.words or "authentication" in done.words
    assert f"docker login {registry.host}" in done.error["hint"]
    assert [step["name"] for step in done.document["steps"]] == ["load profile", "resolve", "lock", "render"]


def test_with_a_login_it_is_made_and_verified(private: Project, name: str, registry: Registry) -> None:
    done = private.run("make", name, "--json", DOCKER_CONFIG=str(registry.login))
    assert (done.code, done.document.get("status")) == (0, "verified"), f"{done.stdout}\n{done.stderr}"
    found = lock.read(private.lock(name))
    assert found
    assert (found.image, found.base) == (registry.base, ())
    assert f"FROM {registry.base}\n" in private.dockerfile(name).read_text(encoding="utf-8")

    tag = done.document["image"]["tags"][0]
    known = [registry.password, base64.b64encode(f"{USER}:{registry.password}".encode()).decode()]
    written = [path for root in (private.state, private.folder) for path in root.rglob("*") if path.is_file()]
    told = docker("history", "--no-trunc", tag) + docker("inspect", tag) + done.stdout + done.stderr
    for secret in known:
        assert secret not in told
        assert [path for path in written if secret.encode() in path.read_bytes()] == []
    assert not in_layers(tag, [secret.encode() for secret in known])


def test_a_devel_image_is_asked_in_the_build_what_its_nvcc_is(
    indexed: Project, registry: Registry, quick: Proved, run_id: str, scratch: Path
) -> None:
    """What a base holds is not known before it is pulled."""
    found = lock.read(quick.project.lock(quick.name))
    assert found
    shutil.copy(base.tar_file(found), scratch / "devel.tar")
    script = b"#!/bin/sh\necho 'Cuda compilation tools, release 12.6, V12.6.85'\n"
    member = tarfile.TarInfo("./usr/local/cuda/bin/nvcc")
    member.size, member.mode = len(script), 0o755
    with tarfile.open(scratch / "devel.tar", "a") as tar:
        tar.addfile(member, io.BytesIO(script))
    image = push_tar(registry.host, scratch / "devel.tar", registry.login, f"{registry.host}/e2e-{run_id}:devel")
    name = f"e2e-devel-{run_id}"
    indexed.write(name, base={"image": image}, python="3.11", torch="2.7.1", gpus=["a100"], variant="devel",
                  toolchain="base")  # fmt: skip
    done = indexed.run("build", name, "--json", DOCKER_CONFIG=str(registry.login))
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    tag = done.document["image"]["tags"][0]
    assert "release 12.6" in docker("run", "--rm", "--network", "none", tag, "nvcc", "--version")

    indexed.change(name, torch="2.6.0")
    other = indexed.run("build", name, "--json", DOCKER_CONFIG=str(registry.login))
    assert (other.code, other.error["kind"]) == (6, "build")
    assert "install: /usr/local/cuda/bin/nvcc is of CUDA 12.6, torch of 12.4" in other.error["hint"]


def in_layers(reference: str, secrets_: list[bytes]) -> bool:
    """Whether any of the secrets is in what the engine saves of the image: its metadata and its layers, as they are."""
    longest = max(map(len, secrets_))
    found, kept = False, b""
    with subprocess.Popen([shutil.which("docker") or "docker", "save", reference], stdout=subprocess.PIPE) as process:
        assert process.stdout
        while block := process.stdout.read(1 << 22):
            text = kept + block
            found = found or any(secret in text for secret in secrets_)
            kept = text[-longest:]
    assert process.returncode == 0
    return found
