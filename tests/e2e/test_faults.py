"""Faults of a machine, an index or a file: the right exit code, and a message with the fault and the remedy."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.served import served

from envbuild.lock import lock_file

from .forked_envbuild import HOOKS
from .support import CHECKOUT, Project, Proved, docker, python_path

pytestmark = pytest.mark.engine

WHEEL = "typing-extensions"


@pytest.fixture
def here(quick: Proved, scratch: Path) -> Proved:
    return quick.copy(scratch)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_no_engine(here: Proved, scratch: Path) -> None:
    dead = f"unix://{scratch}/docker.sock"
    for verb in ("make", "status"):
        done = here.project.run(verb, here.name, "--json", DOCKER_HOST=dead)
        assert (done.code, done.error["kind"]) == (6, "engine")
        assert dead in done.error["message"] and "DOCKER_HOST" in done.error["hint"]


class OldEngine(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"Version": "20.10.24", "ApiVersion": "1.41", "Os": "linux", "Arch": "amd64"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def old_engine() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OldEngine)
    with served(server):
        yield f"tcp://127.0.0.1:{server.server_port}"


def test_an_engine_too_old(here: Proved, old_engine: str) -> None:
    done = here.project.run("make", here.name, "--json", DOCKER_HOST=old_engine)
    assert (done.code, done.error["kind"]) == (6, "engine")
    assert "20.10.24" in done.error["message"] and "23.0" in done.error["message"]


def test_not_enough_disk(here: Proved) -> None:
    done = here.project.run(
        "build", here.name, "--no-cache", "--json", PYTHONPATH=python_path(HOOKS), E2E_FREE="300000000"
    )
    assert (done.code, done.error["kind"]) == (6, "disk")
    assert "0.3 GB are free" in done.error["message"] and "needs about" in done.error["message"]
    assert [step["name"] for step in done.document["steps"]] == ["load profile", "resolve", "lock", "render"]


def test_the_index_does_not_answer(here: Proved) -> None:
    address = f"http://127.0.0.1:{closed_port()}/simple"
    here.project.lock(here.name).unlink()
    unset = {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "UV_FIND_LINKS": "", "no_proxy": "127.0.0.1"}
    here.project.change(here.name, base={"bootstrap": None, "image": f"localhost/none@sha256:{'0' * 64}"})
    shutil.rmtree(here.project.config)  # pip's own find-links
    here.project.config.mkdir()
    done = here.project.run(
        "lock", here.name, "--json", PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL=address, UV_HTTP_RETRIES="0", **unset
    )
    assert (done.code, done.error["kind"]) == (7, "network")
    assert address in done.words
    assert not here.project.lock(here.name).exists()


def locked_wheel(here: Proved) -> tuple[str, str]:
    """Return sha256 and file name of a small wheel."""
    found = lock_file.read(here.project.lock(here.name))
    assert found
    (wheel,) = (item.wheel for item in found.wheels if item.wheel.name == WHEEL)
    return wheel.sha256, wheel.file


def without_wheel(here: Proved, scratch: Path) -> Project:
    """A cache that lacks the wheel, and a state folder without build records."""
    project = here.project.with_cache(scratch, "wheels")
    sha256, _ = locked_wheel(here)
    for entry in here.project.cached("wheels").iterdir():
        if entry.name != sha256:
            (project.cached("wheels") / entry.name).symlink_to(entry)
    shutil.rmtree(project.state / "envbuild" / "builds")
    return project


def test_an_index_serves_another_file_under_the_name(here: Proved, scratch: Path) -> None:
    project = without_wheel(here, scratch)
    sha256, file = locked_wheel(here)
    served = scratch / "served"
    served.mkdir()
    shutil.copy(here.project.cached("wheels") / sha256 / file, served)
    with zipfile.ZipFile(served / file, "a") as altered:
        altered.comment = b"altered"
    done = project.run("build", here.name, "--json", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(served))
    assert (done.code, done.error["kind"]) == (3, "hash")
    assert file in done.error["message"]
    assert not (project.cached("wheels") / sha256 / file).exists()


@pytest.fixture
def corrupted(here: Proved, scratch: Path) -> Project:
    """A wheel that was downloaded correctly, but has changed on the disk since."""
    project = without_wheel(here, scratch)
    sha256, file = locked_wheel(here)
    (project.cached("wheels") / sha256).mkdir()
    content = bytearray((here.project.cached("wheels") / sha256 / file).read_bytes())
    content[len(content) // 2] ^= 1
    (project.cached("wheels") / sha256 / file).write_bytes(content)
    return project


def test_a_file_that_changed_on_disk_is_named_and_gets_into_no_image(here: Proved, corrupted: Project) -> None:
    before = docker("image", "inspect", "--format", "{{.Id}}", here.tag)
    done = corrupted.run("build", here.name, "--json")
    sha256, file = locked_wheel(here)
    assert (done.code, done.error["kind"]) == (3, "hash")
    assert file in done.error["message"]
    assert not (corrupted.cached("wheels") / sha256 / file).exists()
    assert docker("image", "inspect", "--format", "{{.Id}}", here.tag) == before
    assert list((corrupted.state / "envbuild" / "builds").glob("*.json")) == []


def test_a_stale_lock(here: Proved) -> None:
    here.project.change(here.name, packages=["numpy", "wheel"])
    before = here.project.lock(here.name).read_bytes()
    for verb in ("make", "build"):
        done = here.project.run(verb, "--locked", here.name, "--json")
        assert (done.code, done.error["kind"]) == (8, "out-of-date")
        assert "wheels changed in the profile" in done.error["message"]
        assert f"envbuild lock {here.name}" in done.error["hint"]
    done = here.project.run("lock", "--check", here.name, "--json")
    assert (done.code, done.error["kind"]) == (8, "out-of-date")
    (fault,) = done.error["faults"]
    assert here.name in fault["message"] and "wheels changed in the profile" in fault["message"]
    assert "envbuild lock" in done.error["hint"]
    assert here.project.lock(here.name).read_bytes() == before


def test_the_engine_script_leaves_an_engine_alone(quick: Proved, scratch: Path) -> None:
    before = docker("info", "--format", "{{.ID}} {{.DockerRootDir}}")
    done = subprocess.run(
        [CHECKOUT / "scripts" / "engine", "start", scratch],
        env=quick.project.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "answers already" in done.stderr
    assert docker("info", "--format", "{{.ID}} {{.DockerRootDir}}") == before
