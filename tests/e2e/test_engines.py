"""An engine of a test leaves nothing behind, and does not use the machine's engine."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from . import engines
from .support import docker, until

pytestmark = pytest.mark.skipif(engines.lacking() is not None, reason=str(engines.lacking()))

# Programs of this machine, in an otherwise empty image.
FOLDERS = [f"--volume={folder}:{folder}:ro" for folder in ("/usr", "/bin", "/lib", "/lib64") if Path(folder).is_dir()]


@pytest.mark.engine
def test_nothing_of_it_is_left_though_it_was_killed_with_a_container_that_runs() -> None:
    with engines.own_engine() as own:
        own.client().api.import_image_from_data(bytes(1024), repository="nothing", tag="0")
        sleep = ("nothing:0", "/usr/bin/sleep", "600")
        env = {"DOCKER_HOST": own.host}
        name = docker("run", "--detach", "--network=none", *FOLDERS, *sleep, env=env).strip()
        pid = own.client().api.inspect_container(name)["State"]["Pid"]
        assert "sleep" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
        assert len(own.processes("dockerd", "containerd", "containerd-shim-runc-v2")) == 3
        own.kill(whole=True)
        until("the shim alone", lambda: own.processes(*engines._ALL) == own.processes("containerd-shim-runc-v2"), 10)
        assert engines.mounts(own.folder)
    assert not own.processes(*engines._ALL) and not engines.mounts(own.folder) and not own.folder.exists()
    until("the container's process to be gone", lambda: not Path(f"/proc/{pid}").exists(), 10)


def test_it_says_why_it_does_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"(?s)ended.*no-such-setting"),
        engines.OwnEngine(tmp_path, settings={"no-such-setting": 1}),
    ):
        pytest.fail("it runs")


def test_without_a_bridge_it_does_not_use_a_foreign_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "docker0")])
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it is started"))
    with pytest.raises(AssertionError, match="removes that of another one"):
        engines.OwnEngine(tmp_path, apart=False).start()
