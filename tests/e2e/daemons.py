"""Named daemons of a test, each with its own log, which can be ended, killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

_SECONDS = 30  # seconds to wait for the end


class Daemons:
    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *argv: str | Path, env: Mapping[str, str]) -> None:
        with (self._logs / name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                argv, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def end(self, name: str, by: signal.Signals = signal.SIGTERM) -> None:
        process = self._running.pop(name)
        process.send_signal(by)
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def end_all(self, names: Iterable[str]) -> None:
        """Stop the running daemons one after the other."""
        for name in names:
            if name in self._running:
                self.end(name)
