"""BuildKit, by way of docker's buildx: one build, and in words what went wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from envbuild import room, scratch, turns
from envbuild.errors import BuildError, DiskError, EngineError, EnvbuildError, NetworkError
from envbuild.image import base, client, complaints, context
from envbuild.image.engine import Engine
from envbuild.plan import store
from envbuild.plan.lock import Lock, canonical_digest
from envbuild.plan.store import Store
from envbuild.process import run


class Failed(BuildError):
    """A step ended with an error. `said`: all that BuildKit wrote."""

    def __init__(self, message: str, hint: str, said: str) -> None:
        super().__init__(message, hint=hint)
        self.said = said


def build(
    engine: Engine,
    lock: Lock,
    name: str,
    text: str,
    options: Sequence[str],
    say: Callable[[str], None],
    on_line: Callable[[str], None],
    ready: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Build `text`, a Dockerfile, in the profile's context; returns BuildKit's metadata. `ready` is called, and may
    raise, when the turn has come: what another build took meanwhile is gone.

    One process at a time builds on a base in an engine: of two at once that share layers nobody has made yet, one may
    get another layer of the same files, and so another image id (docs/decisions/0013-several-profiles.md).

    Raises Failed where a step fails, HashMismatch for a stored file that changed, NetworkError where the base image
    cannot be had, DiskError.
    """
    with turns.alone(_turn(engine, lock), "builds on the same base", say), scratch.folder("build") as folder:
        ready()
        rendered, metadata = folder / "Dockerfile", folder / "metadata.json"
        rendered.write_text(text, encoding="utf-8")
        done = run(
            [client.program(), "--host", engine.host, "buildx", "build", *_builder(engine),
             "--file", rendered, "--metadata-file", metadata,
             *(f"--build-context={key}={path}" for key, path in context.of_wheels(name).items()),
             "--provenance=false", "--sbom=false", "--platform", lock.platform, "--progress=plain",
             *options, context.own(name)],
            env={"SOURCE_DATE_EPOCH": str(base.SOURCE_DATE_EPOCH)},
            on_line=on_line,
        )  # fmt: skip
        if done.code:
            _blame_files(lock)
            raise _failed(engine, lock, done.stderr)
        found: dict[str, Any] = json.loads(metadata.read_text(encoding="utf-8"))
        return found


def _turn(engine: Engine, lock: Lock) -> str:
    made_of = lock.image or base.tar_file(lock).stem
    return f"_build-{canonical_digest([engine.identity, engine.builder, made_of])[:16]}"


def _builder(engine: Engine) -> list[str]:
    return [f"--builder={engine.builder}"] if engine.builder else []


def _blame_files(lock: Lock) -> None:
    """Raises HashMismatch if a stored file changed since it was fetched; it is removed, to be fetched again."""
    for place, sha256, name in _files(lock):
        if place.holds(sha256, name):
            place.check(sha256, name)


def _files(lock: Lock) -> Iterator[tuple[Store, str, str]]:
    """(store, sha256, name) of all that may be in the context."""
    builder = lock.builder
    wheels, archives = (builder.wheels, builder.archives) if builder else ((), ())
    yield from ((store.wheels(), w.wheel.sha256, w.wheel.file) for w in (*lock.wheels, *wheels))
    debs = (*lock.apt, *(builder.debs if builder else ()))
    yield from ((store.debs(), deb.sha256, deb.file) for deb in debs)
    yield from ((store.archives(), archive.sha256, archive.name) for archive in (*lock.archives, *archives))


# What BuildKit says when it cannot get the base image, before any step has run.
_REGISTRY = ("failed to resolve source metadata", "failed to authorize", "pull access denied", "failed to do request")


def _failed(engine: Engine, lock: Lock, stderr: str) -> EnvbuildError:
    errors = complaints.builders(stderr)
    if lock.image and any(text in line for line in errors for text in _REGISTRY):
        said = errors[-1].partition("failed to solve: ")[2] or errors[-1]
        host = lock.image.partition("/")[0]
        return NetworkError(
            f"the base image {lock.image} cannot be had from its registry",
            hint=f"{said}\nif it is private: docker login {host}; its CA belongs into the engine's certs.d/{host}",
        )
    if any("no builder " in line for line in errors):
        return EngineError(errors[-1].removeprefix("ERROR: "), hint="docker buildx ls; docker buildx create")
    if room.lacked(stderr):
        return _full(engine)
    telling = "\n".join(complaints.telling(stderr))
    if complaints.out_of_memory(stderr):
        has = f"the engine has {engine.memory_bytes / 1e9:.1f} GB in all, its builds may have less: free some"
        return Failed("the image build ran out of memory", f"{has}\n{telling}", stderr)
    return Failed("the image build failed", telling, stderr)


def _full(engine: Engine) -> DiskError:
    """The engine's disk, or one that its client writes to."""
    folder = None if engine.builder else engine.data_folder
    where = "" if folder else ", at the engine or here"
    return room.full([folder, *room.places()], f"the disk is full in the middle of the build{where}")
