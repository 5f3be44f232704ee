"""Lock and Dockerfile -> image, by BuildKit; what was built for which lock is written down (records.py)."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from envbuild import settings
from envbuild.errors import BuildError, DiskError, EngineError, EnvbuildError, NetworkError
from envbuild.image import base, dockerfile, records
from envbuild.image.engine import Engine, Image, client_binary
from envbuild.image.names import repository
from envbuild.image.records import Record
from envbuild.plan import store, wheels
from envbuild.plan.lock import Lock, canonical_digest
from envbuild.process import run

# Layer over wheel, measured: 3.6 for torch 2.13.0+cpu (699 of 192 MB), 1.5 for cuBLAS 12.5.2.13 (553 of 363), 1.8 for
# all of step-video; base over its Debian packages: 4.1 (201 of 49 MB).
_WHEEL_UNPACKED, _DEB_UNPACKED = 3.7, 4.5


def recorded(lock: Lock, text: str) -> list[Record]:
    """What was built from this lock with this Dockerfile by this envbuild, in whatever engine."""
    wanted = recipe(lock, text)
    return [record for record in records.every() if record.recipe == wanted]


def built(engine: Engine, lock: Lock, text: str) -> Image | None:
    """The image that was built from this lock and Dockerfile, if the engine still has it."""
    for record in recorded(lock, text):
        image = engine.find(record.handle)
        if image and image.id == record.image:
            return image
    return None


def recipe(lock: Lock, text: str) -> str:
    """sha256 over all that decides what is in an image: lock, Dockerfile, installers, recipe of the base."""
    tools = [tool.read_text(encoding="utf-8") for tool in dockerfile.TOOLS]
    uv = importlib.metadata.version("uv")
    return canonical_digest([lock.id, text, tools, uv, base.recipe() if lock.suite else None])


def needed_bytes(lock: Lock) -> int:
    """Disk that a build takes in the engine: the context, what is unpacked of it, and the layers made of that."""
    packed_bytes = sum(locked.bytes for locked in lock.wheels) + sum(archive.bytes for archive in lock.archives)
    deb_bytes = sum(deb.bytes for deb in (*lock.base, *lock.apt))
    return int(packed_bytes * (1 + _WHEEL_UNPACKED) + deb_bytes * (1 + 2 * _DEB_UNPACKED))


def fetched_bytes(lock: Lock) -> int:
    """What our own caches still have to take: wheels and archives they lack, and the base before it is made."""
    wheel_store, archive_store = store.wheels(), store.archives()
    packed_bytes = sum(w.bytes for w in lock.wheels if not wheel_store.holds(w.wheel.sha256, w.wheel.file))
    packed_bytes += sum(a.bytes for a in lock.archives if not archive_store.holds(a.sha256, a.name))
    made = base.tar_file(lock).is_file() or not lock.suite
    return packed_bytes + (0 if made else int(sum(deb.bytes for deb in lock.base) * (2 + _DEB_UNPACKED)))


def check_disk(engine: Engine, lock: Lock) -> None:
    """Raises DiskError, with the figures, where a disk cannot take what is fetched and built."""
    places = [(settings.cache_folder("wheels"), fetched_bytes(lock))]
    if engine.data_folder:
        places.append((engine.data_folder, needed_bytes(lock)))
    for folder, _ in places:
        device = folder.stat().st_dev
        needed = sum(size for other, size in places if other.stat().st_dev == device)
        available = shutil.disk_usage(folder).free
        if available < needed:
            raise DiskError(
                f"the build needs about {needed / 1e9:.1f} GB in {folder}, {available / 1e9:.1f} GB are free",
                hint="free some: envbuild prune; docker buildx prune; docker image prune",
            )


def build_layers(
    engine: Engine, lock: Lock, name: str, text: str, *, no_cache: bool = False, on_line: Callable[[str], None]
) -> Image:
    """Build all but the labels of a lock's image, under a tag of its own, to be measured.

    Everything it is made of must be in the stores. Raises EngineError, BuildError or DiskError.
    """
    if engine.platform != lock.platform:
        raise EngineError(
            f"the engine is {engine.platform}, the image {lock.platform}", hint="use an engine of that kind"
        )
    _fill_context(lock, _context(name))
    return _buildx(engine, lock, name, text, layers_tag(lock, name), ["--no-cache"] if no_cache else [], on_line)


def layers_tag(lock: Lock, name: str) -> str:
    """What names the layers until they are labelled; it stays where they are found wanting, to be looked at."""
    return f"{repository(name)}:{lock.short}-layers"


def build_labelled(
    engine: Engine, lock: Lock, name: str, text: str, labels: Mapping[str, str], on_line: Callable[[str], None]
) -> Image:
    """The same build again with labels, tagged `envbuild/<name>:<12 hex of the lock id>`; writes the record.

    Follows build_layers, whose context and cached layers it takes. Raises EngineError, BuildError or DiskError.
    """
    options = [f"--label={key}={value}" for key, value in sorted(labels.items())]
    image = _buildx(engine, lock, name, text, f"{repository(name)}:{lock.short}", options, on_line)
    builder = f"docker {engine.version}"
    records.write(Record(image.id, image.handle, lock.id, recipe(lock, text), image.layers, builder))
    engine.remove(layers_tag(lock, name))
    return image


def _buildx(
    engine: Engine, lock: Lock, name: str, text: str, tag: str, options: Sequence[str], on_line: Callable[[str], None]
) -> Image:
    with tempfile.TemporaryDirectory(prefix="envbuild-build-") as folder:
        rendered, metadata = Path(folder) / "Dockerfile", Path(folder) / "metadata.json"
        rendered.write_text(text, encoding="utf-8")
        done = run(
            [client_binary(), "--host", engine.host, "buildx", "build",
             "--file", rendered, "--metadata-file", metadata, "--tag", tag, "--load",
             "--provenance=false", "--sbom=false", "--platform", lock.platform, "--progress=plain",
             *options, _context(name)],
            env={"SOURCE_DATE_EPOCH": str(base.SOURCE_DATE_EPOCH)},
            on_line=on_line,
        )  # fmt: skip
        if done.code:
            _blame_files(lock)
            raise _failed(lock, done.stderr)
        image_id = json.loads(metadata.read_text(encoding="utf-8")).get("containerimage.config.digest")
    image = engine.find(tag)
    if image is None or image.id != image_id:
        raise EngineError(
            f"{tag} is not the image that was just built ({image_id}): somebody moved the tag meanwhile, or this "
            "buildx does not tell an image's id",
            hint="run the same command again; buildx 0.10 or newer is needed",
        )
    return image


def _context(name: str) -> Path:
    """The build context's folder, kept between builds, so that only changes are sent."""
    return settings.cache_folder("contexts") / name


