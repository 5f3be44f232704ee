from dataclasses import asdict

import click

from envbuild.cli.console import Console, emit, json_option
from envbuild.facts import database
from envbuild.fetch import torch_pin_comparison
from envbuild.util.errors import UsageError


@click.group("facts", short_help="What is known of GPUs, CUDA, torch and faults.")
def command() -> None:
    """Compare torch's pins in the facts with those on the configured index, or list the known advisories.

    Example: envbuild facts refresh torch --release 2.7.1
    """


@command.command("refresh")
@click.argument("subject", type=click.Choice(["torch"]))
@click.option("--release", "releases", multiple=True, metavar="VERSION", help="Only this release; may be repeated.")
@json_option
def refresh_command(subject: str, releases: tuple[str, ...], as_json: bool) -> None:
    """Read torch's pins again from the index's wheel metadata and show where they differ from the facts.

    Example: envbuild facts refresh torch
    """
    known = database.torch_releases()
    unknown = [release for release in releases if release not in known]
    if unknown:
        raise UsageError(f"the facts do not know torch {', '.join(unknown)}", hint=f"known: {', '.join(known)}")
    console = Console()
    read = {
        name: torch_pin_comparison.pin_differences(known[name], console.say)
        for name in dict.fromkeys(releases) or known
    }
    found = [item for differences in read.values() for item in differences]
    if as_json:
        emit({"subject": subject, "releases": list(read), "differences": [asdict(item) for item in found]})
        return
    for item in found:
        click.echo(f"torch {item.release}: {item.distribution}: facts {item.facts or '-'}, index {item.index or '-'}")
    click.echo(f"{len(read)} releases read, {len(found)} differences")


@command.command("advisories")
@json_option
def advisories_command(as_json: bool) -> None:
    """List every known fault: id, severity, what it is and what cures it.

    Example: envbuild facts advisories
    """
    rows = [
        {"id": item.id, "severity": item.severity, "title": item.title, "remedy": item.remedy, "cite": list(item.cite)}
        for item in database.advisories()
    ]
    if as_json:
        emit({"advisories": rows})
        return
    for row in rows:
        click.echo(f"{row['severity']:<7} {row['id']:<32} {row['title']}\n{'':<40} cure: {row['remedy']}")
