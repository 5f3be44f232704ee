"""The other measurements of the build benchmark: the speed of the disk, an installation without an image, a fetch over
a slow link, the times of `lock` and of other commands, and the share of the self-test's time that its probes do not
use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import recorded_uv
from rounds import Rounds
from stock import CHECKOUT, PINS, profile
from ways import Ours

from envbuild.fetch.wheel_resolution_and_download import uv_binary
from envbuild.lock import lock_file
from envbuild.resolve import profile_reader_and_overrides

_BLOCK = bytes(1 << 22)
_REPEATED = 5
_LOCKED = 3
ENVBUILD = (sys.executable, "-m", "envbuild")
LINK = 100e6 / 8  # bytes per second: 100 Mbit/s
# Lower bounds for the times of the commands: the import of the libraries that they need.
_READING = "import click, yaml, packaging.requirements, platformdirs; from pydantic import BaseModel, TypeAdapter"
LIBRARIES = {
    "libraries of show, imported": _READING,
    "libraries of make, imported": f"{_READING}; import docker",
}


def seconds(argv: Sequence[str | Path], env: dict[str, str], cwd: Path) -> float:
    begin = time.perf_counter()
    done = subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True)
    took = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, argv))} ended with {done.returncode}: {done.stderr[-2000:]}")
    return took


def disk(folder: Path, size: int) -> dict[str, float]:
    """Measure bytes per second for one file of `size` bytes. `new_file`: a new file, without fsync; `disk`: the same
    with fsync; `memory`: the file written again in place, without fsync, when the machine already has memory for its
    pages."""
    file = folder / "disk"
    os.sync()
    with file.open("wb") as stream:
        begin = time.perf_counter()
        _fill(stream, size)
        filled = time.perf_counter()
        os.fsync(stream.fileno())
        flushed = time.perf_counter()
        stream.seek(0)
        _fill(stream, size)
        again = time.perf_counter()
    file.unlink()
    return {"new_file": size / (filled - begin), "disk": size / (flushed - begin), "memory": size / (again - flushed)}


def _fill(stream: BinaryIO, size: int) -> None:
    for _ in range(size // len(_BLOCK)):
        stream.write(_BLOCK)
    stream.flush()


def plain(rounds: Rounds) -> None:
    """Install the same wheels with uv into a folder of this machine, and hash the result, as a lower bound for the time
    to build an image."""
    stock = rounds.stock
    folder = stock.folder / "plain"
    wanted = {
        "all wheels": [item.wheel for item in stock.wheels],
        "the pin's wheel": [stock.cublas[PINS[1]].wheel],
    }
    for case, wheels in wanted.items():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files = [stock.folder / "wheels" / wheel.sha256 / wheel.file for wheel in wheels]
        env = {**os.environ, "UV_CACHE_DIR": str(folder / "cache")}
        took = seconds(
            [uv_binary(), "pip", "install", "--no-config", "--offline", "--no-deps", "--no-index",
             "--python-version=3.11", "--link-mode=hardlink", "--python", sys.executable, "--target",
             folder / "site", *files],
            env, folder,
        )  # fmt: skip
        begin = time.perf_counter()
        for file in sorted((folder / "site").rglob("*")):
            if file.is_file():
                with file.open("rb") as stream:
                    hashlib.file_digest(stream, "sha256")
        rounds.note("no image", case, seconds=took, hashed=time.perf_counter() - begin)
    shutil.rmtree(folder)


def slow_link(rounds: Rounds, ours: Ours) -> None:
    """Fetch one missing wheel over a link of 100 Mbit/s. Record the time of the fetch and the minimum time of the
    link."""
    stock = rounds.stock
    wheel = stock.cublas[PINS[1]].wheel
    shutil.rmtree(stock.cache / "envbuild" / "wheels" / wheel.sha256, ignore_errors=True)
    stock.forget_builds()
    link = stock.mirror.link
    link.rate, link.sent = LINK, 0
    script = (
        "import sys, time; from envbuild.fetch import sha256_file_store, wheel_resolution_and_download as wheels; "
        "from envbuild.lock import lock_file; "
        "from envbuild.resolve import plan_resolver, profile_reader_and_overrides; "
        "source = profile_reader_and_overrides.load(sys.argv[1]); "
        "plan = plan_resolver.resolve(source); locked = lock_file.read(source.known_lock); "
        "begin = time.perf_counter(); "
        "store = sha256_file_store.wheel_store(); "
        "wheels.fetch_wheels(locked.wheels, plan.python, plan.glibc, store, lambda name, count: None); "
        "print(time.perf_counter() - begin)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, profile(PINS[1])], cwd=stock.project, env=stock.environment,
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        link.rate = None
    rounds.note("100 Mbit/s", ours.name, seconds=float(done.stdout), link=link.sent / LINK, bytes=link.sent)


def lockable() -> list[str]:
    """Return the shipped profiles that compile no extension from git, which would need git and a further host."""
    files = [f for f in sorted((CHECKOUT / "profiles").rglob("*.yaml")) if not f.name.endswith(".lock.yaml")]
    loaded = [profile_reader_and_overrides.load(str(file)) for file in files]
    return [one.name for one in loaded if not any(extension.git for extension in one.profile.extensions)]


def locks(rounds: Rounds, folder: Path) -> None:
    """Time `lock` of all shipped profiles with nothing changed; `lock --upgrade` of the `lockable` ones; and, alone,
    the calls of uv that `lock --upgrade` makes."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(CHECKOUT / "profiles", folder / "profiles")
    env, calls = rounds.stock.outside, folder / "uv"
    names = lockable()
    # without Requires-Python, releases for other Pythons make the chosen versions seem old
    upgrade = ["lock", *names, "--upgrade", "--accept-old", lock_file.EVERYTHING]
    # fills uv's cache with the responses of the indexes
    seconds([*recorded_uv.recording(uv_binary(), calls), *upgrade], env, folder)
    rounds.note("lock", "nothing changed", seconds=seconds([*ENVBUILD, "lock"], env, folder))
    for _ in range(_LOCKED):
        took = seconds([*ENVBUILD, *upgrade], env, folder)
        rounds.note("lock", "with --upgrade", seconds=took, profiles=len(names))
        took, count = recorded_uv.repeated(calls)
        rounds.note("lock", "its calls of uv", seconds=took, calls=count)


