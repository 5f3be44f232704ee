"""A Docker Engine of the benchmark's own, which is emptied between runs; nobody else's images or caches are touched.

It needs root and dockerd: the one on the PATH, or the one that `make engine` unpacked. It sets no firewall rules, so
builds that need the mirror get the host's network; its bridge is its own, for an engine told to have none removes that
of the machine's engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TREE = Path(os.environ.get("ENVBUILD_ENGINE_ROOT", "/var/lib/envbuild-engine")) / "tree" / "usr"
_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin", str(_TREE / "sbin"), str(_TREE / "bin")])
_SECONDS = 60.0
_BRIDGE = "envbuild-bench"


class Arena:
    """`folder` holds all of it. Used as a context: it runs inside."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        """`limit`: how many steps BuildKit may run at a time; its own choice if None."""
        self.folder = folder
        self.limit = limit
        self.host = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Arena:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        subprocess.run(["ip", "link", "delete", _BRIDGE], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def start(self) -> None:
        program = shutil.which("dockerd", path=_PATH)
        if program is None or os.geteuid() != 0:
            raise SystemExit("the benchmark starts an engine of its own: it needs root and dockerd (make engine)")
        self.data.mkdir(parents=True, exist_ok=True)
        settings = {
            "data-root": str(self.data), "exec-root": f"{self.folder}/exec", "pidfile": f"{self.folder}/pid",
            "hosts": [self.host], "bridge": _BRIDGE, "iptables": False, "ip6tables": False,
            "ip-forward": False, "ip-masq": False, "init-path": shutil.which("tini-static", path=_PATH) or "",
            # nothing is collected behind our back: each run says what it leaves
            "builder": {"gc": {"enabled": False}},
            **({"max-concurrent-downloads": self.limit} if self.limit else {}),
        }  # fmt: skip
        file = self.folder / "daemon.json"
        file.write_text(json.dumps({key: value for key, value in settings.items() if value != ""}), encoding="utf-8")
        subprocess.run(["ip", "link", "add", _BRIDGE, "type", "bridge"], capture_output=True)  # it may be there
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, "--config-file", file], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env={**os.environ, "PATH": _PATH},
            )  # fmt: skip
        end = time.monotonic() + _SECONDS
        while subprocess.run(["docker", "version"], env=self.environment, capture_output=True).returncode:
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the engine does not start, see {self.folder}/log")
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS)
            self._process.kill()
            self._process = None

    def empty(self) -> None:
        """Every image and all of BuildKit's cache is gone, and what was written before is on the disk."""
        self.stop()
        shutil.rmtree(self.data)
        os.sync()
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_HOST": self.host}

    def docker(self, *arguments: str | Path, stdin: str | None = None, extra: Mapping[str, str] | None = None) -> str:
        """stdout of docker, which must succeed."""
        done = subprocess.run(
            ["docker", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env={**self.environment, **(extra or {})},
        )
        if done.returncode:
            raise SystemExit(f"docker {' '.join(map(str, arguments[:3]))} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def image(self, reference: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.docker("image", "inspect", reference))[0]
        return found

    def used(self) -> int:
        """Bytes on the disk below the engine's data."""
        done = subprocess.run(["du", "-sxB1", self.data], capture_output=True, text=True)
        return int(done.stdout.split()[0])
