"""A separate Docker Engine, which is emptied between the runs of the benchmark. Images and caches of other engines do
not change.

The engine sets no firewall rules, so builds that need the mirror use the host's network. It has its own bridge, because
with the setting `bridge: none` it would remove docker0, the bridge of the machine's engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.engines import OwnEngine, lacking

_BRIDGE = "envbuild-bench"


class Arena(OwnEngine):
    """`folder` contains all files of the engine, and is removed at the end of the context. `containerd`: the engine
    keeps images in containerd's store instead of its own."""

    def __init__(self, folder: Path, *, containerd: bool = False) -> None:
        # no garbage collection: each run reports what remains in the engine
        settings = {
            "bridge": _BRIDGE, "ip-forward": False, "ip-masq": False, "builder": {"gc": {"enabled": False}},
            "features": {"containerd-snapshotter": containerd},
        }  # fmt: skip
        super().__init__(folder, apart=False, settings=settings)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        subprocess.run(["ip", "link", "delete", _BRIDGE], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def start(self) -> None:
        why = lacking()
        if why:
            raise SystemExit(f"the benchmark's separate engine cannot start: {why}; `make engine` fetches dockerd")
        subprocess.run(
            ["ip", "link", "add", _BRIDGE, "type", "bridge"], capture_output=True
        )  # the bridge may already exist
        super().start()

    def empty(self) -> None:
        """Remove every image and BuildKit's cache, and wait until earlier writes are on the disk."""
        self.stop()
        shutil.rmtree(self.data)
        os.sync()
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_HOST": self.host}

    def docker(self, *arguments: str | Path) -> str:
        """Run docker with these arguments and return its stdout. If docker fails, raise SystemExit with its stderr."""
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, env=self.environment)
        if done.returncode:
            raise SystemExit(f"docker {' '.join(map(str, arguments[:3]))} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def image(self, reference: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.docker("image", "inspect", reference))[0]
        return found

    def used(self) -> int:
        """Return the size on disk of the engine's data, in bytes."""
        done = subprocess.run(["du", "-sxB1", self.data], capture_output=True, text=True)
        return int(done.stdout.split()[0])
