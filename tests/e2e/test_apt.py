"""A profile's Debian packages: each build without cache gives the same image, though their scripts create keys."""

from __future__ import annotations

import pytest

from .site import Team
from .support import Project, Proved, docker

pytestmark = pytest.mark.engine

# Their scripts write a cache with times, host keys, the day of a new user, the machine id, a certificate, and bytecode.
PACKAGES = ["fontconfig", "openssh-server", "dbus", "ssl-cert", "python3-dev"]


@pytest.fixture(scope="module")
def built(images: None, project: Project, run_id: str) -> Proved:
    """An image that is not verified yet."""
    name = f"e2e-apt-{run_id}"
    project.write(name, extends="cpu", apt=PACKAGES, selftest={"level": "quick", "require": ["env.libs"]})
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


def test_the_lock_in_the_evidence_gives_the_same_image(built: Proved, team: Team, run_id: str) -> None:
    """So the image does not depend on the time at which it is built."""
    made = built.project.with_required_alone().start("make", built.name, "--json").finish(600)
    assert made.code == 0, f"{made.stdout}\n{made.stderr}"
    place = f"{team.registry.host}/e2e-{run_id}/apt"
    pushed = team.push(built.name, place, "--zstd")  # the fastest compression
    assert pushed.code == 0, f"{pushed.stdout}\n{pushed.stderr}"
    done = team.rebuild(f"{place}:verified")
    assert (done.code, done.document["state"]) == (0, "verified"), f"{done.stdout}\n{done.stderr}"
    assert "the lock gives the same image" in done.stderr
    assert docker("image", "ls", "--quiet", f"envbuild/{built.name}-rebuild") == ""
