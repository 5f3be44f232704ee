"""Finds the links below CUDA_HOME that linkers look for and that the wheels of nvcc lack, and writes the layer with
these links."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from packaging.utils import parse_wheel_filename

from envbuild.image.layers.layer_writer import (
    WRITER_VERSION,
    LayerEntry,
    LayerFile,
    LayerLink,
    WheelContent,
    WrittenLayer,
    write_layer,
)
from envbuild.image.layers.wheel_layers import WheelOfLayer, files_of_wheels
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import BuildError


@dataclass(frozen=True)
class NvccLinksLayer:
    """The layer with the links that linkers look for below `home`, the CUDA_HOME of an nvcc that these wheels install.
    `release`: the CUDA release that nvcc must have, such as "13.0"."""

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
        with files_of_wheels(self.wheels, self.python) as files:
            version = _version(files.get(f"{home}/bin/nvcc"))
            names = {path.removeprefix(f"{home}/lib/") for path in files if path.startswith(f"{home}/lib/")}
        if not version.startswith(f"{self.release}."):
            text = f"{self.home}/bin/nvcc is of CUDA {version}, torch of {self.release}"
            raise BuildError(text, hint="lock again: envbuild lock NAME --upgrade")
        links = missing_links({name for name in names if "/" not in name})
        entries = [LayerLink(f"{home}/lib/{link}", target) for link, target in links.items()]
        return write_layer([LayerLink(f"{home}/lib64", "lib"), *entries], packed, plain)


def _version(entry: LayerEntry | None) -> str:
    """Return the version of the wheel that installs a file."""
    if isinstance(entry, LayerFile) and isinstance(entry.content, WheelContent):
        return str(parse_wheel_filename(entry.content.wheel.name)[1])
    return "unknown, or missing"


def missing_links(names: Collection[str]) -> dict[str, str]:
    """Return link -> target for the links that the folder of CUDA's libraries lacks. `names`: the files in the folder.
    A linker looks for libcudart.so, but wheels have only libcudart.so.13."""
    found: dict[str, str] = {}
    for name in sorted(names):
        plain = f"{name.partition('.so.')[0]}.so"
        if name.startswith("lib") and ".so." in name and plain not in names:
            found.setdefault(plain, name)
    return found
