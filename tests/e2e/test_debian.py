"""Base packages that mirrors have removed, and bases on a machine without mmdebstrap."""

from __future__ import annotations

import functools
import http.server
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from unit.served import served

from envbuild.fetch import sha256_file_store
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.lock import lock_file

from .support import CHECKOUT, Project, Proved, command, machine_cache, path_without

pytestmark = pytest.mark.engine

PACKAGE, VERSION = "hostname", "3.22+e2e"


@dataclass(frozen=True)
class Aged:
    """A project whose lock names an old version of a package, `deb`, which exists only as `file`."""

    project: Project
    name: str
    deb: Deb
    file: Path
    made: str


@pytest.fixture
def aged(light: Proved, scratch: Path) -> Aged:
    here = light.copy(scratch)
    found = lock_file.read(here.project.lock(here.name))
    assert found and found.suite
    (now,) = (deb for deb in found.base if deb.name == PACKAGE)
    file = repacked(machine_cache("debs") / now.sha256 / now.file, scratch)
    path = f"pool/main/h/{PACKAGE}/{file.name}"
    then = Deb(PACKAGE, VERSION, sha256_file_store.file_digest(file), file.stat().st_size, path)
    base = tuple(then if deb == now else deb for deb in found.base)
    lock_file.write(replace(found, base=base), here.project.lock(here.name), here.name)
    project = here.project.with_cache(scratch, "debs", "wheels")
    for entry in machine_cache("debs").iterdir():
        (project.cached("debs") / entry.name).symlink_to(entry)
    return Aged(project, here.name, then, file, found.made)


def test_the_build_date_is_when_the_packages_were_locked(light: Proved) -> None:
    """This time is requested from a snapshot archive; later snapshots may no longer have the packages."""
    before = lock_file.read(CHECKOUT / "profiles" / "cpu.lock.yaml")
    after = lock_file.read(light.project.lock(light.name))
    assert before and after and before.id != after.id
    if before.base != after.base:
        pytest.skip("the mirror has moved on: the checkout's base was locked again")
    assert after.made == before.made


def repacked(file: Path, scratch: Path) -> Path:
    tree, target = scratch / "deb", scratch / f"{PACKAGE}_{VERSION}_amd64.deb"
    command("dpkg-deb", "--raw-extract", file, tree)
    control = tree / "DEBIAN" / "control"
    lines = control.read_text(encoding="utf-8").splitlines(keepends=True)
    control.write_text("".join(f"Version: {VERSION}\n" if line.startswith("Version:") else line for line in lines))
    command("dpkg-deb", "--build", "--root-owner-group", tree, target)
    return target


def test_locked_names_what_is_gone(aged: Aged) -> None:
    before = aged.project.lock(aged.name).read_bytes()
    done = aged.project.run("build", aged.name, "--locked", "--json")
    assert (done.code, done.error["kind"]) == (7, "mirror")
    assert f"{PACKAGE} {VERSION}" in done.error["message"]
    assert "debian_snapshot" in done.error["hint"]
    assert aged.project.lock(aged.name).read_bytes() == before


def test_otherwise_the_base_is_locked_again_and_reported(aged: Aged, scratch: Path) -> None:
    """The test ends when the build begins: a base of the packages that the mirror has today would be bootstrapped for
    this test alone."""
    aged.project.dockerfile(aged.name).unlink()
    done = aged.project.hold(scratch / "sign", "build start", "build", aged.name, "--json").interrupt()
    assert done.code == 130, done.stdout
    assert f"locking the base again, because no configured mirror has {PACKAGE} {VERSION}" in done.stderr
    assert f"locked: {PACKAGE} {VERSION} -> " in done.stderr
    found = lock_file.read(aged.project.lock(aged.name))
    assert found and VERSION not in [deb.version for deb in found.base]
    assert f'io.envbuild.lock="{found.id}"' in aged.project.dockerfile(aged.name).read_text(encoding="utf-8")


class Recording(http.server.SimpleHTTPRequestHandler):
    requests: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.requests.append(urllib.parse.unquote(self.path))
        super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def snapshot(aged: Aged, scratch: Path) -> Iterator[str]:
    """Return the URL of a snapshot archive that has only the old package, below the time of its lock."""
    target = scratch / "archive" / aged.made / aged.deb.path
    target.parent.mkdir(parents=True)
    aged.file.rename(target)
    handler = functools.partial(Recording, directory=str(scratch / "archive"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with served(server):
        yield f"http://127.0.0.1:{server.server_port}"


def test_a_snapshot_archive_has_it_and_then_mmdebstrap_is_missing(aged: Aged, snapshot: str, scratch: Path) -> None:
    config = aged.project.config / "envbuild" / "config.yaml"
    config.parent.mkdir()
    config.write_text(f'debian_snapshot: "{snapshot}/{{timestamp}}"\n', encoding="utf-8")
    path = path_without(scratch / "bin", "mmdebstrap")
    assert aged.project.run("lock", aged.name).code == 0
    done = aged.project.run("build", aged.name, "--locked", "--json", PATH=path, no_proxy="127.0.0.1")
    assert Recording.requests == [f"/{aged.made}/{aged.deb.path}"]
    assert (aged.project.cached("debs") / aged.deb.sha256 / aged.deb.file).is_file()
    assert [step["name"] for step in done.document["steps"]] == ["load profile", "resolve", "lock", "render"]
    # the base of this lock was never built here
    assert (done.code, done.error["kind"]) == (6, "program")
    assert "mmdebstrap is not installed" in done.error["message"]
    assert "apt-get install mmdebstrap" in done.error["hint"]


def test_a_cached_base_needs_neither_mmdebstrap_nor_a_mirror(light: Proved, scratch: Path) -> None:
    here = light.copy(scratch)
    config = here.project.config / "envbuild" / "config.yaml"
    config.parent.mkdir()
    config.write_text("debian_mirror: http://127.0.0.1:9/debian\n", encoding="utf-8")
    for record in here.records():
        record.unlink()
    done = here.project.run("build", here.name, "--json", PATH=path_without(scratch / "bin", "mmdebstrap"))
    assert (done.code, done.document["image"]) == (0, here.id)
