"""nvcc in the image, and archives by sha256: built for real, with a stand-in for torch that computes nothing."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from unit.support import write_tar

from .support import CHECKOUT, Project, Result, command, docker, inspect

pytestmark = pytest.mark.engine

HOST, NEWER = "535.183.01", "580.95.05"
COMPAT = "/usr/local/cuda/compat"
_LIBRARY = "int driver(void) { return %s; }\n"


def library(folder: Path, version: str) -> bytes:
    """Return a libcuda.so.1 that reports this driver version."""
    source, built = folder / "cuda.c", folder / f"libcuda.so.{version}"
    source.write_text(_LIBRARY % version.partition(".")[0], encoding="utf-8")
    command("gcc", "-shared", "-fPIC", "-s", "-Wl,-soname,libcuda.so.1", "-o", built, source)
    return built.read_bytes()


def compat(folder: Path, version: str = NEWER) -> dict[str, str]:
    """Return an archive of forward-compatibility libraries, as named in a profile."""
    links = {"type": tarfile.SYMTYPE, "linkname": f"libcuda.so.{version}"}
    members: dict[str, Any] = {
        f"./usr/local/cuda-13.0/compat/libcuda.so.{version}": library(folder, version),
        "./usr/local/cuda-13.0/compat/libcuda.so.1": links,
        "./usr/share/doc/cuda-compat/copyright": b"left out",
    }
    file = folder / f"compat-{version}.tar.xz"
    return {"sha256": write_tar(file, members, "w:xz"), "url": file.as_uri()}


def toolkit(folder: Path, says: str = "12.6") -> dict[str, str]:
    """Return a toolkit of CUDA 12.6.3 whose nvcc reports the given release."""
    script = f"#!/bin/sh\necho 'Cuda compilation tools, release {says}, V{says}.85'\n"
    members: dict[str, Any] = {
        "cuda-12.6/version.json": b'{"cuda": {"version": "12.6.3"}}',
        "cuda-12.6/bin/nvcc": script.encode(),
        "cuda-12.6/lib64": {"type": tarfile.SYMTYPE, "linkname": "targets/x86_64-linux/lib"},
        "cuda-12.6/targets/x86_64-linux/lib/libcudart.so.12": b"the runtime",
    }
    file = folder / f"toolkit-{says}.tar.gz"
    return {"sha256": write_tar(file, members), "url": file.as_uri()}


def built(project: Project, name: str) -> str:
    """Return the tag of the image."""
    done = project.start("build", name, "--json").finish(400)
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    tag: str = done.document["tags"][0]
    return tag


def inside(tag: str, script: str) -> list[str]:
    return docker("run", "--rm", "--network", "none", tag, "sh", "-ec", script).splitlines()


def layers(tag: str) -> list[str]:
    found: list[str] = json.loads(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", tag))
    return found


def named(project: Project, name: str, **keys: Any) -> str:
    """Return a profile on the base of a shipped lock, which other tests have built."""
    project.write(name, base={"bootstrap": "bookworm"}, python="3.11", **keys)
    shutil.copy(CHECKOUT / "profiles" / "projects" / "step-video.lock.yaml", project.lock(name))
    return name


@pytest.fixture
def archived(indexed: Project, scratch: Path, run_id: str) -> str:
    """Return a profile with a toolkit and forward-compatibility libraries from archives."""
    return named(
        indexed, f"e2e-archives-{run_id}", torch="2.7.1", gpus=["a100"], variant="devel", toolchain=toolkit(scratch),
        driver={"minimum": "470.57.02", "compat": compat(scratch)},
    )  # fmt: skip


def test_archives_are_unpacked_and_used_only_where_they_must(indexed: Project, archived: str, scratch: Path) -> None:
    tag = built(indexed, archived)
    listed = f"cd {COMPAT}; for file in *; do echo $file $(readlink $file); done"
    found = inside(tag, f"nvcc --version; command -v nvcc; echo $CUDA_HOME; {listed}")
    assert found == [
        "Cuda compilation tools, release 12.6, V12.6.85", "/usr/local/cuda/bin/nvcc", "/usr/local/cuda",
        f"libcuda.so.1 libcuda.so.{NEWER}", f"libcuda.so.{NEWER}",
    ]  # fmt: skip
    assert inside(tag, "readlink /usr/local/cuda/lib64/libcudart.so") == ["libcudart.so.12"]
    addresses = indexed.lock(archived).read_text() + indexed.dockerfile(archived).read_text() + docker("history", tag)
    assert "file://" not in addresses and str(scratch) not in addresses

    # A container as the container toolkit creates it: the host's library is mounted, and if it is older, a line for the
    # loader is added.
    (scratch / "host").write_bytes(library(scratch, HOST))
    ask = "import ctypes; print(ctypes.CDLL('libcuda.so.1').driver())"
    script = f"""
        cp /host /usr/lib/x86_64-linux-gnu/libcuda.so.{HOST}; ldconfig; python -c "{ask}"
        echo {COMPAT} >/etc/ld.so.conf.d/00-compat-1.conf; ldconfig; python -c "{ask}"
    """
    run = ("run", "--rm", "--network", "none", "--volume", f"{scratch}/host:/host:ro", tag, "sh", "-ec", script)
    assert docker(*run).split() == ["535", "580"]


def test_another_archive_changes_one_layer(indexed: Project, archived: str, scratch: Path) -> None:
    before = layers(built(indexed, archived))
    indexed.change(archived, driver={"minimum": "470.57.02", "compat": compat(scratch, "590.44.01")})
    after = layers(built(indexed, archived))
    assert len([1 for old, new in zip(before, after, strict=True) if old != new]) == 1


def test_an_nvcc_of_another_release_ends_the_build(indexed: Project, archived: str, scratch: Path) -> None:
    """The version file of its toolkit says 12.6."""
    indexed.change(archived, toolchain=toolkit(scratch, "12.4"))
    done = indexed.run("build", archived, "--json")
    assert (done.code, done.error["kind"]) == (6, "build")
    assert "/usr/local/cuda/bin/nvcc is of CUDA 12.4; torch needs CUDA 12.6" in done.error["message"]


def locked(project: Project, name: str, **driver: Any) -> Result:
    project.change(name, variant="runtime", driver=driver)
    return project.run("lock", name, "--json")


def test_an_invalid_archive_is_refused_before_anything_is_built(indexed: Project, archived: str, scratch: Path) -> None:
    good = compat(scratch)
    wrong = locked(indexed, archived, compat={**good, "sha256": "0" * 64})
    assert (wrong.code, wrong.error["kind"]) == (3, "hash")
    gone = locked(indexed, archived, compat={**good, "url": f"{good['url']}.gone"})
    assert (gone.code, gone.error["kind"]) == (7, "network")
    closed = locked(indexed, archived, compat={**good, "url": "http://127.0.0.1:1/compat.tar.xz"})
    assert (closed.code, closed.error["kind"]) == (7, "network")
    members: dict[str, Any] = {"libcuda.so.580.95.05": b"x", "evil": {"type": tarfile.SYMTYPE, "linkname": "/etc"}}
    file = scratch / "evil.tar.gz"
    evil = locked(indexed, archived, compat={"sha256": write_tar(file, members), "url": file.as_uri()})
    assert (evil.code, evil.error["kind"]) == (3, "profile")
    (fault,) = evil.error["faults"]
    assert (fault["field"], "outside the folder" in fault["message"]) == ("driver.compat", True)


SOURCE = """
#include <cstdio>
#include <cub/cub.cuh>
#include <cuda_profiler_api.h>
__global__ void add(float *x) { x[threadIdx.x] += 1.0f; }
int main() { int version = 0; cudaRuntimeGetVersion(&version); std::printf("%d", version); }
"""


def test_nvcc_from_wheels_compiles_and_a_pin_of_cublas_changes_its_layer(
    indexed: Project, run_id: str, scratch: Path
) -> None:
    driver = {"minimum": "550.54.14", "compat": compat(scratch)}  # too old for CUDA 13 without forward compatibility
    name = named(indexed, f"e2e-nvcc-{run_id}", torch="2.11.0", gpus=["h200"], driver=driver,
                 pins={"cublas": {"version": "13.1.1.3", "reason": "as a test"}})  # fmt: skip
    shutil.copy(indexed.lock(name), indexed.lock(f"{name}-devel"))  # both keep its Debian packages
    tag = built(indexed, f"{name}-devel")
    assert tag.startswith(f"envbuild/{name}-devel:")
    (scratch / "a.cu").write_text(SOURCE, encoding="utf-8")
    # by way of lib64 and libcudart.so, neither of which the wheels have
    script = """
        nvcc --version | grep release
        nvcc -arch=sm_90 -cudart shared -o /tmp/a /a.cu; LD_LIBRARY_PATH=$CUDA_HOME/lib64 /tmp/a; echo
        pip check
    """
    run = ("--user", "4242", "--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--volume", f"{scratch}/a.cu:/a.cu:ro")
    output = docker("run", "--rm", "--network", "none", *run, tag, "sh", "-ec", script).splitlines()
    assert output[1:] == ["13000", "No broken requirements found."]
    assert "release 13.0, V13.0.88" in output[0]

    image, before, runtime = inspect(tag)["Id"], layers(tag), layers(built(indexed, name))
    # a tried pin changes no file and moves no tag
    files = {file: file.read_bytes() for file in indexed.folder.rglob("*") if file.is_file()}
    pin = ("--pin", "cublas=13.1.2.11", "--allow-unproved", "--json")
    tried = indexed.start("make", f"{name}-devel", *pin).finish(400)
    assert (tried.code, tried.document["state"]) == (0, "unverified"), f"{tried.stdout}\n{tried.stderr}"
    assert tried.document["tags"] != [tag] and inspect(tag)["Id"] == image
    assert {file: file.read_bytes() for file in indexed.folder.rglob("*") if file.is_file()} == files
    after = layers(tried.document["tags"][0])
    changed = [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    # the library's, and the metadata that name its version; only the links for linkers follow
    assert changed == [len(before) - 3, len(before) - 2]
    # the devel image has all layers of the runtime image, up to torch in the same order
    assert set(runtime) < set(before)
    assert runtime[:4] == before[:4]
