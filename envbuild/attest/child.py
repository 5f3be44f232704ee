"""An image that was built on a proved one: are the proved layers its base, and was anything locked replaced above them?

This finds what an install or a copy puts over a library or beside it. It does not vouch for all else that is added.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.attest import layers, oci
from envbuild.attest.layers import Config
from envbuild.attest.oci import Manifest, Place
from envbuild.attest.trust import Build
from envbuild.plan import facts
from envbuild.plan.archive import FOLDERS
from envbuild.proof.reasons import Reason

# What decides which libraries and modules a process finds first.
_DECISIVE = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT", "PYTHONPATH", "PYTHONHOME")


def objections(
    place: Place,
    manifest: Manifest,
    child: Config,
    base: Config,
    build: Build,
    records: Sequence[Mapping[str, Any]],
) -> Iterator[Reason]:
    """Why the proof of `base`, as `records` tell it, does not hold for `child`; the layers above are read for it."""
    if child.layers[: len(base.layers)] != base.layers:
        yield Reason("base", f"the proved image {base.id} is not what this one is built on")
        return
    for name in _DECISIVE:
        if child.environment.get(name) != base.environment.get(name):
            yield Reason("environment", f"{name} is set anew above the proved layers")
    watch = _Watch(build, records)
    for item, diff_id in list(zip(manifest.layers, child.layers, strict=True))[len(base.layers) :]:
        for member, _ in layers.entries(place, oci.digest_in(item), diff_id):
            watch.see(member)
    yield from watch.reasons()


class _Watch:
    """Looks at each file above the proved layers. What Python compiles beside a module is none of its business."""

    def __init__(self, build: Build, records: Sequence[Mapping[str, Any]]) -> None:
        self._site = f"opt/venv/lib/python{build.lock.python}/site-packages"
        self._versions = {canonicalize_name(name): version for name, version in build.lock.versions.items()}
        self._owners = {f"{self._site}/{root}": name for name, roots in build.roots.items() for root in roots}
        self._owners |= {FOLDERS[item.name].lstrip("/"): item.name for item in build.lock.archives}
        self._cuda = {name for record in records for name in _libraries(record)}
        self._found: dict[tuple[str, str], list[str]] = {}

    def see(self, member: tarfile.TarInfo) -> None:
        path = PurePosixPath(posixpath.normpath(f"/{member.name}").lstrip("/"))
        if path.name == ".wh..wh..opq":
            self._over(str(path.parent), "emptied")
        elif path.name.startswith(".wh."):
            self._over(str(path.with_name(path.name.removeprefix(".wh."))), "removed")
        elif not member.isdir() and "__pycache__" not in path.parts:
            self._over(str(path), "replaced")
            self._beside(path)

    def _over(self, path: str, how: str) -> None:
        for root, name in self._owners.items():
            if path == root or path.startswith(f"{root}/") or root.startswith(f"{path}/"):
                self._found.setdefault(("replaced", f"{name} is {how} above the proved layers"), []).append(path)
                return

    def _beside(self, path: PurePosixPath) -> None:
        """A second one of something locked: another version's metadata, or a CUDA library before the locked one."""
        folder = path.parent.name
        if folder.endswith(".dist-info") and str(path.parent.parent) == self._site:
            name, _, version = folder.removesuffix(".dist-info").partition("-")
            locked = self._versions.get(canonicalize_name(name))
            if locked not in (None, version):
                text = f"{canonicalize_name(name)} {version} is above the proved layers, locked is {locked}"
                self._found.setdefault(("replaced", text), []).append(str(path))
        if path.name in self._cuda and "site-packages" not in path.parts and "dist-packages" not in path.parts:
            self._found.setdefault(("shadowed", f"another {path.name} is above the proved layers"), []).append(
                str(path)
            )
        if str(path) == "etc/ld.so.preload":
            self._found.setdefault(("environment", "libraries are preloaded"), []).append(str(path))

    def reasons(self) -> Iterator[Reason]:
        for (kind, text), paths in self._found.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            yield Reason(kind, f"{text}: /{paths[0]}{more}")


def _libraries(record: Mapping[str, Any]) -> Iterator[str]:
    """File names of the CUDA libraries that were measured."""
    found = record["environment"].get("libraries")
    for item in found if isinstance(found, list) else ():
        if isinstance(item, dict) and facts.library_of(str(item.get("owner")).partition("==")[0]):
            yield str(item.get("name"))
