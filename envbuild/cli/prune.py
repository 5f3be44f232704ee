import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from envbuild.cli.console import emit, json_option
from envbuild.image import image_and_cache_pruning, noted_lock_paths
from envbuild.image.docker_engine import Engine
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import workflows
from envbuild.profile import profile_name_lookup
from envbuild.runners import docker_runner
from envbuild.util import disk_space
from envbuild.util.errors import LockError, printable


@click.command("prune", short_help="Remove old images and caches.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--images-only", is_flag=True, help="Leave the caches of wheels, packages and bases alone.")
@json_option
def command(dry_run: bool, images_only: bool, as_json: bool) -> None:
    """Remove images that no lock names, and cached files that none needs.

    Those of the profiles and locks seen from here, and what was built from others, as of a profile given by its path:
    it is in use as long as its lock is there. Never a verified or a running image. A lock that cannot be read stops
    it: what it needs is not known.
    Example: envbuild prune --dry-run
    """
    engine = Engine()
    with contextlib.ExitStack() as stack:
        known = _turns(stack)
        locks = [locked for file in known.files if (locked := known.read(file))]
        found = list(image_and_cache_pruning.images(engine, known.seen, locks, known.elsewhere))
        if not images_only:
            found += [*image_and_cache_pruning.caches(known.names, locks), *image_and_cache_pruning.temporary()]
        if not dry_run:
            docker_runner.sweep_containers(engine)
            image_and_cache_pruning.remove_items(engine, found)
            image_and_cache_pruning.forget_gone_locks(engine, known.noted)
    total = sum(item.bytes for item in found)
    if as_json:
        rows = [asdict(item) for item in found]
        emit({"removed": [] if dry_run else rows, "would_remove": rows if dry_run else [], "bytes": total})
        return
    for item in found:
        holds = f" ({printable(item.holds)})" if item.holds else ""
        click.echo(f"{item.kind:<9} {item.bytes / 1e6:8.1f} MB  {item.name}{holds}")
    click.echo(f"{'would free' if dry_run else 'freed'} up to {total / 1e9:.2f} GB")


@dataclass(frozen=True)
class _Known:
    """Names of profiles that are seen from here, and the locks beside them; locks that were noted when an image was
    built from them."""

    seen: set[str]
    beside: list[Path]
    noted: list[Path]

    @property
    def elsewhere(self) -> set[str]:
        return set(map(noted_lock_paths.name, self.noted))

    @property
    def names(self) -> list[str]:
        return sorted(self.seen | self.elsewhere)

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys([*self.beside, *self.noted]))

    def read(self, file: Path) -> Lock | None:
        try:
            return lock_file.read(file)
        except LockError as error:
            if file not in self.beside:
                error.hint = f"{error.hint or 'mend it'}; or delete it, if that checkout is no longer used"
            raise


def _known() -> _Known:
    locks = profile_name_lookup.locks()
    beside = [file.absolute() for file in locks.values()]
    return _Known({*profile_name_lookup.profile_names(), *locks}, beside, list(noted_lock_paths.all_locks()))


def _turns(stack: contextlib.ExitStack) -> _Known:
    """What is known once nobody else works on any of it. A profile that was first made while others were waited for is
    one more to wait for: all turns are given back, as two that hold some and wait for others could wait for ever."""
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
    """Nobody else works on the profile meanwhile. Where the disk has no room for the lock's file, nobody does: it is
    not there, and nobody can make it; and this command is what makes room."""
    try:
        stack.enter_context(workflows.one_run_per_profile(name, say))
    except OSError as error:
        if not disk_space.is_disk_full(error):
            raise


def say(text: str) -> None:
    click.echo(text, err=True)
