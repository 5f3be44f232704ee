"""Debian's docker-registry on loopback, without TLS or password: envbuild and docker allow that on this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Self

from .engines import die_with_parent
from .support import free_port, until


def program(folder: Path) -> Path | None:
    """Return the installed program, else Debian's, unpacked in `folder`; None if neither is available. Needs the
    network."""
    installed = shutil.which("docker-registry")
    if installed:
        return Path(installed)
    found = folder / "usr" / "bin" / "docker-registry"
    if not found.is_file():
        if not shutil.which("apt-get"):
            return None
        unpack("docker-registry", folder)
    return found


def unpack(package: str, folder: Path) -> None:
    """Unpack Debian's package without installing it."""
    folder.mkdir(parents=True, exist_ok=True)
    # as root, because apt's own user may not write everywhere
    get = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package]
    subprocess.run(get, cwd=folder, check=True, capture_output=True)
    subprocess.run(["dpkg", "-x", next(folder.glob("*.deb")), folder], check=True, capture_output=True)


class OpenRegistry:
    """A registry that keeps pushed content in `data`. After `kill` it can be started again at the same address. It runs
    while used as a context manager."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder, self.program = folder, program
        self.host = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        config = self.folder / "config.yml"
        config.write_text(
            f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {self.data}}}}}\n"
            f"http: {{addr: '{self.host}', secret: {secrets.token_hex(8)}}}\n",
            encoding="utf-8",
        )
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.program, "serve", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "OTEL_TRACES_EXPORTER": "none"}, preexec_fn=die_with_parent,
            )  # fmt: skip
        until(f"the registry, see {self.folder}/log", lambda: self.ask("/v2/"))

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def ask(self, path: str, **headers: str) -> bytes:
        """Return the answer's content; empty if the registry does not answer or refuses."""
        request = urllib.request.Request(f"http://{self.host}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bytes(answer.read())
        except OSError:
            return b""
