"""Builds in several processes with a stand-in for the Docker client: which run at the same time, and which wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# A separate process: one build of the given profile, in the given engine and with the given builder.
BUILD = """
import signal, sys
from pathlib import Path
from types import SimpleNamespace
from envbuild.image import buildx
signal.signal(signal.SIGINT, signal.default_int_handler)
client, name, engine, builder = sys.argv[1:]
buildx.docker_client_finder.program = lambda: Path(client)
order = buildx.BuildOrder(
    SimpleNamespace(host="unix:///nowhere", identity=engine, builder=builder or None),
    SimpleNamespace(platform="linux/amd64"),
    name, "FROM scratch", lambda text: print(text, file=sys.stderr, flush=True), lambda line: None,
)
buildx.build(order, [])
"""
# The stand-in for the Docker client. Its last argument is the build's context, in a folder with the profile's name. It
# waits for permission to end.
CLIENT = """#!/bin/sh
for last; do :; done
last=${last%/*} name=${last##*/}
echo "begin $name" >>LOG
while [ ! -e "GO-$name" ]; do sleep 0.02; done
echo "end $name" >>LOG
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = folder / "docker"
        self.client.write_text(CLIENT.replace("LOG", f"{folder}/log").replace("GO", f"{folder}/go"), encoding="utf-8")
        self.client.chmod(0o755)
        self.begun: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, engine: str = "one", builder: str = "") -> subprocess.Popen[bytes]:
        """Start a build with its own state folder, as tests in a different checkout do; all share the cache folder."""
        folders = {"XDG_CACHE_HOME": str(self.folder / "cache"), "XDG_STATE_HOME": str(self.folder / f"state-{name}")}
        with (self.folder / f"stderr-{name}").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", BUILD, self.client, name, engine, builder],
                env={**os.environ, **folders},
                stderr=stderr,
            )
        self.begun.append(process)
        return process

    def stderr(self, name: str) -> str:
        return (self.folder / f"stderr-{name}").read_text(encoding="utf-8")

    def log(self) -> list[str]:
        file = self.folder / "log"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def waits(self, name: str) -> Callable[[], bool]:
        return lambda: "another envbuild compiles an extension; waiting for it" in self.stderr(name)

    def go(self, name: str) -> None:
        (self.folder / f"go-{name}").touch()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for name in "abcd":
        made.go(name)
    for process in made.begun:
        process.kill()
        process.wait()


def until(probe: Callable[[], bool], place: Place) -> None:
    end = time.monotonic() + 120
    while not probe():
        assert time.monotonic() < end, (place.log(), [file.read_text() for file in place.folder.glob("stderr-*")])
        time.sleep(0.02)


@pytest.mark.slow
def test_builds_in_one_engine_wait_for_each_other_and_report_it(place: Place) -> None:
    first = place.start("a")
    until(lambda: place.log() == ["begin a"], place)
    second = place.start("b")
    until(place.waits("b"), place)
    place.go("b")
    time.sleep(0.3)  # without waiting, it would begin now
    assert place.log() == ["begin a"]
    place.go("a")
    assert (first.wait(30), second.wait(30)) == (0, 0)
    assert place.log() == ["begin a", "end a", "begin b", "end b"]
    assert place.stderr("a") == ""


def test_a_waiting_build_can_be_interrupted(place: Place) -> None:
    place.start("a")
    until(lambda: place.log() == ["begin a"], place)
    second = place.start("b")
    until(place.waits("b"), place)
    second.send_signal(signal.SIGINT)
    assert second.wait(30) != 0
    assert "KeyboardInterrupt" in place.stderr("b")
    assert place.log() == ["begin a"]


def test_a_build_does_not_wait_for_a_killed_process(place: Place) -> None:
    first = place.start("a")
    until(lambda: place.log() == ["begin a"], place)
    second = place.start("b")
    until(place.waits("b"), place)
    first.kill()
    place.go("b")
    assert second.wait(30) == 0


@pytest.mark.slow
def test_builds_in_different_engines_or_builders_do_not_wait(place: Place) -> None:
    for name, engine, builder in (("a", "one", ""), ("b", "one", "farm"), ("c", "two", "")):
        place.start(name, engine, builder)
        until(lambda name=name: f"begin {name}" in place.log(), place)  # type: ignore[misc]
    assert [place.stderr(name) for name in "abc"] == ["", "", ""]
