"""Extensions compiled for real: a small one of our own, with torch's CUDAExtension and nvcc from wheels, for an H200.

Its repository is made here, with a commit for each thing that can be wrong with a source. The images have a stand-in
for torch, which compiles the same way; those with the real torch, of gigabytes, are only built by `make test-images`.
"""

from __future__ import annotations

import functools
import json
import shutil
import signal
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from envbuild.image.extension_wheel_build import jobs_for

from .openregistry import OpenRegistry
from .support import CHECKOUT, Project, Result, Running, command, docker, until
from .test_toolchain import inside, layers, named, toolkit

pytestmark = pytest.mark.engine

SOURCE = Path(__file__).parent / "kernels"
MODULE = "kernels_cuda"
ON = {"env": {"KERNELS_CUDA": "1"}}

# Prepended to a setup.py. The compiler runs out of memory while more than one compiler runs at a time: a real failure
# of the real compiler.
NO_MEMORY = """
import os, pathlib
if os.environ["MAX_JOBS"] != "1":
    folder = pathlib.Path("narrow").resolve()
    folder.mkdir(exist_ok=True)
    for name in ("c++", "g++", "gcc"):
        (folder / name).write_text(f'#!/bin/sh\\nulimit -v 60000\\nexec /usr/bin/{name} "$@"\\n')
        (folder / name).chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
"""
# Prepended to a setup.py: the compilation then takes long enough to be killed.
SLOW = "import time; print('sleeping', flush=True); time.sleep(600 if __import__('os').path.exists('slow') else 0)\n"


@dataclass(frozen=True)
class Repository:
    """A git repository, and its commits by name."""

    folder: Path
    commits: Mapping[str, str]

    def entry(self, commit: str = "new", **keys: Any) -> dict[str, Any]:
        """The extension's entry in a profile; `commit`: the name of one of our commits, or any other commit."""
        found = {"name": "kernels", "git": self.folder.as_uri(), "commit": self.commits.get(commit, commit)}
        return {**found, "build": ON, "modules": [MODULE], **keys}


@pytest.fixture(scope="session")
def repository(workplace: Path) -> Repository:
    folder = workplace / "kernels"
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    setup = (folder / "setup.py").read_text(encoding="utf-8")
    git(folder, "init", "--quiet")
    commits = {}
    for name, text in {
        "old": setup.replace('READS = ("KERNELS_CUDA",)', "READS = ()"),
        "new": setup,
        "hungry": f"{NO_MEMORY}{setup}",
        "broken": setup.replace("kernels_cuda.cu", "missing.cu"),
        "slow": f"{SLOW}{setup}",
    }.items():
        (folder / "setup.py").write_text(text, encoding="utf-8")
        (folder / "slow").write_text("", encoding="utf-8") if name == "slow" else None
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", name)
        commits[name] = git(folder, "rev-parse", "HEAD").strip()
    return Repository(folder, commits)


