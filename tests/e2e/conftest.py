"""One engine, two proved images and a few broken ones, shared by all end-to-end tests of a session."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from unit.support import write_wheel

from envbuild.lock import lock_file

from . import standin_torch
from .broken import Workshop
from .cluster import cluster
from .onenode import onenode
from .registries import Registry, address, cosign, program, registry
from .site import Team
from .support import (
    CHECKOUT,
    ODD,
    OTHER_CUBLAS,
    REQUIRED,
    Project,
    Proved,
    Result,
    command,
    docker,
    handle,
    machine_cache,
)

__all__ = ["address", "cluster", "cosign", "onenode", "program", "registry"]  # fixtures

KEPT_FREE = 30_000_000_000
# Their scripts write a cache with times, host keys, the day of a new user, the machine id, a certificate, and bytecode.
# The Dockerfile of test_dockerfile.py needs the last one.
DEBIAN_PACKAGES = ["fontconfig", "openssh-server", "dbus", "ssl-cert", "python3-venv"]


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("images") and "images" not in item.config.option.markexpr:
        item.add_marker(pytest.mark.skip(reason="takes gigabytes and many minutes: make test-images"))
    if item.get_closest_marker("compiles") and "compiles" not in item.config.option.markexpr:
        item.add_marker(pytest.mark.skip(reason="compiles for ten minutes or more: make test-apex test-compiled"))
    if item.get_closest_marker("kubernetes") and "kubernetes" not in item.config.option.markexpr:
        item.add_marker(pytest.mark.skip(reason="compiles Kubernetes for ten minutes: make test-kubernetes"))


@pytest.fixture(scope="session")
def engine() -> None:
    """The engine. Skips with a message if no engine answers."""
    try:
        docker("version")
    except (AssertionError, FileNotFoundError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no Docker Engine answers: {str(error).strip().splitlines()[-1]}")


@pytest.fixture(scope="session")
def run_id() -> str:
    """Part of every name that is created in the engine, because two sessions may run at once."""
    return secrets.token_hex(3)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that is removed afterwards: pytest keeps its folders, and ours contain gigabytes."""
    folder = tmp_path_factory.mktemp("e2e")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="session")
def images(engine: None, run_id: str) -> Iterator[None]:
    """Removes every image and build context of this session at its end."""
    yield
    listed = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
    ours = [name for name in listed if run_id in name]
    if ours:
        docker("image", "rm", "--force", *ours)
    for folder in machine_cache("contexts").glob(f"*{run_id}*"):
        shutil.rmtree(folder)
    if shutil.disk_usage(machine_cache("contexts")).free < KEPT_FREE:
        docker("buildx", "prune", "--force")  # builds without the cache leave gigabytes, and a full disk stops all


@pytest.fixture(scope="session")
def project(workplace: Path) -> Project:
    return Project.create(workplace / "quick")


