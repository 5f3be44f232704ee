from typing import Any

import click

from envbuild.commands.console import emit, json_option, table
from envbuild.errors import CheckFailed, EnvbuildError, LockError, NotProved, OutOfDate, ProfileError
from envbuild.image.engine import Engine
from envbuild.image.names import VERIFIED
from envbuild.plan import sources
from envbuild.proof import status

_KINDS: dict[str, type[EnvbuildError]] = {
    "unproved": NotProved,
    "missing": NotProved,
    "out-of-date": OutOfDate,
    "failed": CheckFailed,
    "tampered": CheckFailed,
}


@click.command("status", short_help="Verified or why not, recomputed.")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """Say whether a profile's image is verified, recomputed from its lock, image and evidence; without a name, of all.

    Exit 0 verified; 4 not built or not proved; 5 the self-test failed or the tag was moved by hand; 8 proved for
    another lock or self-test. A list of all ends with 0.
    Example: envbuild status cpu
    """
    if name is None:
        _all(as_json)
        return
    found = status.compute(Engine(), sources.load(name))
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


def _all(as_json: bool) -> None:
    engine = Engine()
    rows = [_row(engine, name) for name in sources.names()]
    if as_json:
        emit({"profiles": rows})
        return
    cells = [(row["profile"], row["status"], "; ".join(row["reasons"]) or row["image"]["id"]) for row in rows]
    for line in table(cells):
        click.echo(line)


def _row(engine: Engine, name: str) -> dict[str, Any]:
    try:
        return status.compute(engine, sources.load(name)).document()
    except (ProfileError, LockError) as error:
        return {"profile": name, "status": "at fault", "reasons": [error.message]}
