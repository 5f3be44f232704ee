import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from envbuild.cli.command_options import json_option
from envbuild.cli.console import emit
from envbuild.image import image_and_cache_pruning, lock_paths_of_built_images
from envbuild.image.docker_engine import Engine
from envbuild.image.engine_endpoint_and_errors import UnusableEngine
from envbuild.image.image_and_cache_pruning import Removable
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import make_build_and_test
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.runners import docker_runner
from envbuild.util import disk_space
from envbuild.util.errors import LockError, printable


@dataclass(frozen=True)
class PrunedItems:
    """The document of `prune`. `state`: kept with --dry-run, else removed. `bytes`: the size of all items together.
    `images_skipped`: why images were skipped, null if they were not."""

    state: Literal["removed", "kept"]
    items: tuple[Removable, ...]
    bytes: int
    images_skipped: str | None


@click.command("prune", short_help="Remove old images and caches.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--images-only", is_flag=True, help="Remove only images; keep all cached files.")
@json_option
def command(dry_run: bool, images_only: bool, as_json: bool) -> None:
    """Remove images that no lock names, and cached files that no lock needs.

    Keeps what the locks of this folder need. Keeps also what a lock in another folder needs, if an image was built from
    it and its file still exists.
    Never removes a verified or a running image. Removes without asking; --dry-run shows what it would remove. Stops
    at a lock file that cannot be read, because its needs are unknown. Without an engine it removes only cached files,
    says that it did not look at images, and exits with 0; with --images-only it exits with 6.
    Example: envbuild prune --dry-run
    """
    engine, skipped = _engine(required=images_only)
    with contextlib.ExitStack() as stack:
        known = _turns(stack)
        locks = [locked for file in known.files if (locked := known.read(file))]
        found = list(image_and_cache_pruning.images(engine, known.seen, locks, known.elsewhere)) if engine else []
        if not images_only:
            found += [*image_and_cache_pruning.caches(known.names, locks), *image_and_cache_pruning.temporary()]
        if not dry_run:
            if engine:
                docker_runner.sweep_containers(engine)
            image_and_cache_pruning.remove_items(engine, found)
            if engine:  # without an engine, it is unknown which locks still have an image
                image_and_cache_pruning.forget_gone_locks(engine, known.noted)
    total = sum(item.bytes for item in found)
    if as_json:
        emit(PrunedItems("kept" if dry_run else "removed", tuple(found), total, skipped))
        return
    for item in found:
        holds = f" ({printable(item.holds)})" if item.holds else ""
        click.echo(f"{item.kind:<9} {item.bytes / 1e6:8.1f} MB  {item.name}{holds}")
    click.echo(f"{'would free' if dry_run else 'freed'} up to {total / 1e9:.2f} GB")
    if skipped:
        say(printable(f"note: images of an engine were skipped: {skipped}"))


def _engine(required: bool) -> tuple[Engine | None, str | None]:
    """Return (engine, None), or (None, reason) if no engine can be used. `required`: raise UnusableEngine in that
    case."""
    try:
        return Engine(), None
    except UnusableEngine as error:
        if required:
            raise
        return None, error.message


@dataclass(frozen=True)
class _Known:
    """`seen`: the profiles that are known in this folder. `local`: their lock files. `noted`: the lock files of all
    images that were built on this machine."""

    seen: set[str]
    local: list[Path]
    noted: list[Path]

    @property
    def elsewhere(self) -> set[str]:
        return set(map(lock_paths_of_built_images.name, self.noted))

    @property
    def names(self) -> list[str]:
        return sorted(self.seen | self.elsewhere)

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys([*self.local, *self.noted]))

    def read(self, file: Path) -> Lock | None:
        try:
            return lock_file.read(file)
        except LockError as error:
            if file not in self.local:
                error.hint = f"{error.hint or 'repair it'}; or delete it, if that checkout is not used any more"
            raise


def _known() -> _Known:
    locks = profile_and_lock_name_lookup.locks()
    local = [file.absolute() for file in locks.values()]
    return _Known(
        {*profile_and_lock_name_lookup.profile_names(), *locks}, local, list(lock_paths_of_built_images.all_locks())
    )


def _turns(stack: contextlib.ExitStack) -> _Known:
    """Lock all known profiles against other processes, and return them. If a new profile appears during the wait, all
    locks are released and taken again. Otherwise two processes that each hold some locks could wait for each other for
    ever."""
    known = _known()
    while True:
        held = known.names
        for name in held:
            _alone(stack, name)
        known = _known()
        if set(known.names) <= set(held):
            return known
        stack.close()


def _alone(stack: contextlib.ExitStack, name: str) -> None:
    """Lock a profile against other processes. If the disk is too full to create the file of the lock, continue without
    it: no other process can create it either, and this command frees space."""
    try:
        stack.enter_context(make_build_and_test.one_run_per_profile(name, say))
    except OSError as error:
        if not disk_space.is_disk_full(error):
            raise


def say(text: str) -> None:
    click.echo(text, err=True)
