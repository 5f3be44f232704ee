"""A real registry: Debian's, with TLS by an authority of our own, user and password; and cosign, to read it."""

from __future__ import annotations

import secrets
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import openregistry
from .support import command, docker, until

USER = "reader"
SUITE = "trixie"  # bookworm has no cosign; trixie's package also runs on bookworm
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def unpacked(workplace: Path, package: str) -> Path:
    """Return a folder with an unpacked Debian package, which is not installed. Skips on systems other than Debian."""
    if not shutil.which("apt-get"):
        pytest.skip(f"{package} is not installed, and apt-get is missing")
    folder = workplace / "packages" / package
    openregistry.unpack(package, folder)
    return folder


@dataclass(frozen=True)
class Registry:
    """`login`: a DOCKER_CONFIG that may pull and push; `stranger`: a DOCKER_CONFIG that may not; `authority`: the CA of
    its certificate."""

    host: str
    password: str
    login: Path
    stranger: Path
    authority: Path


@pytest.fixture(scope="session")
def program(workplace: Path) -> Path:
    """Return Debian's docker-registry: the installed one, else unpacked from its package."""
    found = openregistry.program(workplace / "packages" / "docker-registry")
    if found is None:
        pytest.skip("docker-registry is not installed, and apt-get is missing")
    return found


@pytest.fixture(scope="session")
def cosign(workplace: Path) -> Path:
    """Return cosign: the installed one, else unpacked from trixie's package, by a separate apt configuration."""
    installed = shutil.which("cosign")
    if installed:
        return Path(installed)
    if not shutil.which("apt-get") or not KEYRING.is_file():
        pytest.skip("cosign is not installed, and it can only be downloaded on Debian")
    targets = command("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian")
    apt = workplace / "apt"
    for folder in ("lists/partial", "archives/partial", "debs"):
        (apt / folder).mkdir(parents=True)
    (apt / "sources.list").write_text(
        f"deb [signed-by={KEYRING}] {targets.split()[0]} {SUITE} main\n", encoding="utf-8"
    )
    options = {"Dir::State": apt, "Dir::State::status": "/dev/null", "Dir::Cache": apt,
               "Dir::Etc::sourcelist": apt / "sources.list", "Dir::Etc::sourceparts": "/dev/null",
               "Dir::Etc::preferences": "/dev/null", "Dir::Etc::preferencesparts": "/dev/null",
               "APT::Default-Release": "", "Acquire::Languages": "none", "APT::Sandbox::User": "root"}  # fmt: skip
    get = ["apt-get", "-qq", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
    command(*get, "update")
    subprocess.run([*get, "download", "cosign"], cwd=apt / "debs", check=True, capture_output=True, timeout=240)
    command("dpkg", "-x", next((apt / "debs").glob("*.deb")), apt / "tree")
    return apt / "tree" / "usr" / "bin" / "cosign"


@pytest.fixture(scope="session")
def address(engine: None, run_id: str) -> Iterator[str]:
    """Return an address of this machine that is not loopback: for loopback, an engine checks no certificate."""
    network = f"e2e-{run_id}"
    docker("network", "create", network)
    yield docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", network).strip()
    docker("network", "rm", network)


@pytest.fixture(scope="session")
def registry(program: Path, address: str, workplace: Path) -> Iterator[Registry]:
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
    shutil.rmtree(trusted, ignore_errors=True)  # left by a run that was killed
    log = (folder / "log").open("wb")
    with subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=log) as process:
        try:
            until(f"the registry to answer, see {folder}/log", lambda: answers(host, folder / "ca.pem"))
            login, stranger = folder / "login", folder / "stranger"
            stranger.mkdir()
            with pytest.raises(AssertionError, match="certificate"):
                log_in(host, password, login)  # the engine checks the certificate
            trusted.mkdir(parents=True)
            shutil.copy(folder / "ca.pem", trusted / "ca.crt")
            log_in(host, password, login)
            yield Registry(host, password, login, stranger, folder / "ca.pem")
        finally:
            shutil.rmtree(trusted, ignore_errors=True)
            process.terminate()


def answers(host: str, authority: Path) -> bool:
    """Whether the registry is up, and refuses anonymous access."""
    try:
        urllib.request.urlopen(f"https://{host}/v2/", context=ssl.create_default_context(cafile=str(authority)))
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    raise AssertionError("the registry asks for no password")


def log_in(host: str, password: str, config: Path) -> None:
    docker("login", "--username", USER, "--password-stdin", host, stdin=password, env={"DOCKER_CONFIG": str(config)})
