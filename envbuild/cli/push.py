import click

from envbuild.cli.command_options import json_option
from envbuild.cli.console import Console, emit
from envbuild.pipeline import push_save_and_load


@click.command("push", short_help="Push a verified image and its evidence to a registry.")
@click.argument("name")
@click.argument("repository", metavar="REGISTRY/NAME")
@click.option(
    "--zstd",
    is_flag=True,
    help="Compress the layers with zstd instead of gzip: smaller, and faster to unpack. "
    "Layers of a base image stay as they are. Pulling then requires Docker 23 or containerd 1.5, or newer.",
)
@click.option(
    "--unsigned", is_flag=True, help="Push without a signature; `verify` refuses such an image, other tools do not."
)
@json_option
def command(name: str, repository: str, zstd: bool, unsigned: bool, as_json: bool) -> None:
    """Push a profile's verified image, then its evidence, then two tags: the id of its lock, and `verified`.

    Builds nothing. If a push was interrupted, a second run finishes it; an image that is already in the registry is not
    compressed again. Uses docker's credentials, and needs a signing key (signing_key in config.yaml) or --unsigned.
    Example: envbuild push h20 registry.example/h20
    """
    done = push_save_and_load.push(name, repository, Console(), zstd=zstd, unsigned=unsigned)
    if as_json:
        emit(done.document())
    else:
        click.echo(f"{done.repository}@{done.digest}")
