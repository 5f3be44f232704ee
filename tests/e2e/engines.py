"""A Docker Engine that belongs to a test, campaign or benchmark: it can be killed, filled, starved or emptied.

It needs root, and dockerd: the one that scripts/engine unpacked, else the machine's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import requests
from docker import DockerClient
from docker.errors import DockerException

from .support import until

_TREE = Path(os.environ.get("ENVBUILD_ENGINE_ROOT") or "/var/lib/envbuild-engine") / "tree" / "usr"
_SECONDS = 60.0  # to start, and to end
_RUN_CONTAINERS = ("containerd-shim-runc-v2", "runc")  # runc: for BuildKit's steps
_ALL = ("dockerd", "containerd", *_RUN_CONTAINERS)


def lacking() -> str | None:
    """Return why no private engine can be started here; None if one can."""
    if os.geteuid():
        return "an engine of its own needs root"
    if dockerd() is None:
        return "no dockerd is installed, nor unpacked by scripts/engine"
    if not shutil.which("unshare") or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "no network namespace can be made here"
    return None


def dockerd() -> Path | None:
    """Return the dockerd that scripts/engine unpacked, else the machine's."""
    unpacked = _TREE / "sbin" / "dockerd"
    installed = shutil.which("dockerd")
    return unpacked if unpacked.is_file() else Path(installed) if installed else None


def die_with_parent() -> None:
    """Called in a starting child: the kernel will send the child SIGTERM when the thread that started the child
    ends."""
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM


class OwnEngine:
    """A private engine. `folder`: contains its socket, log and state; its processes are recognised by this path.
    `data`: contains its images.

    `apart`: use a network namespace that no other process shares. `settings`: keys of daemon.json to add or replace. As
    a context manager, the engine runs inside the context.
    """

    def __init__(
        self, folder: Path, data: Path | None = None, apart: bool = True, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.folder, self.data = folder, data or folder / "data"
        self.host = f"unix://{folder}/docker.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self._network = ["unshare", "--net"] if apart else []
        self._settings = {
            "data-root": str(self.data), "exec-root": f"{folder}/exec", "pidfile": f"{folder}/pid",
            "hosts": [self.host], "bridge": "none", "iptables": False, "ip6tables": False, **(settings or {}),
        }  # fmt: skip

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def client(self, timeout: int = 60) -> Any:
        return DockerClient(base_url=self.host, timeout=timeout)

    def start(self) -> None:
        """Start dockerd, and return when it answers. Raises AssertionError if dockerd does not answer; if dockerd has
        ended, the message has the end of its log."""
        program = dockerd()
        assert program, "dockerd is not installed"
        shared = not self._network and self._settings["bridge"] == "none"
        assert not shared or "docker0" not in (name for _, name in socket.if_nameindex()), (
            "an engine without a bridge removes that of another one in the same network"
        )
        tree = program.parents[1]
        init = tree / "bin" / "tini-static"
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "daemon.json"
        more = {"init-path": str(init)} if init.is_file() else {}
        file.write_text(json.dumps({**self._settings, **more}), encoding="utf-8")
        path = os.pathsep.join([f"{tree}/sbin", f"{tree}/bin", os.environ["PATH"], "/usr/sbin", "/sbin"])
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._network, program, "--config-file", file], env={**os.environ, "PATH": path},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        until(f"an engine at {self.host}, see {self.log}", self._answers, _SECONDS)

    def alive(self) -> bool:
        """Whether dockerd was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def _answers(self) -> bool:
        assert self.alive(), f"the engine ended:\n{self.log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
        with contextlib.suppress(DockerException, requests.RequestException):
            return bool(self.client(5).ping())
        return False

    def kill(self, whole: bool = False) -> None:
        """Send SIGKILL to dockerd; `whole`: also to its containerd. Containers and their shims continue."""
        assert self.process
        self.process.kill()
        self.process.wait()
        if whole:
            for pid in self.processes("containerd"):
                _kill(pid)

    def stop(self) -> None:
        """Stop all its processes, also in containers, and unmount everything. Its files stay."""
        if self.process and self.alive():
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_SECONDS)
        for pid in self.processes(*_RUN_CONTAINERS):
            for child in _children(pid):
                _kill(child)
        for pid in self.processes(*_ALL):
            _kill(pid)
        if self.process:
            self.process.wait()
        unmount(self.folder)
        unmount(self.data)

    def processes(self, *programs: str) -> list[int]:
        """Return the processes of these programs whose command line names this engine's folder or data."""
        return [
            pid
            for pid, command in _running(programs)
            if any(f"{folder}/".encode() in command for folder in (self.folder, self.data))
        ]


@contextlib.contextmanager
def own_engine(data: Path | None = None, **settings: Any) -> Iterator[OwnEngine]:
    """Start a private engine in a folder that is removed afterwards, with its images unless `data` names another
    folder. `settings`: keys of daemon.json, with _ for -."""
    # a short path, because the length of a socket's path is limited
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o711)  # users of the socket's group must reach it
        with OwnEngine(folder, data, settings={key.replace("_", "-"): value for key, value in settings.items()}) as own:
            yield own


def mounts(folder: Path) -> list[str]:
    """Return the mount points below the folder, the innermost first."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return sorted((line.split()[4] for line in lines if line.split()[4].startswith(f"{folder}/")), reverse=True)


def unmount(folder: Path) -> None:
    for mount in mounts(folder):
        subprocess.run(["umount", "--lazy", "--", mount], check=False, capture_output=True)


def _running(programs: tuple[str, ...]) -> Iterator[tuple[int, bytes]]:
    """Return id and command line of the processes of these programs."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "exe").readlink().name in programs:
                yield int(entry.name), (entry / "cmdline").read_bytes()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text(encoding="utf-8").split())
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
