import click

from envbuild.commands.console import emit, json_option
from envbuild.errors import CheckFailed, EnvbuildError, NotProved, OutOfDate
from envbuild.image import dockerfile
from envbuild.image.engine import Engine
from envbuild.image.names import VERIFIED
from envbuild.plan import lock, resolve, sources
from envbuild.proof import status
from envbuild.proof.status import Status

_KINDS: dict[str, type[EnvbuildError]] = {
    "unproved": NotProved,
    "missing": NotProved,
    "out-of-date": OutOfDate,
    "failed": CheckFailed,
    "tampered": CheckFailed,
}


@click.command("status", short_help="Verified or why not, recomputed.")
@click.argument("name")
@json_option
def command(name: str, as_json: bool) -> None:
    """Say whether a profile's image is verified, recomputed from its lock, image and evidence.

    Exit 0 verified; 4 not built or not proved; 5 the self-test failed or the tag was moved by hand; 8 proved for
    another lock or self-test.
    Example: envbuild status cpu
    """
    found = compute(Engine(), name)
    if found.state == VERIFIED:
        if as_json:
            emit(found.document())
        else:
            assert found.image is not None
            click.echo(f"{found.name}: verified {found.image.id} ({'; '.join(p.reason for p in found.proofs)})")
        return
    if not as_json:
        click.echo(f"{found.name}: {found.state}")
    error = _KINDS[found.state](f"{found.name} is not verified: {found.state}", hint="\n".join(found.reasons))
    error.partial = found.document()
    raise error


def compute(engine: Engine, name: str) -> Status:
    source = sources.load(name)
    plan = resolve.resolve(source)
    locked = lock.read(source.known_lock)
    text = dockerfile.render(locked, source.name) if locked else ""
    return status.compute(engine, source.name, source.profile, locked, locked.stale(plan) if locked else [], text)
