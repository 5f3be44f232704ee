from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest
import requests

import envbuild
from envbuild.errors import NotProved, UsageError
from envbuild.plan.profile import SelfTest
from envbuild.proof import job
from envbuild.proof.runners import local

CARD = ("NVIDIA H20",)
UUID = "GPU-8f9a1c1e-4f0b-4c55-9d5e-0c1b2a3d4e5f"


class Created(Exception):
    """The container would be created now."""


class Api:
    """An engine's client that keeps what a container would be created with."""

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


def asked(*devices: str, cards: tuple[str, ...] = CARD, says: str = "") -> Api:
    engine: Any = Engine(says)
    with pytest.raises(Created):
        local.run(engine, job.make("x", SelfTest(), {}, "3.11", cards, job.Asked(gpus=devices)))
    api: Api = engine.api
    return api


@pytest.mark.parametrize(
    ("devices", "count", "ids"), [((), -1, None), (("1", "2"), 0, ["1", "2"]), ((UUID,), 0, [UUID])]
)
def test_the_container_gets_the_gpus_that_are_named_or_all(
    devices: tuple[str, ...], count: int, ids: list[str] | None
) -> None:
    (request,) = asked(*devices).host["device_requests"]
    assert (request["Count"], request["DeviceIDs"] or None) == (count, ids)
    assert request["Capabilities"] == [["gpu"]]


def test_no_gpu_is_asked_for_on_the_cpu() -> None:
    assert asked(cards=()).host["device_requests"] == []


def test_shared_memory_is_more_than_dockers_64_megabytes() -> None:
    assert asked(cards=()).host["shm_size"] == 1 << 30
    assert asked().host["shm_size"] == 4 << 30, "half of the memory where NCCL may need it"


class Looking(Engine):
    """An engine that starts nothing, and says why; what is removed is noted."""

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
    """Whatever else an image without files cannot do, is no word about the card."""
    engine: Any = Looking(says)
    with contextlib.nullcontext() if here else pytest.raises(NotProved, match="no GPU"):
        local.look_for_gpu(engine)
    assert engine.gone == [engine.gone[0], f"{engine.gone[0]}:0"]


def test_what_a_killed_look_for_the_card_left_is_swept() -> None:
    """Nothing of one that still runs, and no other name that the same image has."""
    gone: list[str] = []
    place, pid, started = local._owner().rsplit(":", 2)
    images = [
        {"Labels": {local.OWNER: f"{place}:{pid}:{started}"}, "RepoTags": ["envbuild-look-1:0"]},
        {"Labels": {local.OWNER: f"{place}:{pid}:0"}, "RepoTags": ["envbuild-look-2:0", "mine:1"]},
    ]
    api = SimpleNamespace(containers=lambda **_: [], images=lambda **_: images)
    engine: Any = SimpleNamespace(client=SimpleNamespace(api=api), remove=gone.append)
    assert local.sweep(engine) == 1
    assert gone == ["envbuild-look-2:0"]


@pytest.mark.parametrize(
    ("devices", "says", "error", "words"),
    [
        (("0", "9"), "nvidia-container-cli: device error: 9: unknown device", UsageError, "not all of the GPUs 0, 9"),
        ((), 'could not select device driver "" with capabilities: [[gpu]]', NotProved, "no GPU to prove this on"),
    ],
)
def test_an_engine_without_the_card_says_so(
    devices: tuple[str, ...], says: str, error: type[Exception], words: str
) -> None:
    engine: Any = Engine(says)
    with pytest.raises(error, match=words):
        local.run(engine, job.make("x", SelfTest(), {}, "3.11", CARD, job.Asked(gpus=devices)))


HIDDEN = """
import os, sys
from envbuild.proof.runners import local
pid, owner = int(sys.argv[1]), sys.argv[2]
assert not os.path.exists(f"/proc/{pid}"), "it is to be hidden"
place = local._place()
print(local._abandoned(f"{place}:{pid}:{owner}"), local._abandoned(f"{place}:4194303:{owner}"))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can be another user")
def test_what_another_user_runs_is_not_abandoned_where_proc_hides_it() -> None:
    """Else two users of one engine would remove each other's containers, as soon as /proc has hidepid."""
    other = ["setpriv", "--reuid=41234", "--regid=41234", "--clear-groups"]
    path = {**os.environ, "PYTHONPATH": str(Path(envbuild.__file__).parents[1])}
    readable = subprocess.run([*other, sys.executable, "-c", "import envbuild.proof"], cwd="/", env=path)
    if readable.returncode:
        pytest.skip("another user cannot run this Python")
    script = f'mount -t proc -o hidepid=2 proc /proc && exec {" ".join(other)} "$@"'
    asked = [sys.executable, "-c", HIDDEN, str(os.getpid()), "1"]
    done = subprocess.run(["unshare", "--mount", "--", "sh", "-c", script, "sh", *asked], cwd="/", text=True,
                          capture_output=True, env=path)  # fmt: skip
    if "mount" in done.stderr and "Traceback" not in done.stderr:
        pytest.skip(f"no namespace of mounts here: {done.stderr.strip()[-100:]}")
    assert done.stdout.split() == ["False", "True"], done.stderr
