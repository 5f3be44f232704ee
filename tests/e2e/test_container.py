"""The self-test's container: what it may do, and that it never outlives its envbuild for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .broken import Workshop
from .support import Proved, containers, inspect, until

pytestmark = pytest.mark.engine


def started(pid: int) -> Callable[[], dict[str, Any] | None]:
    """A probe for `until`: what the engine says of this envbuild's container once that runs."""

    def probe() -> dict[str, Any] | None:
        found = containers(pid)
        said = inspect(found[0]) if found else None
        return said if said and said["State"]["Running"] else None

    return probe


def test_the_container_may_do_nothing(quick: Proved) -> None:
    running = quick.project.start("test", quick.name)
    said = until("a container of the self-test", started(running.pid))
    ended = running.interrupt()
    host, config = said["HostConfig"], said["Config"]
    assert (host["NetworkMode"], config["NetworkDisabled"]) == ("none", True)
    assert (host["CapDrop"], host["CapAdd"], host["Privileged"]) == (["ALL"], None, False)
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["ReadonlyRootfs"], host["Init"]) == (True, True)
    assert host["Memory"] == host["MemorySwap"] == 8 << 30
    assert 0 < host["PidsLimit"] <= 4096
    assert config["User"] == "65534:65534"
    assert (host["Binds"], said["Mounts"], list(host["Tmpfs"])) == (None, [], ["/tmp"])
    assert ended.code == 130
    assert containers(running.pid) == []


def test_what_a_killed_envbuild_left_is_removed_by_the_next(quick: Proved, broken: Workshop) -> None:
    reference = broken.image("forged")  # a self-test that is over at once
    running = quick.project.start("test", quick.name)
    until("a container of the self-test", started(running.pid))
    running.kill()
    assert containers(running.pid) != []
    quick.project.run("test", quick.name, "--image", reference)
    assert containers(running.pid) == []
