"""The layers that are written from wheels alone: their files, metadata that is changed for overrides, links of nvcc."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename

from envbuild.image.layers import nvcc_links
from envbuild.image.layers.layer_writer import (
    WRITER_VERSION,
    LayerEntry,
    LayerFile,
    LayerLink,
    WheelContent,
    WrittenLayer,
    write_layer,
)
from envbuild.image.layers.metadata_overrides import overriding_files
from envbuild.image.layers.wheel_installed_files import installed_files
from envbuild.image.layers.wheel_reader import WheelReader, open_wheel
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import BuildError, HashMismatch


@dataclass(frozen=True)
class WheelOfLayer:
    """A wheel's file, and the sha256 that it must have, hex."""

    file: Path
    sha256: str


@dataclass(frozen=True)
class WheelLayer:
    """A layer of wheels. `python`: such as "3.11". `pins`: name and version of each override; with them the layer has
    only the metadata of these wheels that changes.

    Where two wheels install one path, the file of the last one is written; wheel_conflicts.py refuses different ones.
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

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer as layer_writer.write_layer does.

        Raises HashMismatch if a wheel is not the one of the recipe, WheelRefused if it cannot be installed, LockError
        if a file of one wheel is a folder of another.
        """
        with _installed(self.wheels, self.python) as files:
            entries = overriding_files(files.values(), dict(self.pins)) if self.pins else files.values()
            return write_layer(entries, packed, plain)


@dataclass(frozen=True)
class NvccLinksLayer:
    """The links that linkers look for below `home`, the folder of an nvcc that these wheels install. `release`: of
    CUDA, such as "13.0"."""

    python: str
    wheels: tuple[WheelOfLayer, ...]
    home: str
    release: str
    keeps_blob = False

    @property
    def key(self) -> str:
        hashes = [wheel.sha256 for wheel in self.wheels]
        content = ["nvcc", WRITER_VERSION, VENV, self.python, hashes, self.home, self.release]
        return strict_and_canonical_json.canonical_digest(content)

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer. Raises what WheelLayer.write raises, and BuildError if the wheels have no nvcc of this
        release."""
        home = self.home.lstrip("/")
        with _installed(self.wheels, self.python) as files:
            version = _version(files.get(f"{home}/bin/nvcc"))
            names = {path.removeprefix(f"{home}/lib/") for path in files if path.startswith(f"{home}/lib/")}
        if not version.startswith(f"{self.release}."):
            text = f"{self.home}/bin/nvcc is of CUDA {version}, torch of {self.release}"
            raise BuildError(text, hint="lock again: envbuild lock NAME")
        links = nvcc_links.missing_links({name for name in names if "/" not in name})
        entries = [LayerLink(f"{home}/lib/{link}", target) for link, target in links.items()]
        return write_layer([LayerLink(f"{home}/lib64", "lib"), *entries], packed, plain)


@contextlib.contextmanager
def _installed(wheels: Iterable[WheelOfLayer], python: str) -> Iterator[dict[str, LayerEntry]]:
    """Yield the files of wheels by path, while the wheels are open."""
    with contextlib.ExitStack() as stack:
        files: dict[str, LayerEntry] = {}
        for wheel in wheels:
            reader = stack.enter_context(open_wheel(wheel.file))
            _require_sha256(reader, wheel)
            files |= {entry.path: entry for entry in installed_files(reader, python)}
        yield files


def _version(entry: LayerEntry | None) -> str:
    """Return the version of the wheel that installs a file."""
    if isinstance(entry, LayerFile) and isinstance(entry.content, WheelContent):
        return str(parse_wheel_filename(entry.content.wheel.name)[1])
    return "unknown, or missing"


def _require_sha256(reader: WheelReader, wheel: WheelOfLayer) -> None:
    found = reader.sha256()
    if found != wheel.sha256:
        raise HashMismatch(
            f"{wheel.file} is not the locked wheel: sha256 {found}, locked {wheel.sha256}",
            hint="it was damaged on this disk: remove it, and run the same command again",
        )
