"""Fills the build contexts: folders of hard links into the stores, or of copies where links are not possible. The
folders stay between builds, so that BuildKit gets only changes.

A build has a main context, and one context for the wheels of each layer. The wheels are outside of the main context's
folder, because BuildKit reads all of that folder.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from envbuild.fetch import sha256_file_store, wheel_resolution_and_download
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.image import debian_base_tar, extension_dockerfile
from envbuild.lock import extension_source_fetcher, wheel_conflicts
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.lock.lock_file import Lock
from envbuild.util import user_folders

_OWN, _WHEELS = "own", "wheels"


def context_folder(name: str) -> Path:
    """The folder that contains all contexts of a profile."""
    return user_folders.cache_folder("contexts") / name


def main_context(name: str) -> Path:
    """The main context of the build."""
    return context_folder(name) / _OWN


def of_wheels(name: str) -> dict[str, Path]:
    """The additional contexts: name of the context -> folder of a layer's wheels."""
    return {
        extension_dockerfile.wheels_context(layer.name): layer
        for layer in sorted((context_folder(name) / _WHEELS).glob("*"))
    }


def discard(name: str) -> None:
    """Delete all contexts of a profile; the next build creates them again."""
    shutil.rmtree(context_folder(name), ignore_errors=True)


def fill_builder(lock: Lock, name: str, extension: LockedExtension) -> None:
    """Fill the contexts in which an extension is compiled. Their files must be in the stores. Raises LockError for
    wheels that must not be installed, HashMismatch for a wheel, Debian package or base that changed, and
    SourceDamaged."""
    assert lock.builder
    wheel_conflicts.refuse_stored(lock.wheels, lock.startup)
    wheel_conflicts.refuse_stored(lock.compiled_with, lock.startup)
    target = context_folder(name)
    _fill_shared(lock, target)
    _wheels(lock.builder.wheels, target)
    _archives(lock.builder.archives, target / _OWN)
    _debs(lock.builder.debs, target / _OWN / extension_dockerfile.BUILDER_DEBS)
    source = target / _OWN / "sources" / extension.name / "source.tar"
    source.parent.mkdir(parents=True)
    extension_source_fetcher.write_archive(extension, source)


def _fill_shared(lock: Lock, target: Path) -> None:
    _fill_base(lock, target)
    _archives(lock.archives, target / _OWN)
    shutil.rmtree(target / _WHEELS, ignore_errors=True)
    _wheels(lock.wheels, target)


def _fill_base(lock: Lock, target: Path) -> None:
    main = target / _OWN
    shutil.rmtree(main, ignore_errors=True)
    for part in ("bin", extension_dockerfile.DEBS):
        (main / part).mkdir(parents=True)
    _link(wheel_resolution_and_download.uv_binary(), main / "bin" / "uv")
    for tool in extension_dockerfile.TOOLS:
        shutil.copy2(tool, main / "bin" / tool.name)
    if lock.suite:
        _link(debian_base_tar.intact_base(lock), main / "base.tar")
    _debs(lock.apt, main / extension_dockerfile.DEBS)


def _debs(debs: Iterable[Deb], target: Path) -> None:
    for deb in debs:
        sha256_file_store.debs().check(deb.sha256, deb.file)  # the installer checks wheels, but not Debian packages
        _link(sha256_file_store.debs().path(deb.sha256, deb.file), target / deb.file)


def _archives(archives: Iterable[Archive], target: Path) -> None:
    for archive in archives:
        held = sha256_file_store.archive_store().path(archive.sha256, archive.name)
        _link(held, target / "archives" / archive.name / archive.name)


def _wheels(locked: Iterable[LockedWheel], target: Path) -> None:
    for item in locked:
        held = sha256_file_store.wheel_store().path(item.wheel.sha256, item.wheel.file)
        _link(held, target / _WHEELS / item.layer / item.wheel.file)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        shutil.copy2(source, target)
