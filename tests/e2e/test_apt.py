"""A profile's Debian packages: each build without cache gives the same image, though their scripts create keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from envbuild.image import debian_base_tar
from envbuild.lock import lock_file

from .support import Proved, docker, inspect, machine_cache

pytestmark = pytest.mark.engine


def test_no_key_and_no_id_is_in_the_image(with_apt: Proved) -> None:
    """Otherwise all containers would share the key or the id."""
    kept = "/etc/ssh/ssh_host_* /etc/ssl/private/* /etc/ssl/certs/ssl-cert-snakeoil.pem /var/lib/dbus/machine-id"
    listed = docker("run", "--rm", "--network", "none", with_apt.tag, "sh", "-c", f"ls -d {kept} 2>/dev/null || true")
    assert listed.split() == []


def test_no_day_of_the_build_is_in_the_image(with_apt: Proved) -> None:
    """useradd records the day of a password change in days since 1970; here, the day is 2024-01-01."""
    line = docker("run", "--rm", "--network", "none", "--user", "0", with_apt.tag, "grep", "^sshd:", "/etc/shadow")
    assert line.split(":")[2] == "19723"


def test_a_second_build_without_the_cached_packages_gives_the_same_image(with_apt: Proved, scratch: Path) -> None:
    """So the image does not depend on the time at which it is built. The base with the packages is built again too;
    test_clones builds the one without them again. The temporary folder is closed to other users: apt drops to its own
    user only if that user may enter the folder, and that user would then own the files."""
    closed = scratch / "closed"
    closed.mkdir(mode=0o700)
    project = with_apt.project.with_cache(scratch, "bases").with_env(TMPDIR=str(closed))
    lock = lock_file.read(project.lock(with_apt.name))
    assert lock
    for file in machine_cache("bases").glob(f"{debian_base_tar.tar_file(lock).stem}.*"):
        (project.cached("bases") / file.name).symlink_to(file)
    again = project.start("build", with_apt.name, "--no-cache", "--json").finish(600)
    assert again.code == 0, f"{again.stdout}\n{again.stderr}"
    assert again.document["image"] == with_apt.id == inspect(with_apt.tag)["Id"]
    assert again.document["notes"] == []
    (made,) = (file for file in project.cached("bases").glob("*.tar") if not file.is_symlink())
    assert made.name == debian_base_tar.tar_file(lock, apt=True).name
    with made.open("rb") as new, (machine_cache("bases") / made.name).open("rb") as old:
        assert hashlib.file_digest(new, "sha256").digest() == hashlib.file_digest(old, "sha256").digest()
