"""The recipes of layers with the files of wheels, or with metadata that is changed for overrides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from envbuild.fetch import sha256_file_store
from envbuild.image.layers import layer_cache, layer_writer
from envbuild.image.layers.layer_writer import (
    WRITER_VERSION,
    LayerEntry,
    LayerFile,
    WrittenLayer,
    write_layer,
)
from envbuild.image.layers.metadata_overrides import overriding_files
from envbuild.image.layers.wheel_installed_files import installed_files
from envbuild.image.layers.wheel_reader import open_wheel
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import BuildError, HashMismatch, LockError


@dataclass(frozen=True)
class WheelOfLayer:
    """A wheel's file, and the sha256 that it must have, hex."""

    file: Path
    sha256: str


@dataclass(frozen=True)
class WheelLayer:
    """A layer of wheels. `python`: such as "3.11". `pins`: name and version of each override. If there are pins, the
    layer has no files except METADATA and RECORD of each wheel whose requirements the pins change.

    If two wheels install the same path, the file of the last wheel is written; wheel_conflicts.py refuses wheels whose
    files differ.
    """

    python: str
    wheels: tuple[WheelOfLayer, ...]
    pins: tuple[tuple[str, str], ...] = ()
    keeps_blob = False

    @property
    def key(self) -> str:
        hashes = [wheel.sha256 for wheel in self.wheels]
        return strict_and_canonical_json.canonical_digest(
            [WRITER_VERSION, VENV, self.python, hashes, sorted(self.pins)]
        )

    def tar_size(self) -> int:
        """Return the size in bytes of the tar that `write` writes. Reads only a small part of the wheels, and does not
        verify them. Raises WheelRefused and LockError as `write` does."""
        if self.pins:
            return layer_writer.tar_size(chain.from_iterable(self._changed_metadata().values()))
        with files_of_wheels(self.wheels, self.python) as files:
            return layer_writer.tar_size(files.values())

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer as layer_writer.write_layer does. If the digests of the layer are cached, only the bytes that
        `packed` or `plain` uses are computed, and their digest shows whether a wheel was damaged since then. Otherwise
        the wheels whose files the layer has are hashed while it is written.

        Raises HashMismatch if a wheel is not the one of the recipe, WheelRefused if it cannot be installed, LockError
        if a file of one wheel is a folder of another, BuildError if the digest of the layer is not the cached one.
        """
        known = layer_cache.known_layer(self)
        try:
            if self.pins:
                changed = self._changed_metadata()
                with contextlib.nullcontext() if known else _hashing(changed):
                    return write_layer(chain.from_iterable(changed.values()), packed, plain, known)
            with (
                files_of_wheels(self.wheels, self.python) as files,
                contextlib.nullcontext() if known else _hashing(self.wheels),
            ):
                return write_layer(files.values(), packed, plain, known)
        except (BuildError, LockError):
            for wheel in self.wheels:  # a damaged wheel may be the reason
                _require_sha256(sha256_file_store.file_digest(wheel.file), wheel)
            raise

    def _changed_metadata(self) -> dict[WheelOfLayer, list[LayerFile]]:
        """Return the changed METADATA and RECORD of each wheel whose requirements the pins change."""
        found = {}
        for wheel in self.wheels:
            with open_wheel(wheel.file) as reader:
                if changed := list(overriding_files(installed_files(reader, self.python), dict(self.pins))):
                    found[wheel] = changed
        return found


@contextlib.contextmanager
def files_of_wheels(wheels: Iterable[WheelOfLayer], python: str) -> Iterator[dict[str, LayerEntry]]:
    """Yield the files of wheels by path, while the wheels are open. Raises WheelRefused for a wheel that cannot be
    installed."""
    with contextlib.ExitStack() as stack:
        files: dict[str, LayerEntry] = {}
        for wheel in wheels:
            reader = stack.enter_context(open_wheel(wheel.file))
            files |= {entry.path: entry for entry in installed_files(reader, python)}
        yield files


@contextlib.contextmanager
def _hashing(wheels: Iterable[WheelOfLayer]) -> Iterator[None]:
    """Hash wheels in a thread during the `with` body, and compare the hashes after it. Raises HashMismatch."""
    with ThreadPoolExecutor(1) as pool:
        running = [(pool.submit(sha256_file_store.file_digest, wheel.file), wheel) for wheel in wheels]
        try:
            yield
            for found, wheel in running:
                _require_sha256(found.result(), wheel)
        finally:
            pool.shutdown(cancel_futures=True)


def _require_sha256(found: str, wheel: WheelOfLayer) -> None:
    if found != wheel.sha256:
        raise HashMismatch(
            f"{wheel.file} is not the locked wheel: sha256 {found}, locked {wheel.sha256}",
            hint="the file was damaged on this disk: remove it, and run the same command again",
        )
