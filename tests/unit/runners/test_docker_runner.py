from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest
import requests
from urllib3.exceptions import ProtocolError

import envbuild
from envbuild.profile.model import SelfTest
from envbuild.runners import docker_runner
from envbuild.testrun import selftest_job
from envbuild.testrun.selftest_job import Expectations, RunRequest
from envbuild.util.errors import EngineError, NotProved, UsageError

CARD = ("NVIDIA H20",)
UUID = "GPU-8f9a1c1e-4f0b-4c55-9d5e-0c1b2a3d4e5f"


class Created(Exception):
    """Raised where a container would be created."""


class Api:
    """An engine's client that records the arguments for creating a container."""

    def __init__(self, says: str = "") -> None:
        self.says = says
        self.host: dict[str, Any] = {}

    def create_host_config(self, **host: Any) -> dict[str, Any]:
        self.host = host
        return host

    def create_container(self, *_: Any, **__: Any) -> None:
        if self.says:
            response = requests.Response()
            response.status_code = 500
            raise docker.errors.APIError("failed", response=response, explanation=self.says)
        raise Created

    def containers(self, **_: Any) -> list[Any]:
        return []

    def images(self, **_: Any) -> list[Any]:
        return []

    def remove_container(self, *_: Any, **__: Any) -> None:
        pass


class Engine:
    def __init__(self, says: str = "") -> None:
        self.client = self
        self.api = Api(says)

    def without_room(self) -> None:
        """Report no full disk."""


def container_request(*devices: str, cards: tuple[str, ...] = CARD, says: str = "") -> Api:
    engine: Any = Engine(says)
    with pytest.raises(Created):
        docker_runner.run_in_container(
            engine,
            selftest_job.make_job("x", SelfTest(), Expectations({}, "3.11", cards), RunRequest(gpus=devices)),
        )
    api: Api = engine.api
    return api


@pytest.mark.parametrize(
    ("devices", "count", "ids"), [((), -1, None), (("1", "2"), 0, ["1", "2"]), ((UUID,), 0, [UUID])]
)
def test_the_container_gets_the_gpus_that_are_named_or_all(
    devices: tuple[str, ...], count: int, ids: list[str] | None
) -> None:
    (request,) = container_request(*devices).host["device_requests"]
    assert (request["Count"], request["DeviceIDs"] or None) == (count, ids)
    assert request["Capabilities"] == [["gpu"]]


def test_no_gpu_is_asked_for_on_the_cpu() -> None:
    assert container_request(cards=()).host["device_requests"] == []


def test_shared_memory_is_more_than_dockers_64_megabytes() -> None:
    assert container_request(cards=()).host["shm_size"] == 1 << 30
    assert container_request().host["shm_size"] == 4 << 30, "half of the memory where NCCL may need it"


class Looking(Engine):
    """An engine that starts nothing and gives the reason; removals are recorded."""

    def __init__(self, says: str) -> None:
        super().__init__()
        self.gone: list[str] = []
        self.api: Any = SimpleNamespace(
            import_image_from_data=lambda data, **_: tarfile.open(fileobj=io.BytesIO(data)).close(),
            create_host_config=lambda **host: host,
            create_container=lambda image, **_: None,
            start=lambda name: Api(says).create_container(),
            remove_container=lambda name, **_: self.gone.append(name),
        )
        self.remove = self.gone.append


@pytest.mark.parametrize(
    ("says", "here"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', False),
        ("nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown", False),
        ('exec: "/nothing": stat /nothing: no such file or directory: unknown', True),
        ("nvidia-container-cli: ldcache error: open failed: /sbin/ldconfig: no such file", True),
    ],
)
def test_a_gpu_is_looked_for_in_an_empty_image_which_goes_again(says: str, here: bool) -> None:
    """A failure for a different reason, in an image without files, is not evidence about the GPU."""
    engine: Any = Looking(says)
    with contextlib.nullcontext() if here else pytest.raises(NotProved, match="no GPU"):
        docker_runner.look_for_gpu(engine)
    assert engine.gone == [engine.gone[0], f"{engine.gone[0]}:0"]


def test_leftovers_of_a_killed_gpu_search_are_swept() -> None:
    """Leftovers of a search that still runs stay, and so do other names of the same image."""
    gone: list[str] = []
    place, pid, started = docker_runner._owner().rsplit(":", 2)
    images = [
        {"Labels": {docker_runner.OWNER: f"{place}:{pid}:{started}"}, "RepoTags": ["envbuild-look-1:0"]},
        {"Labels": {docker_runner.OWNER: f"{place}:{pid}:0"}, "RepoTags": ["envbuild-look-2:0", "mine:1"]},
    ]
    api = SimpleNamespace(containers=lambda **_: [], images=lambda **_: images)
    engine: Any = SimpleNamespace(client=SimpleNamespace(api=api), remove=gone.append)
    assert docker_runner.sweep_containers(engine) == 1
    assert gone == ["envbuild-look-2:0"]


