"""A profile's Debian packages: each build without cache gives the same image, though their scripts create keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from .support import Project, Proved, docker, inspect, machine_cache

pytestmark = pytest.mark.engine

# Their scripts write a cache with times, host keys, the day of a new user, the machine id, a certificate, and bytecode.
PACKAGES = ["fontconfig", "openssh-server", "dbus", "ssl-cert", "python3-dev"]


@pytest.fixture(scope="module")
def built(images: None, project: Project, run_id: str) -> Proved:
    """An image that is not verified yet."""
    name = f"e2e-apt-{run_id}"
    project.write(name, extends="cpu", apt=PACKAGES)
    done = project.start("build", name, "--no-cache", "--json").finish(600)
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    return Proved(project, name, done.document)


def test_no_key_and_no_id_is_in_the_image(built: Proved) -> None:
    """Otherwise all containers would share it."""
    kept = "/etc/ssh/ssh_host_* /etc/ssl/private/* /etc/ssl/certs/ssl-cert-snakeoil.pem /var/lib/dbus/machine-id"
    listed = docker("run", "--rm", "--network", "none", built.tag, "sh", "-c", f"ls -d {kept} 2>/dev/null || true")
    assert listed.split() == []


def test_no_day_of_the_build_is_in_the_image(built: Proved) -> None:
    """useradd records the day of a password change in days since 1970; here it is that of 2024-01-01."""
    line = docker("run", "--rm", "--network", "none", "--user", "0", built.tag, "grep", "^sshd:", "/etc/shadow")
    assert line.split(":")[2] == "19723"


def test_a_second_build_from_nothing_gives_the_same_image(built: Proved, scratch: Path) -> None:
    """So the image does not depend on the time at which it is built. The bases are built again too. The temporary
    folder is closed to other users: apt drops to its own user only if that user may enter the folder, and that user
    would then own the files."""
    closed = scratch / "closed"
    closed.mkdir(mode=0o700)
    project = built.project.with_cache(scratch, "bases").with_env(TMPDIR=str(closed))
    again = project.start("build", built.name, "--no-cache", "--json").finish(600)
    assert again.code == 0, f"{again.stdout}\n{again.stderr}"
    assert again.document["image"] == built.id == inspect(built.tag)["Id"]
    assert again.document["notes"] == []
    made = list(project.cached("bases").glob("*.tar"))
    assert len(made) == 2, "without and with the packages"
    for file in made:
        with file.open("rb") as new, (machine_cache("bases") / file.name).open("rb") as old:
            assert hashlib.file_digest(new, "sha256").digest() == hashlib.file_digest(old, "sha256").digest()