def commands(rounds: Rounds) -> None:
    """Time the commands that need neither an index nor an engine."""
    env, folder = rounds.stock.outside, rounds.stock.project
    commands = (("--help",), ("show", "cpu"), ("show", profile(PINS[0])), ("lock", profile(PINS[0]), "--check"))
    seconds([*ENVBUILD, "show"], env, folder)  # compiles the modules
    for arguments in commands:
        rounds.note("commands", " ".join(arguments), seconds=seconds([*ENVBUILD, *arguments], env, folder))
    for name, modules in LIBRARIES.items():
        rounds.note("commands", name, seconds=seconds([sys.executable, "-c", modules], env, folder))


def audit(rounds: Rounds, ours: Ours) -> None:
    """Time the audit of the image with the first pin, which is already built."""
    env = {**rounds.stock.environment, "DOCKER_HOST": rounds.arena.host}
    argv = [*ENVBUILD, "audit", ours.tag(PINS[0])]
    rounds.note("commands", "audit", seconds=seconds(argv, env, rounds.stock.project))


def proved(rounds: Rounds) -> None:
    """Run `make` for the shipped profile cpu. Measure its self-test, the sum of its probes' times, and a container that
    only imports torch. Then measure `make` with nothing changed, and `docker image inspect`."""
    arena, stock = rounds.arena, rounds.stock
    folder = stock.folder / "proved"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    env = {**stock.outside, "DOCKER_HOST": arena.host}
    seconds([*ENVBUILD, "make", "cpu"], env, folder)
    begin = time.perf_counter()
    argv = [*ENVBUILD, "test", "cpu", "--json"]
    stdout = subprocess.run(argv, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout
    whole = time.perf_counter() - begin
    probes = sum(probe["seconds"] for probe in json.loads(stdout)["probes"])
    rounds.note("self-test", "cpu, standard", seconds=whole, probes=probes)
    alone = ["docker", "run", "--rm", "--network=none", "envbuild/cpu:verified", "python", "-c", "import torch"]
    rounds.note("self-test", "a container that imports torch", seconds=seconds(alone, env, folder))
    for _ in range(_REPEATED):
        rounds.note("nothing changed", "make", seconds=seconds([*ENVBUILD, "make", "cpu"], env, folder))
        inspect = seconds(["docker", "image", "inspect", "envbuild/cpu:verified"], env, folder)
        rounds.note("nothing changed", "docker image inspect", seconds=inspect)
