import click

from envbuild.cli.command_options import json_option
from envbuild.cli.console import Console, emit
from envbuild.pipeline import push_save_and_load
from envbuild.util.errors import UsageError


@click.command("push", short_help="Push a verified image and its evidence to a registry.")
@click.argument("name")
@click.argument("repository", metavar="REGISTRY/NAME")
@click.option(
    "--zstd",
    is_flag=True,
    help="Compress the layers with zstd instead of gzip: smaller, and faster to unpack. "
    "Layers of a base image stay as they are. Pulling then requires Docker 23 or containerd 1.5, or newer.",
)
@click.option("--unsigned", is_flag=True, help="Push without a signature; `verify` refuses it, other tools do not.")
@click.option(
    "--python",
    metavar="PATH",
    help="Publish the evidence about this interpreter or environment instead, without an image.",
)
@json_option
def command(name: str, repository: str, zstd: bool, unsigned: bool, python: str | None, as_json: bool) -> None:
    """Push a profile's verified image, then its evidence, then two tags: the id of its lock, and `verified`.

    Builds nothing. If a push was interrupted, a second run finishes it; an image that is already in the registry is not
    compressed again. Uses docker's credentials, and needs a signing key (signing_key in config.yaml) or --unsigned.
    With --python, nothing but the signed results of test NAME --python PATH --record is pushed, under the tags
    environment-LOCK and environment; verify REGISTRY/NAME --python PATH reads them on other machines.
    Example: envbuild push h20 registry.example/h20
    Example: envbuild push h20 registry.example/h20 --python .venv
    """
    if python and zstd:
        raise UsageError("--zstd compresses an image, and --python pushes none: give one of them")
    if python:
        done = push_save_and_load.push_environment(name, repository, python, Console(), unsigned=unsigned)
        if as_json:
            emit(done.document())
        else:
            click.echo(done.tags[0])
        return
    done = push_save_and_load.push(name, repository, Console(), zstd=zstd, unsigned=unsigned)
    if as_json:
        emit(done.document())
    else:
        click.echo(f"{done.repository}@{done.digest}")
