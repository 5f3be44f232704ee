"""Compiles extensions from source. Each becomes a wheel, compiled once and cached under the hash of its inputs.

A wheel is cached completely, with a description of its inputs, or not at all. A wheel that fails its check is not
cached. This cache belongs to one user of one machine; `shared_extension_cache` has wheels of other machines.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import shutil
import stat
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from itertools import islice
from pathlib import Path
from typing import Any

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.facts import extension_compilers
from envbuild.fetch.archive_spec import TOOLKIT
from envbuild.fetch.sha256_file_store import file_digest
from envbuild.image import (
    build_context_folders,
    build_error_messages,
    buildx,
    extension_dockerfile,
    extension_wheel_check,
)
from envbuild.image.build_records import CompiledRecord
from envbuild.image.buildx import BuildOrder
from envbuild.lock import wheel_file_hashes_and_contents
from envbuild.lock.lock_entry_types import LockedExtension, RecordedWheel
from envbuild.lock.lock_file import Lock
from envbuild.profile.extension_spec import BUILD_TOOLS
from envbuild.util import process_locks, temporary_files, user_folders
from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import BuildError, printable
from envbuild.util.strict_and_canonical_json import canonical_digest

# Increment if the same source would give another wheel, for example after a change of `compile` in dockerfiles/install.
_RECIPE = 1
DESCRIPTION_FILE = "built.json"
"""The file next to a cached wheel that describes it."""
_MOST_NAMED = 10
_MOST_METADATA = 1 << 20  # bytes of a METADATA file; that of torch 2.13 has 38 kB
# Memory per job, measured: apex's largest compiler process (cicc, part of nvcc) took 3.1 GB, four jobs 6.8 GB in all.
_JOB_BYTES = 3 << 30


@dataclass(frozen=True)
class BuiltWheel:
    """A wheel in the cache. `key`: its cache key; `made`: UTC; `jobs`: number of parallel compilers."""

    name: str
    key: str
    path: Path
    sha256: str
    seconds: float
    jobs: int
    made: str

    @property
    def compiled_record(self) -> CompiledRecord:
        return CompiledRecord(
            self.name, self.key, self.path.name, self.sha256, wheel_file_hashes_and_contents.roots(self.path)
        )

    @property
    def lock_record(self) -> RecordedWheel:
        """The record of this wheel in a lock file."""
        return RecordedWheel(self.name, self.key, self.path.name, self.sha256, self.path.stat().st_size)


def wheel_inputs(lock: Lock, one: LockedExtension) -> dict[str, Any]:
    """Return everything that a wheel is made from; the sha256 of this is its cache key."""
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
        "command": list(extension_dockerfile.compile_command(one, builder)),
        "python": lock.python,
        "cuda": builder.nvcc.release,
        "wheels": tools,
        "toolkit": [a.sha256 for a in (*lock.archives, *builder.archives) if a.name == TOOLKIT],
        "compiler": debs if lock.suite else lock.image,
    }


def _compiles(name: str) -> bool:
    """Whether headers, libraries or code of this distribution can get into a wheel."""
    return name in ("torch", *BUILD_TOOLS) or name.startswith(("nvidia-", "cuda-"))


def key(lock: Lock, one: LockedExtension) -> str:
    return canonical_digest(wheel_inputs(lock, one))


def current_records(lock: Lock) -> tuple[RecordedWheel, ...]:
    """Return the wheels that the lock records, without those whose inputs have changed since they were compiled."""
    found = (lock.recorded_wheel(one.name, key(lock, one)) for one in lock.extensions)
    return tuple(filter(None, found))


def with_current_records(lock: Lock) -> Lock:
    """Return a new lock with only those records that it would use: the others would stay in its file forever."""
    return replace(lock, compiled=current_records(lock)) if lock.compiled else lock


def _folder(name: str) -> Path:
    return user_folders.cache_folder("extensions") / name


def find_wheel(lock: Lock, one: LockedExtension) -> BuiltWheel | None:
    """Return the wheel if it is cached and unchanged. Only reads: another process may be compiling it at the moment."""
    name = key(lock, one)
    try:
        description = json.loads((_folder(name) / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        path = _folder(name) / description["file"]
        built = BuiltWheel(
            one.name,
            name,
            path,
            description["sha256"],
            description["seconds"],
            description["jobs"],
            description["made"],
        )
        if path.parent == _folder(name) and file_digest(path) == built.sha256:
            return built
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def compile_wheel(order: BuildOrder, one: LockedExtension) -> BuiltWheel:
    """Compile an extension in its stage of the Dockerfile, unless another process has compiled it in the meantime. Its
    source and its build tools must have been downloaded.

    Raises BuildError with the cause and what to do, and the errors of buildx.build.
    """
    lock = order.lock
    with exclusive_wheel(lock, one, "compiles", order.say):
        return find_wheel(lock, one) or _make(order, one)


def exclusive_wheel(
    lock: Lock, one: LockedExtension, doing: str, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """Let only one process at a time write the wheel of an extension into the cache."""
    return process_locks.exclusive(f"_extension-{key(lock, one)[:16]}", f"{doing} {one.name}", say)


def _make(order: BuildOrder, one: LockedExtension) -> BuiltWheel:
    lock = order.lock
    build_context_folders.fill_builder(lock, order.profile, one)
    with incoming_folder() as folder:
        begin = time.monotonic()
        jobs = _compile(order, one, folder / "made")
        seconds = time.monotonic() - begin
        wheel = _only(folder / "made", one)
        if wrong := faults_of_wheel(wheel, lock, one):
            raise BuildError(f"the wheel of {one.name} is not as requested", hint="\n".join([*wrong, *_why(one)]))
        description = {
            "file": wheel.name,
            "sha256": file_digest(wheel),
            "bytes": wheel.stat().st_size,
            "seconds": round(seconds, 1),
            "jobs": jobs,
            "made": datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ"),
            "from": wheel_inputs(lock, one),
        }
        return keep_wheel(lock, one, wheel, description)


def incoming_folder() -> contextlib.AbstractContextManager[Path]:
    """A temporary folder on the disk of the cache."""
    return temporary_files.folder("incoming", user_folders.cache_folder("extensions"))


def keep_wheel(lock: Lock, one: LockedExtension, wheel: Path, description: Mapping[str, Any]) -> BuiltWheel:
    """Move a checked wheel from an `incoming_folder` into the cache, with its description. Replaces a wheel that is
    there. The caller must hold `exclusive_wheel`."""
    target = _folder(key(lock, one))
    with incoming_folder() as whole:  # a separate folder: a build could write to the other one
        kept = whole / "whole"
        kept.mkdir()
        wheel.rename(kept / wheel.name)
        write_atomically(kept / DESCRIPTION_FILE, json.dumps(description, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        kept.rename(target)
    found = find_wheel(lock, one)
    assert found
    return found


def faults_of_wheel(wheel: Path, lock: Lock, one: LockedExtension) -> list[str]:
    """Return every reason why a wheel is not the requested one; empty if it is."""
    wrong = extension_wheel_check.wheel_faults(
        wheel, name=one.name, modules=one.modules, arch=_arch(lock), python=lock.python
    )
    return wrong or _requirements(wheel, lock.python)[1]  # this opens the wheel, so only if wheel_faults found none


def _arch(lock: Lock) -> str:
    assert lock.builder
    return lock.builder.arch


def jobs_for(cpus: int, memory_bytes: int) -> int:
    """Return the number of parallel compilers: one per CPU, as far as the memory allows."""
    return max(1, min(cpus, memory_bytes // _JOB_BYTES))


def _compile(order: BuildOrder, one: LockedExtension, out: Path) -> int:
    """Write the wheel into `out`; if memory runs out, retry with half as many jobs. Return the number of jobs used.

    BuildKit's own cache is not used for this stage: the wheel is always compiled, and cached here by its hash.
    """
    engine = order.engine
    jobs = jobs_for(engine.cpus, engine.memory_bytes)
    while True:
        options = ["--target", f"wheel-{one.name}", "--output", f"type=local,dest={out}",
                   "--build-arg", f"MAX_JOBS={jobs}", "--no-cache-filter", f"compiled-{one.name}"]  # fmt: skip
        try:
            buildx.build(order, options)
            return jobs
        except buildx.Failed as failed:
            if not build_error_messages.is_out_of_memory(failed.output):
                raise _explained(one, failed) from None
            if jobs == 1:
                message = f"{one.name} needs more memory than the engine has, even with one job"
                hint = f"the engine has {engine.memory_bytes / 1e9:.0f} GB\n{failed.hint}"
                raise BuildError(message, hint=hint) from None
        order.say(f"{one.name}: the compiler ran out of memory with {jobs} jobs; retrying with {jobs // 2}")
        jobs //= 2


def _explained(one: LockedExtension, failed: buildx.Failed) -> BuildError:
    return BuildError(f"{one.name} cannot be compiled", hint=build_error_messages.explained(failed.output))


def _only(out: Path, one: LockedExtension) -> Path:
    """Return the only file in `out`, a wheel. The build runs foreign code: a link in `out` could lead to any file of
    this host.

    Raises BuildError if `out` has anything else.
    """
    there = sorted(path.name for path in islice(out.iterdir(), _MOST_NAMED))
    if len(there) == 1 and there[0].endswith(".whl") and stat.S_ISREG((out / there[0]).lstat().st_mode):
        return out / there[0]
    names = ", ".join(printable(name)[:100] for name in there) or "nothing"
    hint = f"one wheel expected, found: {names}"
    raise BuildError(f"the build of {one.name} did not produce exactly one wheel", hint=hint)


def refuse_unlocked_requirements(wheels: Iterable[BuiltWheel], lock: Lock) -> None:
    """Raise BuildError if the image does not satisfy a requirement of a compiled wheel. The wheels stay in the cache:
    once the packages are locked too, they are not compiled again."""
    lacking = []
    for wheel in wheels:
        for requirement in _requirements(wheel.path, lock.python)[0]:
            version = lock.versions.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                needed = f"{wheel.name} needs {printable(str(requirement))[:200]}"
                lacking.append(f"{needed}, and the lock has {version or 'none'}: add it to the profile's packages")
    if lacking:
        raise BuildError(
            "compiled extensions require packages that the lock does not have",
            hint="\n".join([*lacking, "the compiled wheels are kept: they will not be compiled again"]),
        )


def _requirements(wheel: Path, python: str) -> tuple[list[Requirement], list[str]]:
    """Return the requirements of a wheel that apply to this Python, and a sentence for each that is invalid. The wheel
    is built after locking, so the resolver did not know its requirements.

    The wheel must have passed its check before, because it is opened without a check here.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None)
        raw = archive.open(name).read(_MOST_METADATA + 1) if name else b""
    found: list[Requirement] = []
    invalid = [f"its METADATA is larger than {_MOST_METADATA >> 20} MiB"] if len(raw) > _MOST_METADATA else []
    text = raw[:_MOST_METADATA].decode("utf-8", "replace")
    for line in HeaderParser().parsestr(text).get_all("Requires-Dist", []):
        try:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"python_version": python, "extra": ""}):
                found.append(requirement)
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            invalid.append(f"it has an invalid requirement: {printable(line)[:200]}")
    return found, invalid


def _why(one: LockedExtension) -> Sequence[str]:
    settings = [*(f"{name}={value}" for name, value in one.env.items()), *one.settings]
    return [f"build.env and build.settings of the profile: {', '.join(settings) or 'empty'}"]
