"""Runs a job in a container of the engine. The container has no network and no capabilities, its file system is
read-only, its resources are limited, and it is always removed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
import requests
from docker.types import DeviceRequest, LogConfig

from envbuild.image.docker_engine import Engine, Image, asking
from envbuild.image.engine_endpoint_and_errors import why
from envbuild.runners.runner_interface import Watch
from envbuild.testrun.run_result import MAX_STDOUT, RawOutput
from envbuild.testrun.selftest_job import Job, Limits
from envbuild.util.errors import EngineError, EnvbuildError, Fault, NotProved, UsageError

OWNER = "io.envbuild.owner"
MAX_STDERR = 64 << 10
_LOOK = "envbuild-look-"
# The user nobody: an image must run under any uid, so it is tested with a uid that owns no files.
_USER = "65534:65534"


class DockerRunner:
    """The runner of the engine that envbuild talks to."""

    nonce: str | None = None

    def __init__(self, engine: Engine, image: Image) -> None:
        self._engine = engine
        self.image = image.handle

    def run(self, job: Job, watch: Watch) -> RawOutput:
        return run_in_container(self._engine, job, watch.line)


def run_in_container(engine: Engine, job: Job, on_line: Callable[[bytes], None] = lambda line: None) -> RawOutput:
    """Runs the job until it ends or is stopped at its time limit or output limit; the result says which. `on_line`
    receives each complete line of the job's stdout as it arrives.

    Raises EngineError if the container cannot be started, NotProved if the engine has no GPU, and UsageError if it
    lacks a requested one. The container is removed afterwards, even after an interruption. Before the job starts,
    containers that earlier runs left behind are removed.
    """
    sweep_containers(engine)
    name = f"envbuild-test-{uuid.uuid4().hex[:12]}"
    api: Any = engine.client.api
    with _cleared(f"container {name}", lambda: _remove(api, name)), asking(engine), _gpu_errors(job):
        _create(api, name, job)
        output = api.attach(name, stdout=True, stderr=True, stream=True, demux=True)
        stdin = api.attach_socket(name, params={"stdin": 1, "stream": 1})
        return _run_container(_Container(api, name, output, stdin), job, on_line)


@contextlib.contextmanager
def _cleared(what: str, clear: Callable[[], None]) -> Iterator[None]:
    """Calls `clear` at the end. If the body and `clear` both fail, the body's error is raised, and a fault in it names
    `what` as left in the engine: usually the engine stopped, which explains both failures. An interruption remains an
    interruption."""
    try:
        yield
    except BaseException as error:
        try:
            clear()
        except EngineError:
            if isinstance(error, EnvbuildError):
                error.faults += (Fault(f"left in the engine: {what}; the next self-test removes it"),)
        raise
    clear()


@contextlib.contextmanager
def _gpu_errors(job: Job) -> Iterator[None]:
    """Translates the engine's error about a missing GPU into UsageError or NotProved. The engine reports it when the
    container starts."""
    try:
        yield
    except docker.errors.APIError as error:
        text = str(error.explanation or error)
        if job.devices and "unknown device" in text:
            raise UsageError(
                f"the engine's machine lacks some of the GPUs {', '.join(job.devices)}",
                hint=f"nvidia-smi -L lists the GPUs of that machine ({text})",
            ) from error
        if _NO_DRIVER in text or "nvidia" in text.lower():
            raise _no_gpu(text) from error
        raise


_NO_DRIVER = "could not select device driver"


def _no_gpu(text: str) -> NotProved:
    return NotProved(
        "the engine has no GPU to run the self-test on",
        hint=f"run the same command on a machine with the GPU ({text.strip()})",
    )


def look_for_gpu(engine: Engine) -> None:
    """Checks that the engine has a GPU before anything is built. To check this, a container of an empty image is
    started: the start always fails, but the error shows whether a GPU is missing.

    Raises NotProved if the engine has no GPU. Only a self-test in an image can find out the GPU's model.
    """
    api: Any = engine.client.api
    name, tag = f"{_LOOK}{uuid.uuid4().hex[:12]}", "0"
    job = Job(f"{name}:{tag}", ("/nothing",), b"", "", Limits(64 << 20, 1, shm=1 << 20, tmp=1 << 20), gpus=True)
    with (
        _cleared(f"image {job.image}", lambda: engine.remove(job.image)),
        _cleared(f"container {name}", lambda: _remove(api, name)),
        asking(engine),
    ):
        api.import_image_from_data(  # a tar without members
            bytes(1024), repository=name, tag=tag, changes=[f"LABEL {OWNER}={json.dumps(_owner())}"]
        )
        _create(api, name, job)
        try:
            api.start(name)
        except docker.errors.APIError as error:  # the start always fails; only the reason matters
            text = str(error.explanation or error)
            if _NO_DRIVER in text or "nvidia-container-cli: initialization error" in text:
                raise _no_gpu(text) from error


def _create(api: Any, name: str, job: Job) -> None:
    limits = job.limits
    host = api.create_host_config(
        init=True,  # without it the self-test is PID 1, and Linux ignores signals that PID 1 sends to itself
        read_only=True,
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit=limits.memory,
        memswap_limit=limits.memory,
        shm_size=limits.shm,
        pids_limit=limits.pids,
        # Docker's tmpfs is noexec by default, which breaks dlopen of libraries that torch compiles
        tmpfs={"/tmp": f"exec,mode=1777,size={limits.tmp}"},
        device_requests=_devices(job),
        log_config=LogConfig(type="none"),  # keeps untrusted output off the engine's disk
    )
    api.create_container(
        job.image,
        command=list(job.argv[1:]),
        entrypoint=[job.argv[0]],
        user=_USER,
        working_dir="/tmp",
        stdin_open=True,
        name=name,
        network_disabled=True,
        labels={OWNER: _owner()},
        host_config=host,
    )


def _devices(job: Job) -> list[DeviceRequest]:
    if not job.gpus:
        return []
    which: Any = {"device_ids": list(job.devices)} if job.devices else {"count": -1}
    return [DeviceRequest(**which, capabilities=[["gpu"]])]


@dataclass(frozen=True)
class _Container:
    """A container that was created but not started, with its streams. `output`: pairs of a block of stdout and a block
    of stderr."""

    api: Any
    name: str
    output: Iterator[tuple[bytes | None, bytes | None]]
    stdin: Any


def _run_container(container: _Container, job: Job, on_line: Callable[[bytes], None]) -> RawOutput:
    """Start the container, feed it the job's input, and collect its output until it ends or exceeds a limit."""
    api, name = container.api, container.name
    begin = time.monotonic()
    api.start(name)
    feeder = threading.Thread(target=_feed, args=(container.stdin, job.stdin), daemon=True)
    feeder.start()
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _kill(api, name)

    alarm = threading.Timer(job.limits.timeout, expire)
    alarm.daemon = True
    alarm.start()
    stdout, stderr, seen, too_long = bytearray(), bytearray(), 0, False
    try:
        for out, err in container.output:
            stdout += out or b""
            stderr = (stderr + (err or b""))[-MAX_STDERR:]
            while (end := stdout.find(b"\n", seen)) >= 0:
                on_line(bytes(stdout[seen:end]))
                seen = end + 1
            if len(stdout) > MAX_STDOUT:
                too_long = True
                _kill(api, name)
                break
        code = api.wait(name)["StatusCode"]
        state = api.inspect_container(name)["State"]
    finally:
        alarm.cancel()
    return RawOutput(
        stdout=bytes(stdout),
        stderr=stderr.decode(errors="replace"),
        exit_code=None if expired.is_set() else code,
        seconds=time.monotonic() - begin,
        out_of_memory=bool(state.get("OOMKilled")),
        timed_out=expired.is_set(),
        too_long=too_long,
    )


