"""A simulated machine for doctor: an engine, an index, a driver's library and the kernel's files, all in a folder.

It has no fault until a test case adds one.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import envbuild
from envbuild.lock import lock_file
from unit.doctor import forked_doctor
from unit.image.test_docker_engine import Api, answering
from unit.served import served
from unit.support import CommandResult

SOURCES = Path(envbuild.__file__).parents[1]
FEW = ("cpu", "h20", "h20-cu12")
"""The smallest profile, and those of the bench's GPUs. Reading the locks of all shipped profiles takes about a quarter
of the processor time of a command."""
TWO_H20 = "name=NVIDIA H20;name=NVIDIA H20"
NOWHERE = "http://127.0.0.1:9"  # discard: nothing listens there


@dataclass
class Bench:
    """`sources`: the folder of the package and of the shipped profiles. `small`: folders that are mounted as 64 MB file
    systems while doctor runs."""

    folder: Path
    sources: Path
    engine: Api
    index: str
    environment: dict[str, str] = field(default_factory=dict)
    small: list[Path] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """The folder that `--root` names."""
        return self.folder / "root"

    @property
    def bin(self) -> Path:
        """The only folder on PATH."""
        return self.folder / "bin"

    @property
    def log(self) -> Path:
        return self.root / "dev" / "kmsg"

    def put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def cards(self, *cards: str, driver: str = "550.54.15") -> None:
        """Set the GPUs that the driver reports; the PCI bus lists as many."""
        self.environment |= {"STUB_CARDS": ";".join(cards), "STUB_DRIVER": driver}
        shutil.rmtree(self.root / "sys" / "bus" / "pci" / "devices", ignore_errors=True)
        for index, _ in enumerate(cards):
            device = f"sys/bus/pci/devices/0000:{index:02x}:00.0"
            self.put(f"{device}/vendor", "0x10de\n")
            self.put(f"{device}/class", "0x030200\n")

    def program(self, name: str, script: str) -> None:
        file = self.bin / name
        file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        file.chmod(0o755)

    def login(self, host: str) -> None:
        folder = Path(self.environment["DOCKER_CONFIG"])
        folder.mkdir(parents=True, exist_ok=True)
        document = {"auths": {host: {"auth": "dXNlcjpzZWNyZXQ="}}}
        (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")

    def doctor(self, *arguments: str) -> CommandResult:
        """Run the command with --root in a forked process; with `small`, in a new one."""
        if self.small:
            return self.new_doctor(*arguments)
        options = [*arguments, "--root", str(self.root)]
        with forked_doctor.start(options, self.sources, self._variables(), self.folder) as process:
            out, err = process.communicate(timeout=60)
        return CommandResult(process.wait(), out.decode(), err.decode())

    def new_doctor(self, *arguments: str, root: bool = True) -> CommandResult:
        """Run the command in a new process. `root`: pass --root; False for a command with --cluster."""
        argv = [str(self.bin / "python"), "-m", "envbuild", "doctor", *arguments]
        argv += ["--root", str(self.root)] if root else []
        if self.small:
            mounts = " && ".join(f"mount -t tmpfs -o size=64M tmpfs '{path}'" for path in self.small)
            argv = [str(shutil.which("unshare")), "-rm", "/bin/sh", "-c", f'{mounts} && exec "$@"', "sh", *argv]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=self._variables(), cwd=self.folder)
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def _variables(self) -> dict[str, str]:
        return {**self.environment, "PATH": f"{self.bin}{':/usr/bin:/bin' if self.small else ''}"}


@functools.cache
def locked_files() -> dict[str, list[str]]:
    """Return package -> links to its files that the locks of shipped profiles name."""
    found: dict[str, list[str]] = {}
    for file in sorted((SOURCES / "profiles").rglob("*.lock.yaml")):
        locked = lock_file.read(file)
        assert locked
        for item in (*locked.wheels, *(locked.builder.wheels if locked.builder else ())):
            link = f'<a href="/files/{item.wheel.file}#sha256={item.wheel.sha256}">{item.wheel.file}</a>'
            found.setdefault(item.wheel.name, []).append(link)
    return found


class _Index(BaseHTTPRequestHandler):
    """Answers with the status in the path (401, 404, 407 or 500), else with 200 and links to those files of the package
    that shipped profiles lock.

    If the path contains /late, the Date header is an hour behind this machine's clock."""

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        status = next((code for code in (401, 404, 407, 500) if f"/{code}" in self.path), 200)
        self.send_response_only(status)
        now = time.time() - (3600 if "/late" in self.path else 0)
        self.send_header("Date", email.utils.formatdate(now, usegmt=True))
        page = "\n".join(locked_files().get(self.path.strip("/").rpartition("/")[2], ())).encode()
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


def _with_few_profiles(folder: Path) -> Path:
    """Put the package, with FEW as its only shipped profiles, into this folder, and return the folder."""
    (folder / "profiles").mkdir(parents=True)
    for name in ("envbuild", "dockerfiles"):
        (folder / name).symlink_to(SOURCES / name)
    for name in FEW:
        for file in (f"{name}.yaml", f"{name}.lock.yaml"):  # a link out of its project would be refused
            shutil.copy(SOURCES / "profiles" / file, folder / "profiles")
    return folder


@contextlib.contextmanager
def bench(folder: Path, libraries: dict[str, str], every_profile: bool = False) -> Iterator[Bench]:
    """A machine without faults and with two H20; `libraries`: the environment in which the driver's library is found;
    `every_profile`: whether the command has all shipped profiles, instead of only FEW."""
    folder.mkdir(parents=True)
    sources = SOURCES if every_profile else _with_few_profiles(folder / "sources")
    locked_files()  # read once, and not while the command waits for the index
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Index)
    with served(server), answering(Api(folder)) as engine:
        made = Bench(folder, sources, engine, f"http://127.0.0.1:{server.server_port}")
        engine.answers["/info"] = (200, {"DockerRootDir": str(folder), "Runtimes": {"runc": {}, "nvidia": {}}})
        made.bin.mkdir()
        (made.bin / "python").symlink_to(sys.executable)
        made.program("docker", "echo github.com/docker/buildx 0.13.1 0123456")
        made.environment = {
            **libraries,
            "HOME": str(folder / "home"),
            "PYTHONPATH": f"{sources}:{sysconfig.get_path('purelib')}",
            "DOCKER_HOST": engine.host,
            "DOCKER_CONFIG": str(folder / "docker"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{made.index}/simple",
            "UV_NO_CONFIG": "1",
        }
        made.put("proc/2/comm", "kthreadd\n")
        made.put("proc/cpuinfo", "model name\t: a processor\n")
        made.put("dev/kmsg", "6,1,0,-;Linux version 6.1\n6,2,9,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n")
        (made.root / "dev" / "shm").mkdir()
        made.cards(*TWO_H20.split(";"))
        yield made


def needs_unshare() -> None:
    """Skip if the user may not mount file systems."""
    tool = shutil.which("unshare")
    done = tool and subprocess.run(
        [tool, "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=20
    )
    if not done or done.returncode != 0:
        pytest.skip("needs unshare and user namespaces, to mount a small file system")


def needs_disk() -> None:
    """Skip if this machine's disk is too full: doctor checks it, and a faultless host has enough space."""
    if shutil.disk_usage(tempfile.gettempdir()).free < ROOM:
        pytest.skip(f"needs {ROOM >> 30} GiB free in {tempfile.gettempdir()}")


ROOM = 40 << 30
