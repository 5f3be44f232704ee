import contextlib
from dataclasses import asdict

import click

from envbuild import pipeline, room
from envbuild.commands.console import emit, json_option
from envbuild.errors import printable
from envbuild.image import places, prune
from envbuild.image.engine import Engine
from envbuild.plan import lock, naming
from envbuild.proof.runners import local


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
        known, noted = naming.locks(), list(places.every())
        seen, elsewhere = {*naming.names(), *known}, set(map(places.name, noted))
        names = sorted(seen | elsewhere)
        for name in names:
            _alone(stack, name)
        files = dict.fromkeys([*(file.absolute() for file in known.values()), *noted])
        locks = [locked for file in files if (locked := lock.read(file))]
        found = list(prune.images(engine, seen, locks, elsewhere))
        if not images_only:
            found += [*prune.caches(names, locks), *prune.temporary()]
        if not dry_run:
            local.sweep(engine)
            prune.remove(engine, found)
            prune.forget(engine, noted)
    total = sum(item.bytes for item in found)
    if as_json:
        rows = [asdict(item) for item in found]
        emit({"removed": [] if dry_run else rows, "would_remove": rows if dry_run else [], "bytes": total})
        return
    for item in found:
        holds = f" ({printable(item.holds)})" if item.holds else ""
        click.echo(f"{item.kind:<9} {item.bytes / 1e6:8.1f} MB  {item.name}{holds}")
    click.echo(f"{'would free' if dry_run else 'freed'} up to {total / 1e9:.2f} GB")


def _alone(stack: contextlib.ExitStack, name: str) -> None:
    """Nobody else works on the profile meanwhile. Where the disk has no room for the lock's file, nobody does: it is
    not there, and nobody can make it; and this command is what makes room."""
    try:
        stack.enter_context(pipeline.alone(name, say))
    except OSError as error:
        if not room.lacks(error):
            raise


def say(text: str) -> None:
    click.echo(text, err=True)
