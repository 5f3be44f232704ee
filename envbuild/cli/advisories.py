import click

from envbuild.cli.console import emit, json_option
from envbuild.facts import database


@click.command("advisories", short_help="List the known faults of GPU software, with their fixes.")
@json_option
def command(as_json: bool) -> None:
    """List every advisory: id, severity, the fault and its fix.

    Example: envbuild advisories
    """
    rows = [
        {"id": item.id, "severity": item.severity, "title": item.title, "remedy": item.remedy, "cite": list(item.cite)}
        for item in database.advisories()
    ]
    if as_json:
        emit({"advisories": rows})
        return
    for row in rows:
        click.echo(f"{row['severity']:<7} {row['id']:<32} {row['title']}\n{'':<40} fix: {row['remedy']}")