def git(folder: Path, *arguments: str) -> str:
    who = {f"GIT_{role}_{key}": "test@example.org" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    return command("git", "-C", folder, *arguments, env={**who, "GIT_CONFIG_GLOBAL": "/dev/null"})


@pytest.fixture
def place(indexed: Project) -> Project:
    """A project with its own caches of sources and extensions, so that nothing is compiled already."""
    return indexed


def profile(project: Project, run_id: str, entry: Mapping[str, Any], name: str = "kernels") -> str:
    """Return a profile for an H200 with this extension, on the stand-in for torch."""
    keys = {"torch": "2.11.0", "gpus": ["h200"], "driver": {"minimum": "580.65.06"}}
    return named(project, f"e2e-{name}-{run_id}", **keys, extensions=[dict(entry)], selftest={"require": ["env.libs"]})


def build(project: Project, name: str, *options: str) -> Result:
    return project.start("build", name, "--json", *options).finish(900)


def steps(done: Result) -> dict[str, bool]:
    """Return step -> whether it had nothing to do."""
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    return {step["name"]: step["cached"] for step in done.document["steps"]}


def kept(project: Project) -> list[Path]:
    """Return the wheels in the cache, and anything else there."""
    return sorted(path for path in project.cached("extensions").rglob("*") if path.is_file())


def audited(project: Project, tag: str) -> dict[str, dict[str, list[str]]]:
    """Return extension -> the device code in each of its modules, as listed by the audit of the image."""
    found = project.run("audit", tag, "--json")
    assert found.code == 0, found.stderr
    return {
        item["name"]: {module["name"]: module["architectures"] for module in item["modules"]}
        for item in found.document["extensions"]
    }


@pytest.mark.images
def test_it_works_with_the_real_torch(images: None, repository: Repository, run_id: str, scratch: Path) -> None:
    """The profile for the H200 has this extension instead of its own ones; everything else comes from the shipped
    lock."""
    place, name = Project.create(scratch / "place").with_cache(scratch), f"e2e-kernels-{run_id}"
    place.write(name, extends="h200", extensions=[repository.entry()], selftest={"require": ["env.libs"]})
    shutil.copy(CHECKOUT / "profiles" / "h200.lock.yaml", place.lock(name))
    done = build(place, name)
    assert steps(done)["extensions"] is False
    tag = done.document["tags"][0]
    # the image has the module, and nothing that compiled it
    found = inside(tag, f"python -c 'import torch, {MODULE}; print({MODULE}.launch())'; command -v nvcc ninja || true")
    assert len(found) == 1 and ("driver" in found[0] or "device" in found[0] or found[0] == "no error")
    assert audited(place, tag)["kernels"] == {MODULE: ["sm_90"]}


def test_it_is_compiled_once_and_found_in_the_image(
    place: Project, repository: Repository, run_id: str, scratch: Path
) -> None:
    name = profile(place, run_id, repository.entry())
    done = build(place, name)
    assert steps(done)["extensions"] is False
    tag = done.document["tags"][0]

    # the wheel is as requested, and states what it was made from
    (about, wheel) = sorted(kept(place), key=lambda path: path.suffix)
    metadata = json.loads(about.read_text(encoding="utf-8"))
    assert (wheel.name, metadata["file"]) == ("kernels-0.1-cp311-cp311-linux_x86_64.whl",) * 2
    assert metadata["from"]["source"]["git"] == repository.commits["new"]
    assert metadata["from"]["cuda"] == "13.0" and "TORCH_CUDA_ARCH_LIST=9.0" in metadata["from"]["command"]
    with zipfile.ZipFile(wheel) as archive:
        (compiled,) = [info for info in archive.namelist() if info.endswith(".so")]
        assert b"sm_90" in archive.read(compiled)
    # the image has the module, and nothing that compiled it
    assert inside(tag, "command -v nvcc ninja || true") == []
    assert audited(place, tag)["kernels"] == {MODULE: ["sm_90"]}
    # the lock names the commit, its tree and the compiler's wheels, and no address
    locked = yaml.safe_load(place.lock(name).read_text(encoding="utf-8"))["content"]
    (entry,) = locked["extensions"]
    tree = git(repository.folder, "rev-parse", f"{repository.commits['new']}^{{tree}}").strip()
    assert (entry["git"], entry["tree"]) == (repository.commits["new"], tree)
    assert {"nvidia-cuda-nvcc", "ninja"} <= {item["name"] for item in locked["builder"]["wheels"]}
    addresses = place.lock(name).read_text() + place.dockerfile(name).read_text() + docker("history", tag)
    assert "file://" not in addresses and str(scratch) not in addresses
    # the record of the build names the wheel by its hash
    (record,) = (place.state / "envbuild" / "builds").glob("*.json")
    (held,) = json.loads(record.read_text(encoding="utf-8"))["extensions"]
    assert (held["sha256"], held["key"]) == (metadata["sha256"], about.parent.name)

    # a second profile with the same key uses it although its source is unreachable: the same layers
    unreachable = {**repository.entry(), "git": "file:///nowhere"}
    second = again(place, name, run_id, unreachable, env={"SECOND": "image"})
    assert steps(second)["extensions"] is True
    assert layers(second.document["tags"][0]) == layers(tag)

    # a damaged wheel is not used: it is compiled again, and the result is the same
    wheel.write_bytes(wheel.read_bytes()[:-1])
    third = again(place, name, run_id, repository.entry(), env={"ANOTHER": "image"})
    assert steps(third)["extensions"] is False
    (about, _) = sorted(kept(place), key=lambda path: path.suffix)
    assert json.loads(about.read_text(encoding="utf-8"))["sha256"] == metadata["sha256"]


def test_one_machine_compiles_for_a_team(
    place: Project, repository: Repository, run_id: str, scratch: Path, program: Path
) -> None:
    """Machine A compiles, and stores the wheel in a folder and in a registry. The other machines have a clone of the
    project and caches of their own. The source is unreachable for them."""
    name = profile(place, run_id, repository.entry())
    shared = scratch / "shared"
    shared.mkdir()
    share(place, str(shared))
    first = build(place, name)
    assert steps(first)["extensions"] is False
    image, committed = first.document["image"], place.lock(name).read_bytes()
    (record,) = yaml.safe_load(committed)["compiled"]
    (wheel,) = shared.rglob("*.whl")
    assert (record["sha256"], record["key"]) == (wheel.stem, wheel.parent.name)
    with OpenRegistry(scratch / "registry", program) as registry:
        stored = f"{registry.host}/team/extensions"
        share(place, stored)
        assert "stored" not in build(place, name, "--no-cache").stderr  # no warning
        assert place.lock(name).read_bytes() == committed
        for number, cache in enumerate((str(shared), stored)):
            other = clone(place, scratch / f"machine {number}")
            share(other, cache)
            other.change(name, extensions=[{**repository.entry(), "git": "file:///nowhere"}])
            preview = other.run("make", name, "--dry-run", "--json").document
            row = {"name": "kernels", "source": "fetched", "bytes": record["bytes"], "fault": None}
            row["required_sha256"] = None
            assert (preview["extensions"], preview["extension_cache"]) == ([row], cache)
            done = build(other, name, "--locked")
            assert steps(done)["extensions"] is True and f"from the shared cache {cache}" in done.stderr
            assert done.document["image"] == image and other.lock(name).read_bytes() == committed
        # a machine without an engine
        other = clone(place, scratch / "no engine").with_env(DOCKER_HOST="unix:///nowhere")
        share(other, stored)
        done = build(other, name, "--locked")
        assert (done.code, done.document["state"], done.document["image"]) == (0, "computed", image), done.words
    # a damaged wheel is refused by name; then the source would be needed
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    other = clone(place, scratch / "refusing").with_env(DOCKER_HOST="unix:///nowhere")
    share(other, str(shared))
    refused = build(other, name, "--locked")
    assert (refused.code, refused.error["kind"]) == (6, "build")
    assert f"the wheel in the shared cache {shared} is refused" in refused.stderr and kept(other) == []


def share(project: Project, cache: str) -> None:
    """Set the shared cache of a machine."""
    file = project.config / "envbuild" / "config.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump({"extensions": {"cache": cache}}), encoding="utf-8")


def clone(project: Project, root: Path) -> Project:
    """Return another machine with a clone of the project, and with a copy of the caches that have no extensions."""
    other = Project.create(root)
    shutil.copytree(project.folder, other.folder, dirs_exist_ok=True)
    own = root / "cache" / "envbuild"
    own.mkdir(parents=True)
    for kind in ("wheels", "debs", "bases"):
        (own / kind).symlink_to(project.cached(kind))
    return replace(other, cache=root / "cache", extra=project.extra)


@pytest.mark.images
def test_debians_nvcc_compiles_it_too(images: None, scratch: Path, repository: Repository, run_id: str) -> None:
    """CUDA 12.4 on trixie, with g++ 13. It downloads 4 GB, which are not kept."""
    project = Project.create(scratch / "place").with_cache(scratch, "wheels", "debs")
    name = f"e2e-debian-{run_id}"
    project.write(name, base={"bootstrap": "trixie"}, python="3.13", torch="2.6.0", gpus=["a100"], packages=["numpy"],
                  toolchain="debian", extensions=[repository.entry()], selftest={"require": ["env.libs"]})  # fmt: skip
    done = project.start("build", name, "--json").finish(1800)
    assert steps(done)["extensions"] is False
    tag = done.document["tags"][0]
    (about, _) = sorted(kept(project), key=lambda path: path.suffix)
    metadata = json.loads(about.read_text(encoding="utf-8"))["from"]
    assert metadata["cuda"] == "12.4" and {"CC=gcc-13", "CXX=g++-13"} <= set(metadata["command"])
    assert metadata["compiler"]["nvidia-cuda-toolkit"].startswith("12.4.")
    assert audited(project, tag)["kernels"] == {MODULE: ["sm_80"]}
    # nothing of it is in the image, in particular not the driver's library
    rest = "command -v nvcc g++-13 || true; ls /usr/lib/x86_64-linux-gnu | grep libcuda || true"
    found = inside(tag, f"python -c 'import torch, {MODULE}'; {rest}")
    assert found == []


def again(project: Project, name: str, run_id: str, entry: Mapping[str, Any], **keys: Any) -> Result:
    """Build the image of another profile with the same lock except for `keys`."""
    other = profile(project, run_id, entry, "second")
    project.change(other, **keys)
    shutil.copy(project.lock(name), project.lock(other))
    return build(project, other)


def test_an_older_commit_takes_its_flags_otherwise(place: Project, repository: Repository, run_id: str) -> None:
    """At the older commit, the variable has no effect, and the build would pass without the kernels, so `lock` refuses
    it."""
    name = profile(place, run_id, repository.entry("old"))
    refused = build(place, name)
    assert (refused.code, refused.error["kind"]) == (3, "profile")
    (fault,) = refused.error["faults"]
    assert fault["field"] == "extensions[0].build.env.KERNELS_CUDA" and fault["line"]
    assert "--build-option" in refused.error["hint"]
    settings = {"settings": ["--build-option=--cuda_ext"]}
    place.change(name, extensions=[repository.entry("old", build=settings)])
    assert steps(build(place, name))["extensions"] is False
    assert [path.suffix for path in kept(place)] == [".json", ".whl"] or len(kept(place)) == 2


def fails(project: Project, name: str, *words: str) -> Result:
    """Check that the build exits with 6 and this message, and keeps nothing."""
    done = build(project, name)
    assert (done.code, done.error["kind"]) == (6, "build"), f"{done.stdout}\n{done.stderr}"
    for word in words:
        assert word in done.words
    assert kept(project) == []
    return done


def test_faults_of_a_source_are_reported(place: Project, repository: Repository, run_id: str) -> None:
    name = profile(place, run_id, repository.entry("old", build={"settings": ["--build-option=--unheard_of"]}))
    fails(place, name, "kernels cannot be compiled", "--unheard_of", "build.settings")
    # it gets no settings, builds nothing, and exits with 0
    place.change(name, extensions=[repository.entry("new", build={})])
    fails(place, name, "is not as requested", "py3-none-any", MODULE, "build.env and build.settings")
    place.change(name, extensions=[repository.entry(modules=[MODULE, "kernels_more"])])
    fails(place, name, "kernels_more")
    place.change(name, extensions=[repository.entry("broken")])
    fails(place, name, "missing.cu")


def test_sources_that_cannot_be_had(place: Project, repository: Repository, run_id: str) -> None:
    name = profile(place, run_id, repository.entry("0" * 40))
    unknown = place.run("lock", name, "--json")
    assert (unknown.code, unknown.error["kind"]) == (3, "profile")
    (fault,) = unknown.error["faults"]
    assert fault["field"] == "extensions[0]" and "0" * 40 in fault["message"]
    for address in ("file:///nowhere/kernels", "http://127.0.0.1:1/kernels"):
        place.change(name, extensions=[repository.entry(git=address)])
        gone = place.run("lock", name, "--json")
        assert (gone.code, gone.error["kind"]) == (7, "network")
        assert address in gone.error["message"] and "git_mirror" in gone.error["hint"]
    # a site's mirror replaces the URL
    settings = place.config / "envbuild" / "config.yaml"
    settings.parent.mkdir()
    settings.write_text(f"git_mirror: file://{repository.folder.parent}/{{path}}\n", encoding="utf-8")
    place.change(name, extensions=[repository.entry(git="https://git.example/kernels.git")])
    assert place.run("lock", name, "--json").code == 0


def test_a_compiler_without_memory_is_tried_again_with_fewer_jobs(
    place: Project, repository: Repository, run_id: str
) -> None:
    most = jobs_for(*map(int, docker("info", "--format", "{{.NCPU}} {{.MemTotal}}").split()))
    if most < 2:
        pytest.skip("the engine has one processor, or little memory: the number of jobs cannot be reduced")
    name = profile(place, run_id, repository.entry("hungry"))
    done = build(place, name)
    assert steps(done)["extensions"] is False
    assert f"out of memory with {most} jobs; retrying with {most // 2}" in done.stderr
    (about, _) = sorted(kept(place), key=lambda path: path.suffix)
    assert json.loads(about.read_text(encoding="utf-8"))["jobs"] == 1


def test_builds_that_are_ended_half_way_poison_nothing(place: Project, repository: Repository, run_id: str) -> None:
    name = profile(place, run_id, repository.entry("slow"))
    for end in (interrupt, kill):
        running = place.start("build", name, "--json")
        until("the compile", functools.partial(compiling, running, run_id), 600)
        assert running.alive(), running.stderr
        end(running, run_id)
        assert kept(place) == []
    place.change(name, extensions=[repository.entry("new")])
    assert steps(build(place, name))["extensions"] is False
    assert [path.suffix for path in sorted(kept(place), key=lambda path: path.suffix)] == [".json", ".whl"]


def asleep(run_id: str) -> bool:
    """Whether a compilation runs: the command line of buildx contains the name of the profile."""
    listed = command("ps", "-ww", "-eo", "args").splitlines()
    return any("wheel-kernels" in line and run_id in line for line in listed)


def compiling(running: Running, run_id: str) -> bool:
    """Whether the compilation has begun, or the build has ended."""
    return asleep(run_id) or not running.alive()


def interrupt(running: Running, run_id: str) -> None:
    running.process.send_signal(signal.SIGINT)
    assert running.finish(60).code == 130
    until("the end of the compile", lambda: not asleep(run_id), 60)


def kill(running: Running, run_id: str) -> None:
    running.kill()


def test_nvcc_of_another_release_compiles_nothing(
    indexed: Project, repository: Repository, run_id: str, scratch: Path
) -> None:
    """An archive of a different toolkit is refused while locking; one with a false version, before compilation
    begins."""
    entry = repository.entry()
    keys: dict[str, Any] = {"torch": "2.7.1", "gpus": ["a100"], "extensions": [entry]}
    name = named(indexed, f"e2e-release-{run_id}", toolchain=toolkit(scratch), **{**keys, "torch": "2.6.0"})
    refused = indexed.run("lock", name, "--json")
    assert (refused.code, refused.error["kind"]) == (3, "profile")
    (fault,) = refused.error["faults"]
    assert fault["field"] == "toolchain" and "12.6" in fault["message"] and "12.4" in fault["message"]
    indexed.change(name, torch="2.7.1", toolchain=toolkit(scratch, "12.4"))
    lied = build(indexed, name)
    assert (lied.code, lied.error["kind"]) == (6, "build"), lied.words
    assert "CUDA 12.4" in lied.words and "12.6" in lied.words and "toolchain" in lied.words


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, run_id: str) -> Iterator[None]:
    """Remove each image of 6 GB before the next one is built. Images with the stand-in for torch stay until the end of
    the session, so that the engine keeps their base, half a gigabyte."""
    yield
    if not request.node.get_closest_marker("images"):
        return
    listed = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
    ours = [
        name
        for name in listed
        if run_id in name and any(f"e2e-{kind}-" in name for kind in ("kernels", "second", "release"))
    ]
    if ours:
        docker("image", "rm", "--force", *ours)
