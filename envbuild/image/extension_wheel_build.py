"""Extensions compiled from source: each is a wheel, kept under all that it is made from, and made once.

A wheel is there whole, with what it was made from beside it, or not at all; one that fails its check is not kept.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
import stat
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from itertools import islice
from pathlib import Path
from typing import Any

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.facts import extension_compilers
from envbuild.fetch.archive_spec import TOOLKIT
from envbuild.fetch.locked_artifact_types import LockedExtension
from envbuild.fetch.sha256_file_store import file_digest
from envbuild.image import (
    build_context_folders,
    build_error_messages,
    buildx,
    dockerfile_renderer,
    extension_wheel_check,
)
from envbuild.image.build_records_and_comparison import CompiledRecord
from envbuild.image.docker_engine import Engine
from envbuild.lock import wheel_contents
from envbuild.lock.lock_file import Lock
from envbuild.profile.extension_spec import BUILD_TOOLS
from envbuild.util import process_locks, temporary_files, user_folders
from envbuild.util.atomic_files import write_atomically
from envbuild.util.canonical_json import canonical_digest
from envbuild.util.errors import BuildError, printable

# Raised where the same source would give another wheel: by a change of `compile` in dockerfiles/install, say.
_RECIPE = 1
_ABOUT = "built.json"
_MOST_NAMED = 10
_MOST_METADATA = 1 << 20  # bytes; torch's has 30 kB
# Of memory for each job, measured: apex' largest compiler (cicc, nvcc's own) took 3.1 GB, four at once 6.8 GB.
_JOB_BYTES = 3 << 30


@dataclass(frozen=True)
class BuiltWheel:
    """A wheel in the cache. `key`: what it is kept under; `made`: UTC; `jobs`: compilers at once."""

    name: str
    key: str
    path: Path
    sha256: str
    seconds: float
    jobs: int
    made: str

    @property
    def record(self) -> CompiledRecord:
        return CompiledRecord(self.name, self.key, self.path.name, self.sha256, wheel_contents.roots(self.path))


def material(lock: Lock, one: LockedExtension) -> dict[str, Any]:
    """All that a wheel is made from: its key is the sha256 of this."""
    builder = lock.builder
    assert builder
    tools = {item.wheel.name: item.wheel.sha256 for item in lock.wheels if _compiles(item.wheel.name)}
    tools |= {item.wheel.name: item.wheel.sha256 for item in builder.wheels}
    compiler = re.compile(extension_compilers.debian_packages())
    debs = {deb.name: deb.version for deb in (*lock.base, *lock.apt) if compiler.fullmatch(deb.name)}
    debs |= {deb.name: deb.version for deb in builder.debs}
    return {
        "recipe": _RECIPE,
        "source": one.content,
        "command": list(dockerfile_renderer.compiling(one, builder)),
        "python": lock.python,
        "cuda": builder.nvcc.release,
        "wheels": tools,
        "toolkit": [a.sha256 for a in (*lock.archives, *builder.archives) if a.name == TOOLKIT],
        "compiler": debs if lock.suite else lock.image,
    }


def _compiles(name: str) -> bool:
    """Whether headers, libraries or code of this distribution may get into a wheel."""
    return name in ("torch", *BUILD_TOOLS) or name.startswith(("nvidia-", "cuda-"))


def key(lock: Lock, one: LockedExtension) -> str:
    return canonical_digest(material(lock, one))


def _folder(name: str) -> Path:
    return user_folders.cache_folder("extensions") / name


def find_wheel(lock: Lock, one: LockedExtension) -> BuiltWheel | None:
    """The wheel, if it was made before and is still what was made. Only looks: another may be making it just now."""
    name = key(lock, one)
    try:
        about = json.loads((_folder(name) / _ABOUT).read_text(encoding="utf-8"))
        path = _folder(name) / about["file"]
        built = BuiltWheel(one.name, name, path, about["sha256"], about["seconds"], about["jobs"], about["made"])
        if path.parent == _folder(name) and file_digest(path) == built.sha256:
            return built
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


@dataclass(frozen=True)
class CompileOrder:
    """An extension of a profile's lock, to be compiled by an engine in a stage of `text`, the profile's Dockerfile.

    `say` is told what the user should know, `on_line` each line of the build.
    """

    engine: Engine
    lock: Lock
    profile: str
    text: str
    one: LockedExtension
    say: Callable[[str], None]
    on_line: Callable[[str], None]


def compile_wheel(order: CompileOrder) -> BuiltWheel:
    """Compile an extension, or find it compiled meanwhile. Its source and all that compiles it must be at hand.

    Raises BuildError with what is wrong and what to do; what buildx.build raises.
    """
    lock, one = order.lock, order.one
    with process_locks.exclusive(f"_extension-{key(lock, one)[:16]}", f"compiles {one.name}", order.say):
        return find_wheel(lock, one) or _make(order)


def _make(order: CompileOrder) -> BuiltWheel:
    lock, one = order.lock, order.one
    target = _folder(key(lock, one))
    build_context_folders.fill_builder(lock, order.profile, one)
    with temporary_files.folder("incoming", target.parent) as folder:
        out = folder / "made"
        begin = time.monotonic()
        jobs = _compile(order, out)
        seconds = time.monotonic() - begin
        wheel = _only(out, one)
        wrong = extension_wheel_check.wheel_faults(
            wheel, name=one.name, modules=one.modules, arch=_arch(lock), python=lock.python
        )
        wrong = wrong or list(_lacking(wheel, lock))  # which opens it: only one that has no fault
        if wrong:
            raise BuildError(f"the wheel of {one.name} is not what was asked for", hint="\n".join([*wrong, *_why(one)]))
        about = {
            "file": wheel.name,
            "sha256": file_digest(wheel),
            "bytes": wheel.stat().st_size,
            "seconds": round(seconds, 1),
            "jobs": jobs,
            "made": datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ"),
            "from": material(lock, one),
        }
        whole = folder / "whole"  # a folder of our own: in the other, the build had its hands
        whole.mkdir()
        wheel.rename(whole / wheel.name)
        write_atomically(whole / _ABOUT, json.dumps(about, indent=1))
        shutil.rmtree(target, ignore_errors=True)  # a damaged one; whoever makes it holds its lock
        whole.rename(target)
    found = find_wheel(lock, one)
    assert found
    return found


def _arch(lock: Lock) -> str:
    assert lock.builder
    return lock.builder.arch


def jobs_for(cpus: int, memory_bytes: int) -> int:
    """Compilers at once: one for each processor, as far as the memory goes."""
    return max(1, min(cpus, memory_bytes // _JOB_BYTES))


def _compile(order: CompileOrder, out: Path) -> int:
    """Write the wheel into `out`; where memory runs out, again with half as many jobs. Returns the jobs it took.

    BuildKit's own cache is not asked: what is made here is made, and kept by its hash.
    """
    engine, one = order.engine, order.one
    jobs = jobs_for(engine.cpus, engine.memory_bytes)
    while True:
        options = ["--target", f"wheel-{one.name}", "--output", f"type=local,dest={out}",
                   "--build-arg", f"MAX_JOBS={jobs}", "--no-cache-filter", f"compiled-{one.name}"]  # fmt: skip
        try:
            buildx.build(engine, order.lock, order.profile, order.text, options, order.say, order.on_line)
            return jobs
        except buildx.Failed as failed:
            if not build_error_messages.is_out_of_memory(failed.said):
                raise _explained(one, failed) from None
            if jobs == 1:
                said = f"{one.name} needs more memory than the engine has, with one job too"
                hint = f"the engine has {engine.memory_bytes / 1e9:.0f} GB\n{failed.hint}"
                raise BuildError(said, hint=hint) from None
        order.say(f"{one.name}: the compiler ran out of memory with {jobs} jobs; again with {jobs // 2}")
        jobs //= 2


def _explained(one: LockedExtension, failed: buildx.Failed) -> BuildError:
    return BuildError(f"{one.name} cannot be compiled", hint=build_error_messages.explained(failed.said))


def _only(out: Path, one: LockedExtension) -> Path:
    """The one wheel that a build left. What it runs is not ours: a link in `out` would lead to any file of this host.

    Raises BuildError where anything else is there.
    """
    there = sorted(path.name for path in islice(out.iterdir(), _MOST_NAMED))
    if len(there) == 1 and there[0].endswith(".whl") and stat.S_ISREG((out / there[0]).lstat().st_mode):
        return out / there[0]
    names = ", ".join(printable(name)[:100] for name in there) or "nothing"
    hint = f"one file was to be there, and this is: {names}"
    raise BuildError(f"the build of {one.name} leaves more than a wheel, or none", hint=hint)


def _lacking(wheel: Path, lock: Lock) -> Iterator[str]:
    """What the wheel asks for and the image has not: nobody resolved it, for it was made after the lock.

    The wheel must have passed its check: it is opened here without another.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None)
        raw = archive.open(name).read(_MOST_METADATA + 1) if name else b""
    if len(raw) > _MOST_METADATA:
        yield f"its METADATA is larger than {_MOST_METADATA >> 20} MiB"
    text = raw[:_MOST_METADATA].decode("utf-8", "replace")
    for line in HeaderParser().parsestr(text).get_all("Requires-Dist", []):
        try:
            asked = Requirement(line)
            counts = asked.marker is None or asked.marker.evaluate({"python_version": lock.python, "extra": ""})
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            yield f"it needs what nobody can read: {printable(line)[:200]}"
            continue
        version = lock.versions.get(canonicalize_name(asked.name))
        if not counts:
            continue
        if version is None or not asked.specifier.contains(version, prereleases=True):
            needed = f"it needs {printable(str(asked))[:200]}"
            yield f"{needed}, and the lock has {version or 'none'}: add it to the profile's packages"


def _why(one: LockedExtension) -> Sequence[str]:
    told = [*(f"{name}={value}" for name, value in one.env.items()), *one.settings]
    return [f"it was told: {', '.join(told) or 'nothing'} (build.env and build.settings of the profile)"]
