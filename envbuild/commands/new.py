from pathlib import Path

import click

from envbuild.commands.console import emit, json_option
from envbuild.errors import UsageError
from envbuild.plan import sources
from envbuild.plan.document import display
from envbuild.plan.draft import draft
from envbuild.plan.store import write_atomically


@click.command("new", short_help="Write a commented profile to start from.")
@click.argument("name")
@click.option("--from", "parent", metavar="PROFILE", required=True, help="The profile that the new one builds on.")
@json_option
def command(name: str, parent: str, as_json: bool) -> None:
    """Write profiles/NAME.yaml, a commented profile that builds on another; never over an existing file.

    Example: envbuild new myproject --from h20
    """
    if not sources.NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name images: use lower case letters, digits and dashes")
    file = Path.cwd() / "profiles" / f"{name}.yaml"
    if file.exists():
        raise UsageError(f"{display(file)} is there already", hint="choose another name, or edit it")
    write_atomically(file, draft(name, sources.load(parent)))
    if as_json:
        emit({"profile": name, "file": display(file)})
    else:
        click.echo(f"{display(file)}; next: envbuild show {name}")
