"""Runs a build with docker's buildx, and translates BuildKit's errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.fetch import sha256_file_store
from envbuild.fetch.sha256_file_store import Store
from envbuild.image import build_context_folders, build_error_messages, debian_base_tar, docker_client_finder
from envbuild.image.docker_engine import Engine
from envbuild.lock.lock_file import Lock
from envbuild.registry.oci_types import Reference
from envbuild.util import disk_space, process_locks, temporary_files
from envbuild.util.errors import BuildError, DiskError, EngineError, EnvbuildError, NetworkError
from envbuild.util.host_processes import LineListeners, run
from envbuild.util.strict_and_canonical_json import canonical_digest

_INSPECTS = 60.0  # seconds


class Failed(BuildError):
    """A step of the build failed. `output`: the output of BuildKit."""

    def __init__(self, message: str, hint: str, output: str) -> None:
        super().__init__(message, hint=hint)
        self.output = output


@dataclass(frozen=True)
class BuildOrder:
    """An order to build from the Dockerfile `text` of a profile's lock in an engine. `say` gets messages for the user,
    `on_line` each line of the build's output."""

    engine: Engine
    lock: Lock
    profile: str
    text: str
    say: Callable[[str], None]
    on_line: Callable[[str], None]


def build(order: BuildOrder, options: Sequence[str]) -> None:
    """Build in the profile's context.

    Only one process at a time builds in an engine or with a named builder, because one compilation runs as many jobs as
    the engine's memory allows (`extension_wheel_build.jobs_for`): two at the same time could run out of memory.

    Raises Failed if a step fails, HashMismatch if a stored file changed, NetworkError if the base image cannot be
    fetched, EngineError if the client or the builder cannot be used, and DiskError.
    """
    engine, lock, name = order.engine, order.lock, order.profile
    with (
        process_locks.exclusive(_lock_name(engine), "compiles an extension", order.say),
        temporary_files.folder("build") as folder,
    ):
        rendered = folder / "Dockerfile"
        rendered.write_text(order.text, encoding="utf-8")
        done = run(
            [docker_client_finder.program(), "--host", engine.host, "buildx", "build", *_builder(engine),
             "--file", rendered,
             *(f"--build-context={key}={path}" for key, path in build_context_folders.of_wheels(name).items()),
             "--provenance=false", "--sbom=false", "--platform", lock.platform, "--progress=plain",
             *options, build_context_folders.main_context(name)],
            env={"SOURCE_DATE_EPOCH": str(debian_base_tar.SOURCE_DATE_EPOCH)},
            listeners=LineListeners(stderr=order.on_line),
        )  # fmt: skip
        if done.code:
            require_intact_files(lock)
            raise _failed(engine, lock, done.stderr)


def require_builder(engine: Engine) -> None:
    """Raise EngineError if no builder has the requested name. Whether the builder responds is not checked here, because
    a build farm may need long to respond, and an image that is up to date needs no builder."""
    if not engine.builder or (_instances() / engine.builder.lower()).is_file():
        return
    # otherwise it may be the builder of a docker context, which buildx knows
    done = run(
        [docker_client_finder.program(), "--host", engine.host, "buildx", "inspect", "--", engine.builder],
        timeout=_INSPECTS,
    )
    if done.code:
        raise EngineError(f"unknown builder {engine.builder!r}", hint=f"{_said(done.stderr)}\n{_BUILDERS}")


def _instances() -> Path:
    """Where buildx keeps a file for each builder (docker/buildx, util/confutil)."""
    docker = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    return Path(os.environ.get("BUILDX_CONFIG") or docker / "buildx") / "instances"


def _said(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "docker buildx inspect printed nothing"


def _lock_name(engine: Engine) -> str:
    return f"_compile-{canonical_digest([engine.identity, engine.builder])[:16]}"


def _builder(engine: Engine) -> list[str]:
    return [f"--builder={engine.builder}"] if engine.builder else []


def require_intact_files(lock: Lock) -> None:
    """Raise HashMismatch if a stored wheel, Debian package or archive of the lock changed after its download, and
    remove that file, so that it is downloaded again."""
    for place, sha256, name in _files(lock):
        if place.holds(sha256, name):
            place.check(sha256, name)


def _files(lock: Lock) -> Iterator[tuple[Store, str, str]]:
    """Yield (store, sha256, name) of each wheel, Debian package and archive that may be in the context."""
    builder = lock.builder
    wheels, archives = (builder.wheels, builder.archives) if builder else ((), ())
    yield from ((sha256_file_store.wheel_store(), w.wheel.sha256, w.wheel.file) for w in (*lock.wheels, *wheels))
    debs = (*lock.apt, *(builder.debs if builder else ()))
    yield from ((sha256_file_store.debs(), deb.sha256, deb.file) for deb in debs)
    yield from (
        (sha256_file_store.archive_store(), archive.sha256, archive.name) for archive in (*lock.archives, *archives)
    )


# BuildKit's errors if it cannot fetch the base image, before any step has run.
_REGISTRY = ("failed to resolve source metadata", "failed to authorize", "pull access denied", "failed to do request")


_BUILDERS = "docker buildx ls; docker buildx create"
# Errors if the builder is unreachable: of gRPC, and of buildx while it waits for a builder that starts.
_SILENT = ("failed to list workers", "connection error: desc", "while dialing", "waiting for connection")
# Errors if the engine stopped responding during the build.
_BROKEN = ("error reading from server", "error during connect")


def _failed(engine: Engine, lock: Lock, stderr: str) -> EnvbuildError:
    errors = build_error_messages.builders(stderr)
    if lock.image and any(text in line for line in errors for text in _REGISTRY):
        message = errors[-1].partition("failed to solve: ")[2] or errors[-1]
        host = Reference.parse(lock.image).host
        return NetworkError(
            f"the base image {lock.image} cannot be fetched from its registry",
            hint=f"{message}\nif the image is private: docker login {host}\n"
            f"if the engine does not trust the registry's CA: put it into the engine's certs.d/{host}",
        )
    if any("no builder " in line for line in errors):
        return EngineError(errors[-1].removeprefix("ERROR: "), hint=_BUILDERS)
    if engine.builder and any(text in line for line in errors for text in _SILENT):
        hint = f"{errors[-1].removeprefix('ERROR: ')}\ndocker buildx inspect {engine.builder}; docker buildx ls"
        return EngineError(f"the builder {engine.builder!r} does not answer", hint=hint)
    if disk_space.lacked(stderr):
        return _full(engine)
    if not engine.builder and any(text in line for line in errors for text in _BROKEN):
        full = engine.without_room()
        if full:
            return full
    first_errors = "\n".join(build_error_messages.first_errors(stderr))
    if build_error_messages.is_out_of_memory(stderr):
        has = f"the engine has {engine.memory_bytes / 1e9:.1f} GB in all, its builds may have less: free memory"
        return Failed("the image build ran out of memory", f"{has}\n{first_errors}", stderr)
    return Failed(f"the image build{f' by {engine.builder!r}' if engine.builder else ''} failed", first_errors, stderr)


def _full(engine: Engine) -> DiskError:
    """Return the error for a disk that became full during the build: the engine's or this machine's. The error shows
    the free space of the folders to which envbuild writes and, without a named builder, of the engine's data folder."""
    folder = None if engine.builder else engine.data_folder
    disk = "the disk" if folder else "the disk of the engine or of this machine"
    return disk_space.full([folder, *disk_space.written_folders()], f"{disk} became full during the build")
