import click

from envbuild.commands.console import emit, json_option
from envbuild.errors import EnvbuildError
from envbuild.image import prune
from envbuild.image.engine import Engine
from envbuild.plan import lock, profile
from envbuild.proof.runners import local


@click.command("prune", short_help="Remove old images and caches.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--images-only", is_flag=True, help="Leave the caches of wheels, packages and bases alone.")
@json_option
def command(dry_run: bool, images_only: bool, as_json: bool) -> None:
    """Remove images and cached files that no current lock names; never a verified or a running image.

    Example: envbuild prune --dry-run
    """
    engine = Engine()
    locks = _locks()
    found = list(prune.images(engine, locks))
    if not images_only:
        found += prune.caches(locks)
    if not dry_run:
        local.sweep(engine)
        prune.remove(engine, found)
    total = sum(item.bytes for item in found)
    if as_json:
        rows = [{"kind": item.kind, "name": item.name, "bytes": item.bytes} for item in found]
        emit({"removed": [] if dry_run else rows, "would_remove": rows if dry_run else [], "bytes": total})
        return
    for item in found:
        click.echo(f"{item.kind:<9} {item.bytes / 1e6:8.1f} MB  {item.name}")
    click.echo(f"{'would free' if dry_run else 'freed'} up to {total / 1e9:.2f} GB")


def _locks() -> list[lock.Lock]:
    """The locks of all profiles seen from here; a damaged one keeps nothing from being pruned but itself."""
    found = []
    for name in profile.names():
        try:
            locked = lock.read(profile.load(name).known_lock)
        except EnvbuildError as error:
            click.echo(f"left out: {error.message}", err=True)
            continue
        if locked:
            found.append(locked)
    return found