@contextlib.contextmanager
def one_worker_at_a_time(config: pytest.Config, folder: Path, what: str) -> Iterator[bool]:
    """Whether this is the first worker of the run to enter. `folder`: the base of pytest's temporary folders."""
    own = folder.parent if hasattr(config, "workerinput") else folder
    with (own / f"{what}.lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.tell() == 0
        file.write("entered\n")


@pytest.fixture(scope="session")
def quick(
    images: None, project: Project, run_id: str, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Proved:
    """The profile that most tests use, made from the locks of the checkout. The first worker writes all layers and runs
    all probes of its level. The others wait, because they need the same layers; each tests and tags the image under a
    name of its own."""
    name = f"e2e-quick-{run_id}"
    project.write(name, extends="cpu", env={"ODD": ODD}, selftest={"level": "quick", "require": list(REQUIRED)})
    shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", project.lock(name))
    with one_worker_at_a_time(pytestconfig, tmp_path_factory.getbasetemp(), "quick") as first:
        if first:
            made = project.run("make", name, "--no-cache", "--json")
        else:
            made = project.with_required_alone().run("make", name, "--json")
    assert made.code == 0, f"{made.stdout}\n{made.stderr}"
    return Proved(project, name, made.document)


@pytest.fixture(scope="session")
def light_index(workplace: Path) -> Mapping[str, str]:
    """The variables that make a folder the only index: it has stand-ins for the wheels of `cpu`."""
    real = lock_file.read(CHECKOUT / "profiles" / "cpu.lock.yaml")
    assert real
    return standin_torch.write_idle_index(workplace / "light-wheels", real.versions)


@pytest.fixture(scope="session")
def light(images: None, light_index: Mapping[str, str], workplace: Path, run_id: str) -> Proved:
    """A verified image whose torch is a stand-in, which only the probe env.libs accepts. It has the base of `quick`.
    For tests of what is done with an image and its evidence: they need neither the 0.6 GB of the real torch nor its
    results."""
    name, root = f"e2e-light-{run_id}", workplace / "light"
    project = Project.create(root).with_cache(root, "wheels").with_env(**light_index).with_required_alone()
    project.cached("layers").symlink_to(machine_cache("layers"))  # they contain the base
    project.write(
        name, base={"bootstrap": "bookworm"}, python="3.11", torch="2.13.0+cpu", env={"ODD": ODD},
        selftest={"level": "quick", "require": ["env.libs"]},
    )  # fmt: skip
    shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", project.lock(name))  # for its base
    made = project.run("make", name, "--json")
    assert made.code == 0, f"{made.stdout}\n{made.stderr}"
    return Proved(project, name, made.document)


@pytest.fixture(scope="session")
def with_apt(images: None, project: Project, run_id: str) -> Proved:
    """An image with Debian packages of its profile. It is not verified."""
    name = f"e2e-apt-{run_id}"
    project.write(name, extends="cpu", apt=DEBIAN_PACKAGES)
    done = project.start("build", name, "--json").finish(600)
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    return Proved(project, name, done.document)


@pytest.fixture(scope="session")
def gpu_name(run_id: str) -> str:
    return f"e2e-gpu-{run_id}"


@pytest.fixture(scope="session")
def gpu_project(images: None, workplace: Path, gpu_name: str) -> Project:
    project = Project.create(workplace / "gpu")
    project.write(gpu_name, extends="step-video")
    shutil.copy(CHECKOUT / "profiles" / "projects" / "step-video.lock.yaml", project.lock(gpu_name))
    return project


@pytest.fixture(scope="session")
def gpu_made(gpu_project: Project, gpu_name: str) -> Result:
    """A real image for an H20, 5.5 GB, built on a machine without one."""
    done = gpu_project.start("make", gpu_name, "--locked", "--allow-unproved", "--json").finish(900)
    if done.code == 0 and done.document["state"] == "verified":
        pytest.skip("this machine has the card: the image was proved")
    return done


@pytest.fixture(scope="session")
def gpu_tag(gpu_made: Result) -> str:
    found: str = gpu_made.document["tags"][0]
    return found


@pytest.fixture(scope="session")
def gpu_other(gpu_made: Result, gpu_project: Project, gpu_name: str) -> Result:
    """The same with a different cuBLAS, as a pin on the command line."""
    wanted = ("make", gpu_name, "--pin", f"cublas={OTHER_CUBLAS}", "--allow-unproved", "--json")
    return gpu_project.start(*wanted).finish(600)


@pytest.fixture(scope="session")
def team(project: Project, registry: Registry, workplace: Path) -> Team:
    """A key pair that is used only here."""
    passphrase, key = secrets.token_hex(16), workplace / "team"
    made = project.run("keygen", "-o", str(key), ENVBUILD_KEY_PASSPHRASE=passphrase)
    assert made.code == 0, made.stderr
    return Team(project, registry, passphrase, key.with_suffix(".pub"), secrets.token_hex(16))


@pytest.fixture(scope="session")
def broken(quick: Proved, workplace: Path, run_id: str) -> Workshop:
    return Workshop(quick.tag, f"envbuild-e2e/{run_id}", workplace / "broken")


@pytest.fixture(scope="session")
def stalling(light: Proved, workplace: Path, run_id: str) -> str:
    """The image `light` whose self-test never ends."""
    return Workshop(light.tag, f"envbuild-e2e/{run_id}-light", workplace / "broken-light").image("stalls")


@pytest.fixture
def verified(quick: Proved) -> Iterator[str]:
    """The image with the tag `verified`. This tag and the tag of the lock are restored afterwards."""
    before = handle(quick.tag)
    assert before
    yield before
    for tag in (quick.tag, quick.verified):
        docker("tag", before, tag)


@pytest.fixture(scope="session")
def links(workplace: Path) -> Path:
    """A folder that stands for an index. It has pip and the real nvcc of CUDA 13.0 with its dependencies, and stand-ins
    for cuBLAS and torch, whose wheels have gigabytes. Only the newest of these torch versions can compile
    extensions."""
    folder = workplace / "links"
    names = ("pip", "ninja", "packaging", "setuptools", "wheel", "typing-extensions",
             "cuda-toolkit==13.0.2", "nvidia-cuda-nvcc==13.0.88", "nvidia-nvvm==13.0.88",
             "nvidia-cuda-crt==13.0.88", "nvidia-cuda-cccl==13.0.85", "nvidia-cuda-profiler-api==13.0.85",
             "nvidia-cuda-runtime==13.0.96")  # fmt: skip
    command(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder,
            *names)  # fmt: skip
    write_wheel(folder, "torch", "2.6.0", content=standin_torch.content("2.6.0+cu124", "12.4"))
    write_wheel(folder, "torch", "2.7.1", content=standin_torch.content("2.7.1+cu126", "12.6"))
    needs = ["cuda-toolkit==13.0.2", "nvidia-cuda-runtime==13.0.96", "nvidia-cublas==13.1.0.3"]
    standin_torch.write_compiling(folder, "2.11.0", "13.0", needs)
    for version in ("13.1.0.3", "13.1.1.3", "13.1.2.11"):
        write_wheel(folder, "nvidia-cublas", version)
    return folder


@pytest.fixture(scope="session")
def indexed_cache(links: Path, workplace: Path) -> Project:
    """A project whose only index is that folder, with a cache that all projects of `indexed` share. Its layers are not
    this machine's, so that each session writes them."""
    project = Project.create(workplace / "indexed").with_cache(workplace / "indexed", "wheels")
    return project.with_env(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(links), PIP_CONFIG_FILE=os.devnull)


@pytest.fixture
def indexed(indexed_cache: Project, scratch: Path, images: None) -> Project:
    """A project whose only index is that folder. Its cache has no sources, archives or compiled extensions of other
    tests; it keeps their wheels, layers and build contexts."""
    for kind in ("sources", "archives", "extensions"):
        if indexed_cache.cached(kind).exists():
            shutil.rmtree(indexed_cache.cached(kind))
    made = Project.create(scratch / "indexed")
    return replace(made, cache=indexed_cache.cache, extra=indexed_cache.extra)
