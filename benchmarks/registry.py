"""Debian's docker-registry on this machine, without TLS: engines allow that on loopback. It keeps what is pushed in a
folder, whose growth is what a push brought."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

_SECONDS = 30.0


class Registry:
    """Used as a context: it answers inside. `folder` holds the program, where it is not installed, and the data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.host = f"127.0.0.1:{probe.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Registry:
        program = shutil.which("docker-registry") or self._fetched()
        settings = self.folder / "config.yml"
        settings.write_text(
            f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {self.data}}}}}\n"
            f"http: {{addr: {self.host}, secret: none}}\n",
            encoding="utf-8",
        )
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([program, "serve", settings], stdout=log, stderr=log)
        end = time.monotonic() + _SECONDS
        while not self._answers():
            if time.monotonic() > end:
                raise SystemExit(f"docker-registry does not start, see {self.folder}/log")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def holds(self) -> int:
        """Bytes of all that was pushed, each once, as it is stored: compressed."""
        blobs = self.data / "docker" / "registry" / "v2" / "blobs"
        return sum(file.stat().st_size for file in blobs.rglob("data"))

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.host}/v2/", timeout=5).close()
        except OSError:
            return False
        return True

    def _fetched(self) -> str:
        """Debian's package, unpacked and not installed."""
        package = self.folder / "package"
        found = package / "usr" / "bin" / "docker-registry"
        if not found.is_file():
            package.mkdir(parents=True)
            subprocess.run(
                ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", "docker-registry"],
                cwd=package,
                check=True,
            )
            subprocess.run(["dpkg", "-x", next(package.glob("*.deb")), package], check=True)
        return str(found)
