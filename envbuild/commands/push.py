import click

from envbuild import publish
from envbuild.commands.console import Console, emit, json_option


@click.command("push", short_help="A verified image to a registry, with its evidence.")
@click.argument("name")
@click.argument("repository", metavar="REGISTRY/NAME")
@json_option
def command(name: str, repository: str, as_json: bool) -> None:
    """Push a profile's verified image, then its evidence, then the tags: its lock's and `verified`.

    Nothing is built. Run again, it finishes what was interrupted. Credentials are docker's.
    Example: envbuild push h20 registry.example/h20
    """
    done = publish.push(name, repository, Console())
    if as_json:
        emit(done.document())
    else:
        click.echo(f"{done.repository}@{done.digest}")
