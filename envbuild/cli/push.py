import click

from envbuild.cli.console import Console, emit, json_option
from envbuild.pipeline import push_and_bundle


@click.command("push", short_help="Push a verified image and its evidence to a registry.")
@click.argument("name")
@click.argument("repository", metavar="REGISTRY/NAME")
@click.option(
    "--zstd",
    is_flag=True,
    help="Layers packed with zstd, not gzip: smaller, and a fraction of the time to pack and unpack. "
    "Whoever pulls needs Docker 23 or containerd 1.5, or newer.",
)
@click.option("--unsigned", is_flag=True, help="Push without a signature; `verify` refuses such an image.")
@json_option
def command(name: str, repository: str, zstd: bool, unsigned: bool, as_json: bool) -> None:
    """Push a profile's verified image, then its evidence, then the tags: its lock's and `verified`.

    Nothing is built. Run again, it finishes what was interrupted; an image that is there stays as it is packed.
    Credentials are docker's. A signing key is needed (signing_key in config.yaml), or --unsigned.
    Example: envbuild push h20 registry.example/h20
    """
    done = push_and_bundle.push(name, repository, Console(), zstd=zstd, unsigned=unsigned)
    if as_json:
        emit(done.document())
    else:
        click.echo(f"{done.repository}@{done.digest}")
