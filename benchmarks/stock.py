"""Prepares everything that the build benchmark needs before it measures: wheels, the base, locks, and the images of the
compared tools."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from arena import Arena
from mirror import Mirror
from registry import Registry

from envbuild.facts.database import suites
from envbuild.fetch import apt_resolution_and_download, sha256_file_store, wheel_resolution_and_download
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.fetch.sha256_file_store import Store
from envbuild.image import debian_base_tar
from envbuild.image.layers import layer_cache
from envbuild.image.layers.base_and_empty_venv_layers import BaseLayer
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock

CHECKOUT = Path(__file__).parents[1]
PROFILE = "step-video"
CUBLAS = "nvidia-cublas-cu12"
# The profile's own pin; a changed pin whose wheel must be downloaded; a changed pin whose wheel is already on this
# machine.
PINS = ("12.5.2.13", "12.5.3.2", "12.6.4.1")
# The profile that is built and whose pin is changed; and the profile of a second GPU, with the same torch.
BENCH, SECOND = "bench", "second"
# GPU models of the profiles that share one torch. Each profile has one of the pins.
SHARING = (
    "h100", "h200", "h20", "h800", "a100", "a800", "a30", "a40", "a10", "a16", "l4", "l20", "l40s", "rtx3080",
    "rtx3090", "rtx4090",
)  # fmt: skip


@dataclass(frozen=True)
class Stock:
    """`folder`: contains everything; `project`: the folder in which envbuild runs, with a profile for each pin and a
    profile for a second GPU; `wheels`: the locked wheels of the profile step-video; `cublas`: cuBLAS version -> wheel;
    `base`, `uv`: image references for the compared tools."""

    folder: Path
    wheels: tuple[LockedWheel, ...]
    cublas: Mapping[str, LockedWheel]
    mirror: Mirror
    base: str
    uv: str

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for envbuild: separate user folders, the mirror as the only index, and compiled
        modules as after an installation."""
        return {**self.outside, **self.mirror.environment}

    @property
    def outside(self) -> dict[str, str]:
        """The same variables with the indexes that this machine is configured with."""
        found = {
            **os.environ, "PYTHONPATH": str(CHECKOUT),
            "PYTHONPYCACHEPREFIX": f"{self.folder}/compiled", "XDG_CACHE_HOME": str(self.cache),
            "XDG_STATE_HOME": f"{self.folder}/state", "XDG_CONFIG_HOME": f"{self.folder}/config",
        }  # fmt: skip
        found.pop("PYTHONDONTWRITEBYTECODE", None)
        return found

    def requirements(self, pin: str) -> str:
        """Return the exact versions of everything in the image, one per line."""
        rest = (item.wheel for item in self.wheels if item.wheel.name != CUBLAS)
        return "".join(f"{wheel.name}=={wheel.version}\n" for wheel in rest) + f"{CUBLAS}=={pin}\n"

    def forget(self) -> None:
        """Remove envbuild's downloads, builds, and digests of layers, but keep its base."""
        shutil.rmtree(self.cache / "envbuild" / "wheels", ignore_errors=True)
        self.forget_layers()
        shutil.rmtree(self.cache / "uv", ignore_errors=True)
        self.forget_builds()

    def forget_layers(self) -> None:
        """Remove the digests of layers that envbuild has found, but keep those of layers whose blob is cached: of the
        base."""
        folder = self.cache / "envbuild" / "layers"
        blobs = {file.name for file in folder.glob("blobs/*")}
        for file in folder.glob("*.json"):
            if json.loads(file.read_text(encoding="utf-8"))["digest"].removeprefix("sha256:") not in blobs:
                file.unlink()

    def forget_builds(self) -> None:
        """Remove envbuild's builds."""
        shutil.rmtree(self.cache / "envbuild" / "contexts", ignore_errors=True)
        shutil.rmtree(self.folder / "state", ignore_errors=True)

    def change(self, pin: str) -> None:
        """Change the profile and its lock to this version of cuBLAS."""
        folder = self.project / "profiles"
        for end in (".yaml", ".lock.yaml"):
            shutil.copy(folder / f"{profile(pin)}{end}", folder / f"{BENCH}{end}")
        (self.project / "dockerfiles" / f"{BENCH}.Dockerfile").unlink(missing_ok=True)

    def tag(self, name: str, locked: str) -> str:
        """Return the tag of the image of profile `name` that was built from the lock of profile `locked`."""
        return f"envbuild/{name}:{_lock(self.project / 'profiles' / f'{locked}.lock.yaml').short}"

    def bring(self, pin: str) -> None:
        """Add a cuBLAS wheel, as if another profile had downloaded it."""
        sha256 = self.cublas[pin].wheel.sha256
        shutil.copytree(
            self.folder / "wheels" / sha256, self.cache / "envbuild" / "wheels" / sha256, dirs_exist_ok=True
        )


def profile(pin: str) -> str:
    """Return the name of the profile with this cuBLAS."""
    return f"bench-{pin.replace('.', '-')}"


def sharing(gpu: str) -> str:
    """Return the name of the profile of a GPU in SHARING."""
    return f"sharing-{gpu}"


