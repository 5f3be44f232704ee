"""Downloads what a build needs into the stores, and shows the progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from envbuild.fetch import (
    apt_resolution_and_download,
    archive_fetcher,
    sha256_file_store,
    wheel_resolution_and_download,
)
from envbuild.image import debian_base_tar
from envbuild.image.oci import base_image_download
from envbuild.lock import extension_source_fetcher, wheel_conflicts
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.lock.lock_file import Lock
from envbuild.pipeline.progress_events import Progress
from envbuild.resolve.plan_resolver import Plan
from envbuild.util import process_locks


def show_download(progress: Progress) -> Callable[[str, int], None]:
    """Return a callback that shows the number of bytes downloaded and the current file."""
    came: dict[str, int] = {}

    def show(file: str, count: int) -> None:
        came[file] = came.get(file, 0) + count
        progress.line(f"fetching {sum(came.values()) / 1e6:.0f} MB: {file}")

    return show


def one_fetch_at_a_time(progress: Progress) -> contextlib.AbstractContextManager[None]:
    """Let only one process download at a time, so that files shared by two profiles are downloaded once."""
    return process_locks.exclusive("_fetch", "downloads the files of an image", progress.say)


def fetch_image_parts(plan: Plan, locked: Lock, progress: Progress) -> None:
    """Download the wheels and archives of an image, and check its wheels for conflicts. Its base and its extensions are
    not included."""
    show = show_download(progress)
    with one_fetch_at_a_time(progress):
        wheel_resolution_and_download.fetch_wheels(
            locked.wheels, plan.python, plan.glibc, sha256_file_store.wheel_store(), show
        )
        wheel_conflicts.refuse_stored(locked.wheels, locked.startup)
        archive_fetcher.fetch_archives(plan.archives, show)


def fetch_base_manifest(lock: Lock, progress: Progress) -> None:
    """Download the manifest of the base image that a lock names, if it names one. The manifest states the sizes of the
    layers. Waits for other processes only if the cache lacks the manifest. Raises what `download_base_image` raises."""
    if lock.image and base_image_download.read_base_image(lock.image, lock.platform) is None:
        with one_fetch_at_a_time(progress):
            base_image_download.download_base_manifest(lock.image, lock.platform)


def fetch_base_image(lock: Lock, progress: Progress) -> None:
    """Download the base image that a lock names, if it names one. Raises what `download_base_image` raises."""
    if lock.image:
        with one_fetch_at_a_time(progress):
            base_image_download.download_base_image(lock.image, lock.platform, show_download(progress))


def make_bases(lock: Lock, progress: Progress) -> None:
    """Make the tar of a lock's base, and the tar of the base with the packages of `apt:`, unless they exist. Only
    packages of a tar that must be made are downloaded. Raises AptUnavailable if no mirror has such a package any
    longer."""
    store = sha256_file_store.debs()
    with one_fetch_at_a_time(progress):
        for apt in (False, True) if lock.apt else (False,):
            if lock.suite and not debian_base_tar.tar_file(lock, apt=apt).is_file():
                packages = (*lock.base, *lock.apt) if apt else lock.base
                apt_resolution_and_download.fetch_debs(packages, lock.suite, store, lock.made)
                debian_base_tar.make_base(lock, store, progress.line, apt=apt)


def fetch_compiler_and_sources(plan: Plan, locked: Lock, one: LockedExtension, progress: Progress) -> None:
    """Download the source of an extension, and the tools for compiling it that the image does not contain."""
    assert locked.builder and plan.extension_toolchain
    show = show_download(progress)
    with one_fetch_at_a_time(progress):
        wheel_resolution_and_download.fetch_wheels(
            locked.builder.wheels, plan.python, plan.glibc, sha256_file_store.wheel_store(), show
        )
        wheel_conflicts.refuse_stored(locked.compiled_with, locked.startup)
        if locked.builder.archives and plan.extension_toolchain.toolchain.archive:
            archive_fetcher.fetch_archives([plan.extension_toolchain.toolchain.archive], show)
        wanted = next(item for item in plan.extension_toolchain.wanted if item.extension.name == one.name)
        extension_source_fetcher.fetch_source(wanted, show)
        if locked.suite:
            try:
                apt_resolution_and_download.fetch_debs(
                    locked.builder.debs, locked.suite, sha256_file_store.debs(), locked.made
                )
            except apt_resolution_and_download.AptUnavailable as gone:
                again = f"envbuild lock {plan.cli_words} --upgrade base"
                gone.hint = f"set debian_snapshot in config.yaml, or lock newer versions: {again}"
                raise
