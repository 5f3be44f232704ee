from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import click

from envbuild.cli.console import emit, json_option, profile_argument, table
from envbuild.evidence import image_status
from envbuild.fetch import index_config
from envbuild.image.docker_engine import Engine
from envbuild.image.image_naming import VERIFIED
from envbuild.lock import lock_file, outdated_pins
from envbuild.profile import profile_name_lookup
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util.errors import (
    BuildError,
    CheckFailed,
    EnvbuildError,
    LockError,
    NotProved,
    OutOfDate,
    ProfileError,
    printable,
)

_KINDS: dict[str, type[EnvbuildError]] = {
    "unproved": NotProved,
    "missing": BuildError,
    "out-of-date": OutOfDate,
    "failed": CheckFailed,
    "tampered": CheckFailed,
}


@click.command("status", short_help="Verified or why not, recomputed.")
@profile_argument("name", required=False)
@click.option(
    "--outdated", "asks_index", is_flag=True,
    help="Ask the index instead: which pins have newer patch releases, and which an advisory asks for.",
)  # fmt: skip
@json_option
def command(name: str | None, asks_index: bool, as_json: bool) -> None:
    """Say whether a profile's image is verified, recomputed from its lock, image and evidence; without a name, of all.

    Exit 0 verified; 4 built, not proved; 5 the self-test failed or the tag was moved by hand; 6 not built; 8 no lock,
    or proved for another lock or self-test. A list of all, and --outdated, end with 0 whatever they find.
    Example: envbuild status cpu
    """
    if asks_index:
        _outdated(name, as_json)
        return
    if name is None:
        _all(as_json)
        return
    source = profile_reader_and_overrides.load(name)
    found = image_status.compute(Engine(), source)
    if found.state == VERIFIED:
        if as_json:
            emit(found.document())
        else:
            assert found.image is not None
            reasons = "; ".join(proof.reason for proof in found.proofs)
            click.echo(printable(f"{found.name}: verified {found.image.id} ({reasons})"))
        return
    if not as_json:
        click.echo(f"{found.name}: {found.state}")
    kind = OutOfDate if found.state == "missing" and found.lock is None else _KINDS[found.state]
    error = kind(f"{found.name} is not verified: {found.state}", hint="\n".join(found.reasons))
    error.partial = found.document()
    raise error


def _all(as_json: bool) -> None:
    engine = Engine()
    rows = [_row(engine, name) for name in profile_name_lookup.profile_names()]
    if as_json:
        emit({"profiles": rows})
        return
    cells = [(row["profile"], row["status"], "; ".join(row["reasons"]) or _image(row)) for row in rows]
    for line in table(cells):
        click.echo(line)


def _image(row: dict[str, Any]) -> str:
    lacks = dict.fromkeys(lack for proof in row["proofs"] for lack in proof.get("unconfined", ()))
    return f"{row['image']['id']}{', proved less confined: ' if lacks else ''}{'; '.join(lacks)}"


def _row(engine: Engine, name: str) -> dict[str, Any]:
    try:
        return image_status.compute(engine, profile_reader_and_overrides.load(name)).document()
    except (ProfileError, LockError) as error:
        return {"profile": name, "status": "at fault", "reasons": [error.message]}


def _outdated(name: str | None, as_json: bool) -> None:
    if name is None:
        with ThreadPoolExecutor(index_config.PARALLEL) as pool:
            rows = list(pool.map(_pins_or_fault, profile_name_lookup.profile_names()))
    else:
        rows = [_pins(name)]
    if as_json:
        emit({"profiles": rows} if name is None else rows[0])
        return
    cells = [cell for row in rows for cell in _lines(row)]
    for line in table([("PROFILE", "PIN", "LOCKED", "PATCH", "ADVISORIES"), *cells]) if cells else ():
        click.echo(line)
    moved = sum(bool(row["outdated"]) for row in rows)
    click.echo(f"{moved} of {len(rows)} profiles have pins that could move")


def _pins(name: str) -> dict[str, Any]:
    source = profile_reader_and_overrides.load(name)
    found = outdated_pins.find_outdated(plan_resolver.resolve(source), lock_file.required_lock(source))
    return {"profile": source.name, "outdated": [asdict(item) for item in found]}


def _pins_or_fault(name: str) -> dict[str, Any]:
    try:
        return _pins(name)
    except (ProfileError, LockError, OutOfDate) as error:
        return {"profile": name, "outdated": [], "error": error.message}


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    if "error" in row:
        yield row["profile"], "at fault", "", "", row["error"]
    for pin in row["outdated"]:
        asked = (f"{item['advisory']} ({item['state']}) asks for {item['version']}" for item in pin["asked"])
        yield row["profile"], pin["name"], pin["version"], pin["newest"] or "-", "; ".join(asked)
