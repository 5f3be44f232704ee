from pathlib import Path

import click

from envbuild.commands.console import emit, json_option
from envbuild.document import display
from envbuild.errors import UsageError
from envbuild.plan import draft, naming, sources
from envbuild.plan.store import write_within


@click.command("new", short_help="Write a commented profile to start from.")
@click.argument("name")
@click.option("--from", "parent", metavar="PROFILE", help="The profile that the new one builds on.")
@click.option("--from-image", "image", metavar="IMAGE", help="An image of the engine: write down what it holds.")
@json_option
def command(name: str, parent: str | None, image: str | None, as_json: bool) -> None:
    """Write profiles/NAME.yaml, a commented profile that builds on another, or on what an image holds.

    Never over an existing file. Example: envbuild new myproject --from h20
    """
    if (parent is None) == (image is None):
        raise UsageError("give one of --from PROFILE or --from-image IMAGE", hint="envbuild new myproject --from h20")
    if not naming.NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name images: use lower case letters, digits and dashes")
    file = Path.cwd() / "profiles" / f"{name}.yaml"
    if file.exists():
        raise UsageError(f"{display(file)} is there already", hint="choose another name, or edit it")
    text = _held_by(name, image) if image else draft.draft(name, sources.load(str(parent)))
    write_within(Path.cwd(), file, text)
    if as_json:
        emit({"profile": name, "file": display(file)})
    else:
        click.echo(f"{display(file)}; next: envbuild show {name}")


def _held_by(name: str, reference: str) -> str:
    """The engine and its client are only loaded for this."""
    from envbuild.image.engine import Engine
    from envbuild.proof import collect
    from envbuild.proof import draft as of_image

    engine = Engine()
    return of_image.draft(name, reference, collect.of_image(engine, engine.get(reference), reference))
