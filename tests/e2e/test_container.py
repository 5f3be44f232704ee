"""The container of the self-test: its permissions, and that it ends soon after its envbuild."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .broken import Workshop
from .support import Proved, containers, inspect, until

pytestmark = pytest.mark.engine


def started(pid: int) -> Callable[[], dict[str, Any] | None]:
    """A probe for `until`: the engine's description of this envbuild's container once it runs."""

    def probe() -> dict[str, Any] | None:
        found = containers(pid)
        inspected = inspect(found[0]) if found else None
        return inspected if inspected and inspected["State"]["Running"] else None

    return probe


def test_the_container_may_do_nothing(quick: Proved) -> None:
    running = quick.project.start("test", quick.name)
    inspected = until("a container of the self-test", started(running.pid))
    ended = running.interrupt()
    host, config = inspected["HostConfig"], inspected["Config"]
    assert (host["NetworkMode"], config["NetworkDisabled"]) == ("none", True)
    assert (host["CapDrop"], host["CapAdd"], host["Privileged"]) == (["ALL"], None, False)
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["ReadonlyRootfs"], host["Init"]) == (True, True)
    assert host["Memory"] == host["MemorySwap"] == 8 << 30
    assert 0 < host["PidsLimit"] <= 4096
    assert config["User"] == "65534:65534"
    assert (host["Binds"], inspected["Mounts"], list(host["Tmpfs"])) == (None, [], ["/tmp"])
    assert ended.code == 130
    assert containers(running.pid) == []


CONFINED = """
import os, pathlib, socket

step("who it is")
assert os.getuid() == 65534, os.getuid()
status = pathlib.Path("/proc/self/status").read_text()
assert "CapEff:\\t0000000000000000" in status and "NoNewPrivs:\\t1" in status, status
step("the network")
try:
    socket.create_connection(("192.0.2.1", 9), timeout=5)
    fail("the network is there")
except OSError as error:
    assert not isinstance(error, TimeoutError), "packets leave"
step("the files")
for folder in ("/", "/etc", "/opt/venv", "/var/tmp"):
    if os.access(folder, os.W_OK):
        fail(f"{folder} can be written")
pathlib.Path("/tmp/own").write_text("yes")
print(device)
"""


def test_a_profiles_own_script_may_do_nothing_either(quick: Proved) -> None:
    project, name = quick.project, quick.name
    before = project.profile(name).read_text(encoding="utf-8")
    project.profile(name).with_name("smoke.py").write_text(CONFINED, encoding="utf-8")
    selftest = {"level": "quick", "require": ["env.libs"], "script": "smoke.py"}
    shapes = [{"m": 2, "k": 64, "n": 96, "dtype": "bf16", "bias": True}]
    try:
        project.change(name, selftest={**selftest, "shapes": shapes})
        run = project.run("test", name, "--probe", "own.script", "--probe", "gemm.crash", "--json")
        assert run.code == 0, f"{run.stdout}\n{run.stderr}"
        crash, script = run.document["probes"]
        assert crash["checks"][0]["case"] == "own linear bf16 2x64x96 bias"
        assert (script["state"], script["traits"]["name"]) == ("passed", "smoke.py")
        status = project.run("status", name, "--json")
        assert (status.code, status.error["kind"]) == (8, "out-of-date")
        assert "proved with another script and other shapes" in status.words
    finally:
        project.profile(name).write_text(before, encoding="utf-8")


def test_leftovers_of_a_killed_envbuild_are_removed_by_the_next(quick: Proved, broken: Workshop) -> None:
    reference = broken.image("forged")  # a self-test that ends immediately
    running = quick.project.start("test", quick.name)
    until("a container of the self-test", started(running.pid))
    running.kill()
    assert containers(running.pid) != []
    quick.project.run("test", quick.name, "--image", reference)
    assert containers(running.pid) == []