def kept(folder: Path, say: Callable[[str], None]) -> tuple[tuple[LockedWheel, ...], dict[str, LockedWheel]]:
    """Return the wheels for all tools. The wheels are downloaded once from the machine's indexes, into
    `folder`/wheels."""
    locked = _lock(CHECKOUT / "profiles" / "projects" / f"{PROFILE}.lock.yaml")
    kept = Store(folder / "wheels")
    glibc = suites()[locked.suite or ""].glibc
    own = next(item for item in locked.wheels if item.wheel.name == CUBLAS)
    cublas = {own.wheel.version: own}
    for version in (*PINS[1:], _torchs_own(locked)):
        addresses = wheel_resolution_and_download.locate({CUBLAS: version}, locked.python, glibc)
        ((wheel, size),) = wheel_resolution_and_download.sizes(addresses).items()
        cublas[version] = LockedWheel(wheel, size, CUBLAS)
    wanted = {item.wheel.sha256: item for item in (*locked.wheels, *cublas.values())}
    for item in wanted.values():  # one at a time, because several versions of one distribution are needed
        if not kept.holds(item.wheel.sha256, item.wheel.file):
            say(f"fetching {item.wheel.file}, {item.bytes / 1e6:.0f} MB")
            wheel_resolution_and_download.fetch_wheels([item], locked.python, glibc, kept, lambda name, count: None)
    return locked.wheels, cublas


def _torchs_own(locked: Lock) -> str:
    """Return the version of cuBLAS that torch requires: pip downloads it before the override is installed."""
    (override,) = (one for one in locked.overrides if one.name == CUBLAS)
    return override.replaces.removeprefix("==")


def _lock(file: Path) -> Lock:
    found = lock_file.read(file)
    assert found, file
    return found


def profiles(stock: Stock, say: Callable[[str], None]) -> None:
    """Create a project with a profile and a lock for each pin, for a second GPU and for each GPU of SHARING, on the
    shipped Debian packages."""
    folder = stock.project / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    source = yaml.safe_load((CHECKOUT / "profiles" / "projects" / f"{PROFILE}.yaml").read_text(encoding="utf-8"))
    pinned = {pin: {"cublas": {"version": pin, "reason": "to be measured"}} for pin in PINS}
    for pin in PINS:
        _write(folder, profile(pin), {**source, "pins": pinned[pin]})
    _write(folder, SECOND, {**source, "gpus": ["h100"], "description": "the same torch on another GPU"})
    for gpu, pin in zip(SHARING, itertools.cycle(PINS)):
        _write(folder, sharing(gpu), {**source, "gpus": [gpu], "pins": pinned[pin]})
    shipped = CHECKOUT / "profiles" / "projects" / f"{PROFILE}.lock.yaml"
    for name in (*map(profile, PINS), SECOND, *map(sharing, SHARING)):
        target = folder / f"{name}.lock.yaml"
        if not target.exists():
            shutil.copy(shipped, target)
            say(f"locking {name}")
        run(stock, "lock", name)


def _write(folder: Path, name: str, keys: Mapping[str, object]) -> None:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(keys), sort_keys=False), encoding="utf-8")


def run(stock: Stock, *arguments: str, engine: Arena | None = None) -> str:
    """Return the stdout of an envbuild command, which must succeed."""
    return _python(stock, ["-m", "envbuild", *arguments], {"DOCKER_HOST": engine.host} if engine else {})


def run_program(stock: Stock, program: Path, *arguments: str) -> str:
    """Return the stdout of a Python program that uses envbuild, which must succeed."""
    return _python(stock, [str(program), *arguments], {})


def _python(stock: Stock, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    env = {**stock.environment, **variables}
    done = subprocess.run([sys.executable, *arguments], cwd=stock.project, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-3000:]}{done.stdout[-2000:]}"
        )
    return done.stdout


def bases(stock: Stock, say: Callable[[str], None]) -> Path:
    """Build the root file system that all tools use, with envbuild, in the benchmark's own cache. Also compress the
    root file system there, because the other tools find it compressed in a registry."""
    locked = _lock(stock.project / "profiles" / f"{profile(PINS[0])}.lock.yaml")
    assert locked.suite
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(stock.cache)
    try:
        if not debian_base_tar.tar_file(locked).is_file():
            say("making the base")
            apt_resolution_and_download.fetch_debs(locked.base, locked.suite, sha256_file_store.debs(), locked.made)
            debian_base_tar.make_base(locked, sha256_file_store.debs(), lambda line: None)
        tar = debian_base_tar.tar_file(locked)
        layer_cache.stream_layer(BaseLayer(tar))
        return tar
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def images(stock_folder: Path, tar: Path, pip: Path, arena: Arena, registry: Registry) -> tuple[str, str]:
    """Push the base image of the compared tools, and uv's own image, to the registry from which every run pulls them.
    Return their references."""
    folder = stock_folder / "base"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pip").mkdir(parents=True)
    shutil.copy(tar, folder / "base.tar")
    shutil.copy(pip, folder / "pip" / pip.name)
    shutil.copy(wheel_resolution_and_download.uv_binary(), folder / "uv")
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY uv /uv\n", encoding="utf-8")
    references = (f"{registry.host}/base:1", f"{registry.host}/uv:1")
    recipes = (Path(__file__).parent / "peers" / "base.Dockerfile", folder / "Dockerfile")
    for reference, recipe in zip(references, recipes, strict=True):
        arena.docker("buildx", "build", "--network=none", "--provenance=false", "-f", recipe, "-t", reference, folder)
        arena.docker("push", "--quiet", reference)
    shutil.rmtree(folder)
    return references


def steps(document: str) -> dict[str, float]:
    """Return the seconds of each step of `envbuild build --json`."""
    return {step["name"]: step["seconds"] for step in json.loads(document)["steps"]}