def _feed(stdin: Any, payload: bytes) -> None:
    """Writes the job's input. Runs in a separate thread, because an image that never reads its stdin must not block
    envbuild."""
    connection = getattr(stdin, "_sock", stdin)
    with contextlib.suppress(OSError):
        connection.sendall(payload)
        connection.shutdown(socket.SHUT_WR)  # sends end-of-file to an image that reads all of its input


def _kill(api: Any, name: str) -> None:
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException):
        api.kill(name)


def _remove(api: Any, name: str) -> None:
    try:
        api.remove_container(name, force=True, v=True)
    except docker.errors.NotFound:
        pass  # the container was never created
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise EngineError(
            f"container {name} could not be removed: {why(error)}", hint=f"docker rm -f {name}"
        ) from error


def sweep_containers(engine: Engine) -> int:
    """Removes containers, and images of look_for_gpu, whose envbuild process no longer exists (it was killed, or the
    machine restarted). Returns the number of removed objects."""
    api: Any = engine.client.api
    removed = 0
    with asking(engine):
        for container in api.containers(all=True, filters={"label": OWNER}):
            if _abandoned(container["Labels"][OWNER]):
                _remove(api, container["Id"])
                removed += 1
        # Compare the names too: an image that a user committed from a test container has the same label.
        for image in api.images(filters={"label": OWNER, "reference": f"{_LOOK}*"}):
            if _abandoned(image["Labels"][OWNER]):
                for tag in image["RepoTags"] or ():
                    if tag.startswith(_LOOK):
                        engine.remove(tag)
                removed += 1
    return removed


def _owner() -> str:
    """The label's value, PLACE:PID:START. START is the start time of the process in ticks since boot, because a pid may
    be reused."""
    return f"{_place()}:{os.getpid()}:{_started(os.getpid())}"


def _place() -> str:
    """Identifies where a pid means this process: the machine, and the pid namespace, which differs in a container."""
    machine = Path("/etc/machine-id")
    known = machine.read_text(encoding="ascii").strip() if machine.is_file() else ""
    return f"{socket.gethostname()}/{known}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _abandoned(owner: str) -> bool:
    place, pid, started = [*owner.rsplit(":", 2), "", ""][:3]
    if place != _place() or not pid.isdigit():
        return False  # the process ran elsewhere and cannot be checked from here
    now = _started(int(pid))
    return not _exists(int(pid)) if now is None else now != started


def _exists(pid: int) -> bool:
    """Whether the process exists, even if /proc does not show it. With the mount option hidepid, /proc hides other
    users' processes."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _started(pid: int) -> str | None:
    """Field 22 of /proc/PID/stat (proc(5)), counted after the command's name, which may contain any character."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]
