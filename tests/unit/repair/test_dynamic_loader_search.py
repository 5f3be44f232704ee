"""The predicted files are those that the real loader loads: RPATH, RUNPATH and LD_LIBRARY_PATH in each combination."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from selftest.environments import built

from envbuild.repair import dynamic_loader_search
from envbuild.repair.dynamic_loader_search import LoaderInput
from envbuild.selftest.inventory.elf_reader import Elf

LOADER = Path("/lib64/ld-linux-x86-64.so.2")
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build a library with")


@functools.cache
def leaf(name: str) -> bytes:
    return built("", name, linked={})


@functools.cache
def linked(name: str, *needed: str, tag: str = "", folders: str = "") -> bytes:
    flags = [f"-Wl,--{tag}-new-dtags,-rpath,{folders}"] if folders else []
    flags += [f"-l:{one}" for one in needed]
    return built("", name, *flags, "-Wl,--allow-shlib-undefined", linked={one: leaf(one) for one in needed})


def put(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def real(root: Path, variables: dict[str, str]) -> dict[str, str]:
    """Return the dynamic loader's own answer, with this file as the main program."""
    done = subprocess.run(
        [LOADER, "--list", root], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    rows = (line.split() for line in done.stdout.splitlines())
    return {row[0]: os.path.realpath(row[2]) for row in rows if len(row) > 2 and row[1] == "=>" and "envlib" in row[0]}


@needs_gcc
@pytest.mark.parametrize(
    ("top", "middle", "variable"), list(itertools.product(("", "enable", "disable"), ("", "enable", "disable"), (0, 1)))
)
def test_the_real_loader_takes_the_same_files(tmp_path: Path, top: str, middle: str, variable: int) -> None:
    """top requires middle and bottom, middle requires bottom; copies of bottom are in four folders."""
    root = tmp_path.resolve()
    for folder in ("a", "b", "path", "middle/own"):
        put(root / folder, "libenvlib_bottom.so.1", leaf("libenvlib_bottom.so.1"))
    put(
        root / "middle", "libenvlib_middle.so.1",
        linked("libenvlib_middle.so.1", "libenvlib_bottom.so.1", tag=middle, folders="$ORIGIN/own" if middle else ""),
    )  # fmt: skip
    file = put(
        root, "libenvlib_top.so",
        linked("libenvlib_top.so", "libenvlib_middle.so.1", tag=top, folders="$ORIGIN/middle:$ORIGIN/a" if top else ""),
    )  # fmt: skip
    variables = {"LD_LIBRARY_PATH": f"{root}/path:{root}/middle" if variable or not top else f"{root}/b"}
    found = dynamic_loader_search.loaded_files(LoaderInput(str(file), (), variables["LD_LIBRARY_PATH"]))
    assert {name: item.path for name, item in found.items() if "envlib" in name} == real(file, variables)


@needs_gcc
def test_a_preloaded_file_comes_before_an_rpath(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    inner = put(root / "a", "libenvlib_bottom.so.1", leaf("libenvlib_bottom.so.1"))
    outer = put(root / "b", "libenvlib_bottom.so.1", leaf("libenvlib_bottom.so.1"))
    top = put(root, "top.so", linked("top.so", "libenvlib_bottom.so.1", tag="disable", folders="$ORIGIN/a"))
    plain = dynamic_loader_search.loaded_files(LoaderInput("/bin/true", (str(top),)))
    assert plain["libenvlib_bottom.so.1"].path == str(inner)
    assert plain["libenvlib_bottom.so.1"].way == f"RPATH of {top}"
    preloaded = dynamic_loader_search.loaded_files(LoaderInput("/bin/true", (str(top),), preload=str(outer)))
    assert (preloaded["libenvlib_bottom.so.1"].path, preloaded["libenvlib_bottom.so.1"].way) == (
        str(outer),
        "LD_PRELOAD",
    )


@needs_gcc
def test_planned_and_removed_files(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    old = put(root / "a", "libenvlib_bottom.so.1", leaf("libenvlib_bottom.so.1"))
    top = put(root, "top.so", linked("top.so", "libenvlib_bottom.so.1", tag="enable", folders="$ORIGIN/a:$ORIGIN/new"))
    new = str(root / "new" / "libenvlib_bottom.so.1")
    given = LoaderInput("/bin/true", (str(top),), planned={str(old): None, new: Elf(soname="libenvlib_bottom.so.1")})
    assert dynamic_loader_search.loaded_files(given)["libenvlib_bottom.so.1"].path == new


def test_a_file_that_is_not_elf_is_passed_over(tmp_path: Path) -> None:
    file = put(tmp_path, "libtorch_cuda.so", b"no library")
    assert dynamic_loader_search.loaded_files(LoaderInput(str(file), (str(file),))) == {}