@pytest.mark.parametrize(
    ("devices", "says", "error", "words"),
    [
        (
            ("0", "9"),
            "nvidia-container-cli: device error: 9: unknown device",
            UsageError,
            "lacks some of the GPUs 0, 9",
        ),
        (
            (),
            'could not select device driver "" with capabilities: [[gpu]]',
            NotProved,
            "no GPU to run the self-test on",
        ),
    ],
)
def test_an_engine_without_the_gpu_is_reported(
    devices: tuple[str, ...], says: str, error: type[Exception], words: str
) -> None:
    engine: Any = Engine(says)
    with pytest.raises(error, match=words):
        docker_runner.run_in_container(
            engine,
            selftest_job.make_job("x", SelfTest(), Expectations({}, "3.11", CARD), RunRequest(gpus=devices)),
        )


def raising(error: BaseException) -> Callable[..., None]:
    def end(*_: Any, **__: Any) -> None:
        raise error

    return end


# The message of requests for an engine that has just gone away.
refused = raising(
    requests.ConnectionError(ProtocolError("Connection aborted.", ConnectionRefusedError(111, "Connection refused")))
)


def left_by(step: BaseException | None) -> pytest.ExceptionInfo[BaseException]:
    """Return the exception if `step` ends the self-test and the container cannot be removed."""
    engine: Any = Engine()
    engine.api.remove_container = refused
    engine.api.create_container = raising(step) if step else lambda *_, **__: None
    engine.api.attach = lambda *_, **__: iter(())
    engine.api.attach_socket = lambda *_, **__: SimpleNamespace(sendall=lambda _: None, shutdown=lambda _: None)
    engine.api.start = lambda _: None
    engine.api.wait = lambda _: {"StatusCode": 0}
    engine.api.inspect_container = lambda _: {"State": {}}
    with pytest.raises(BaseException) as caught:
        docker_runner.run_in_container(
            engine,
            selftest_job.make_job("x", SelfTest(), Expectations({}, "3.11"), RunRequest()),
        )
    return caught


def test_the_end_of_the_selftest_is_reported_before_a_container_that_is_left() -> None:
    aborted = requests.exceptions.ChunkedEncodingError("Connection broken: IncompleteRead(0 bytes read)")
    error = left_by(aborted).value
    assert isinstance(error, EngineError)
    assert error.message == "the Docker Engine failed: Connection broken: IncompleteRead(0 bytes read)"
    (fault,) = error.faults
    assert re.fullmatch(
        r"left in the engine: container envbuild-test-[0-9a-f]{12}; the next self-test removes it", str(fault)
    )


def test_an_interruption_stays_one_though_the_container_cannot_be_removed() -> None:
    assert left_by(KeyboardInterrupt()).type is KeyboardInterrupt


def test_a_container_that_alone_is_left_is_the_error() -> None:
    error = left_by(None).value
    assert isinstance(error, EngineError)
    assert re.fullmatch(r"container envbuild-test-\w+ could not be removed: connection refused", error.message)
    assert error.hint and error.hint.startswith("docker rm -f envbuild-test-")


def test_an_engine_that_goes_away_in_a_look_for_the_gpu_is_the_error() -> None:
    engine: Any = Looking("")
    engine.api.start = engine.api.remove_container = refused
    engine.remove = raising(EngineError("the Docker Engine failed: connection refused"))
    with pytest.raises(EngineError, match="the Docker Engine failed: connection refused") as caught:
        docker_runner.look_for_gpu(engine)
    assert [str(fault).split()[4] for fault in caught.value.faults] == ["container", "image"]
    assert "its log says why" in str(caught.value.hint)


HIDDEN = """
import os, sys
from envbuild.runners import docker_runner
pid, owner = int(sys.argv[1]), sys.argv[2]
assert not os.path.exists(f"/proc/{pid}"), "it is to be hidden"
place = docker_runner._place()
print(docker_runner._abandoned(f"{place}:{pid}:{owner}"), docker_runner._abandoned(f"{place}:4194303:{owner}"))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can be another user")
def test_a_process_hidden_in_proc_is_not_treated_as_gone() -> None:
    """Otherwise, if /proc is mounted with hidepid, two users of one engine would remove each other's containers."""
    other = ["setpriv", "--reuid=41234", "--regid=41234", "--clear-groups"]
    path = {**os.environ, "PYTHONPATH": str(Path(envbuild.__file__).parents[1])}
    readable = subprocess.run([*other, sys.executable, "-c", "import envbuild.runners"], cwd="/", env=path)
    if readable.returncode:
        pytest.skip("another user cannot run this Python")
    script = f'mount -t proc -o hidepid=2 proc /proc && exec {" ".join(other)} "$@"'
    command = [sys.executable, "-c", HIDDEN, str(os.getpid()), "1"]
    done = subprocess.run(["unshare", "--mount", "--", "sh", "-c", script, "sh", *command], cwd="/", text=True,
                          capture_output=True, env=path)  # fmt: skip
    if "mount" in done.stderr and "Traceback" not in done.stderr:
        pytest.skip(f"no namespace of mounts here: {done.stderr.strip()[-100:]}")
    assert done.stdout.split() == ["False", "True"], done.stderr
