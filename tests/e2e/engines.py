"""A Docker Engine of a test's own, from the private engine's unpacked tree: to be killed, filled or starved."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .support import docker, until


def tree() -> Path | None:
    """Where scripts/engine unpacked the engine, None where it did not, or where this user may not run one."""
    found = Path(os.environ.get("ENVBUILD_ENGINE_ROOT") or "/var/lib/envbuild-engine") / "tree" / "usr"
    usable = os.geteuid() == 0 and (found / "sbin" / "dockerd").is_file() and shutil.which("unshare")
    return found if usable else None


@contextlib.contextmanager
def own_engine(data: Path, *options: str) -> Iterator[str]:
    """Its address, for DOCKER_HOST, while it runs with its images below `data`; `options` are more of dockerd's.

    It has a network of its own: a second engine with --bridge=none takes the first one's bridge away.
    """
    found = tree()
    assert found
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as name:  # sockets' paths are short
        folder = Path(name)
        folder.chmod(0o711)  # the socket has a group of its own
        host = f"unix://{folder}/docker.sock"
        path = os.pathsep.join([f"{found}/sbin", f"{found}/bin", os.environ["PATH"]])
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                ["unshare", "--net", found / "sbin" / "dockerd", "--config-file", os.devnull, "--data-root", data,
                 "--exec-root", folder / "exec", "--pidfile", folder / "pid", "--init-path", found / "bin/tini-static",
                 "--bridge=none", "--iptables=false", "-H", host, *options],
                env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            until(f"an engine at {host}", lambda: _answers(host, process), 60)
            yield host
        finally:
            _end(process, folder)
            _unmount(folder)
            _unmount(data)


def _answers(host: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the engine ended: see its log"
    with contextlib.suppress(AssertionError):
        return bool(docker("version", "--format", "{{.Server.Version}}", env={"DOCKER_HOST": host}))
    return False


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """dockerd and all that it started, each told of its folder; what runs in containers is their shims' children."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    for pid in [process.pid, *started_in(folder)]:
        for one in (*children(pid), pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
    process.wait()


def started_in(folder: Path) -> list[int]:
    """Processes that were told a path below the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{folder}/".encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text(encoding="utf-8").split())
    return found


def _unmount(folder: Path) -> None:
    """What is mounted below the folder, the innermost first."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    for place in sorted((line.split()[4] for line in lines), reverse=True):
        if place.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", "--", place], check=False, capture_output=True)
