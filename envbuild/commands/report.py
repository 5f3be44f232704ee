from __future__ import annotations

from pathlib import Path

import click

from envbuild.commands.console import emit, json_option, profile_argument
from envbuild.commands.output import FILE, STDOUT, prepare, write
from envbuild.document import display
from envbuild.errors import LockError
from envbuild.image import records
from envbuild.insight import measured, recorded, rendering, report
from envbuild.insight.report import Page
from envbuild.plan import lock, naming, resolve, sources
from envbuild.plan.lock import Lock
from envbuild.proof import evidence, fingerprint, proved
from envbuild.proof.counting import Proof, digest_of


@click.command("report", short_help="One page of all that is known of a profile.")
@profile_argument("name")
@click.option("-o", "output", type=FILE, required=True, metavar="FILE", help="Where the page goes; - is stdout.")
@click.option(
    "--compare", "prints", type=FILE, nargs=2, metavar="A B",
    help="Also where the numbers of two GPUs part: files of `envbuild test --fingerprint`.",
)  # fmt: skip
@json_option
def command(name: str, output: Path, prints: tuple[Path, Path] | None, as_json: bool) -> None:
    """Write one HTML page that needs no network: proof, errors beside their bounds, layers, speed, ranks, advisories.

    It is told from the profile, its lock and the evidence on disk; no engine is asked. The same evidence gives the
    same page. Exit 0 whatever the page says; the status is for `envbuild status`.

    Example: envbuild report h20 -o h20.html --compare a100.json h20.json
    """
    prepare(output, as_json=as_json)
    page = _page(name, prints)
    write(output, rendering.html(page))
    if as_json:
        emit({"file": display(output), **page.document()})
    else:
        click.echo(f"{display(output)}: {page.name}, {page.status.state}", err=output == STDOUT)


def _page(name: str, prints: tuple[Path, Path] | None) -> Page:
    source = sources.load(name)
    plan = resolve.resolve(source)
    locked = lock.read(source.known_lock)
    fits = locked is not None and not locked.stale(plan)
    built = [record for record in records.every() if locked and record.lock == locked.id]
    proofs = proved.on_disk(source.name, source.profile, locked, built)
    compared = report.comparison(*map(fingerprint.read, prints)) if prints else None
    return report.page(
        source,
        plan,
        resolve.as_locked(plan, locked.versions) if locked and fits else plan.choice,
        locked,
        proofs,
        [record.image for record in built],
        map(_run, _with_evidence(proofs)),
        _others(source.name),
        compared,
    )


def _with_evidence(proofs: tuple[Proof, ...]) -> list[Path]:
    """Models of one family share a proof."""
    return list(dict.fromkeys(proof.evidence for proof in proofs if proof.evidence))


def _run(statement: Path) -> measured.Run:
    record = evidence.record_of(statement)
    return recorded.run(record, digest_of(statement))


def _others(name: str) -> dict[str, Lock]:
    """The locks of all other profiles; one that cannot be read shares nothing."""
    found: dict[str, Lock] = {}
    for other, file in naming.locks().items():
        try:
            read = lock.read(file) if other != name else None
        except LockError:
            continue
        if read:
            found[other] = read
    return found
