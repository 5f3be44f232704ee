"""A Docker Engine of the campaign's own, to be killed: its data, socket and processes lie below one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

from chaos.isolation import die_with_parent, dockerd

_START_SECONDS = 120


class OwnEngine:
    """To be used within the campaign's own network (isolation.leave_network): with --bridge=none a second engine
    removes the first one's bridge, where they share a network."""

    def __init__(self, root: Path, apart: bool = False) -> None:
        """`apart`: in a network of its own, which nobody shares with it."""
        program = dockerd()
        assert program
        self.root, self.program = root, program
        self._network = ["unshare", "--net"] if apart else []
        self.socket = root / "docker.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    def client(self) -> Any:
        return docker.DockerClient(base_url=self.host, timeout=60)

    def start(self) -> None:
        """Returns once it answers. Raises AssertionError with the end of its log."""
        self.root.mkdir(parents=True, exist_ok=True)
        tree = self.program.parents[1]
        init = tree / "bin" / "tini-static"
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self._network, self.program, "--config-file", os.devnull, "--data-root", self.root / "data",
                 "--exec-root", self.root / "exec", "--pidfile", self.root / "pid", "--bridge=none",
                 "--iptables=false", *(["--init-path", str(init)] if init.is_file() else []), "-H", self.host],
                env={**os.environ, "PATH": os.pathsep.join([f"{tree}/sbin", f"{tree}/bin", os.environ["PATH"]])},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(docker.errors.DockerException, requests.RequestException):
                self.client().ping()
                return
            time.sleep(0.05)
        raise AssertionError(f"the engine did not start:\n{(self.root / 'log').read_text(errors='replace')[-2000:]}")

    def kill(self, whole: bool = False) -> None:
        """SIGKILL for dockerd; `whole`: for its containerd too. Containers and their shims go on."""
        assert self.process
        self.process.kill()
        self.process.wait()
        if whole:
            for pid in self._processes("containerd"):
                _kill(pid)

    def stop(self) -> None:
        """Nothing of it is left: no process, mount or file."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        for pid in self._processes("containerd-shim-runc-v2"):
            for child in _children(pid):
                _kill(child)
        for name in ("dockerd", "containerd", "containerd-shim-runc-v2"):
            for pid in self._processes(name):
                _kill(pid)
        for mount in sorted(self._mounts(), reverse=True):
            subprocess.run(["umount", "-l", "--", mount], check=False, capture_output=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def _processes(self, name: str) -> Iterator[int]:
        """Those of that program that were told of this engine's folder."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                told = (entry / "cmdline").read_bytes()
                if (entry / "exe").readlink().name == name and f"{self.root}/".encode() in told:
                    yield int(entry.name)

    def _mounts(self) -> Iterator[str]:
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            place = line.split()[4]
            if place.startswith(f"{self.root}/"):
                yield place


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