def discard_context(name: str) -> None:
    """What the next build of that name would fill anew."""
    shutil.rmtree(_context(name), ignore_errors=True)


def _fill_context(lock: Lock, folder: Path) -> None:
    """Hard links to what the stores hold."""
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("bin", "debs", "wheels"):
        (folder / part).mkdir(parents=True)
    _link(wheels.uv_binary(), folder / "bin" / "uv")
    for tool in dockerfile.TOOLS:
        shutil.copy2(tool, folder / "bin" / tool.name)
    if lock.suite:
        _link(base.checked(lock), folder / "base.tar")
    for deb in lock.apt:
        store.debs().check(deb.sha256, deb.file)  # uv checks the wheels in the build, nobody these
        _link(store.debs().path(deb.sha256, deb.file), folder / "debs" / deb.file)
    for archive in lock.archives:
        target = folder / "archives" / archive.name / archive.name
        target.parent.mkdir(parents=True)
        _link(store.archives().path(archive.sha256, archive.name), target)
    for locked in lock.wheels:
        wheel = locked.wheel
        target = folder / "wheels" / locked.layer / wheel.file
        target.parent.mkdir(exist_ok=True)
        _link(store.wheels().path(wheel.sha256, wheel.file), target)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        shutil.copy2(source, target)


def _blame_files(lock: Lock) -> None:
    """Raises HashMismatch if a stored file changed since it was fetched; it is removed, to be fetched again."""
    wheel_files = [(store.wheels(), w.wheel.sha256, w.wheel.file) for w in lock.wheels]
    deb_files = [(store.debs(), deb.sha256, deb.file) for deb in lock.apt]
    archive_files = [(store.archives(), archive.sha256, archive.name) for archive in lock.archives]
    for place, sha256, name in (*wheel_files, *deb_files, *archive_files):
        if place.holds(sha256, name):
            place.check(sha256, name)


# What BuildKit says when it cannot get the base image, before any step has run.
_REGISTRY = ("failed to resolve source metadata", "failed to authorize", "pull access denied", "failed to do request")


def _failed(lock: Lock, stderr: str) -> EnvbuildError:
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "error:" in line or "install:" in line]
    if lock.image and any(text in line for line in errors for text in _REGISTRY):
        said = errors[-1].partition("failed to solve: ")[2] or errors[-1]
        host = lock.image.partition("/")[0]
        return NetworkError(
            f"the base image {lock.image} cannot be had from its registry",
            hint=f"{said}\nif it is private: docker login {host}; its CA belongs into the engine's certs.d/{host}",
        )
    if any("no space left on device" in line for line in lines):
        return DiskError("the disk is full in the middle of the build", hint="envbuild prune; docker buildx prune")
    return BuildError("the image build failed", hint="\n".join((errors or lines)[-12:]))
