from pathlib import Path

import click

from envbuild.cli import output_files
from envbuild.cli.command_options import json_option, profile_argument
from envbuild.cli.console import Console, emit
from envbuild.pipeline import push_save_and_load


@click.command("save", short_help="Save a verified image to a file, for a site without internet.")
@profile_argument("name")
@click.option(
    "-o", "--output", "file", required=True, type=output_files.FILE, metavar="FILE", help="The file to write."
)
@click.option(
    "--unsigned",
    is_flag=True,
    help="Save without a signature; `envbuild load` refuses such a file, other tools do not.",
)
@json_option
def command(name: str, file: Path, unsigned: bool, as_json: bool) -> None:
    """Write one tar file, an OCI layout, with a profile's verified image, its evidence, the public key and the lock.

    Use it for a site without internet, or a site that cannot reach your registry; `envbuild load` checks and loads the
    file there. Needs a signing key (signing_key in config.yaml) or --unsigned, and no engine.

    Example: envbuild save h20 -o h20.tar
    """
    output_files.prepare(file, text=False)
    done = push_save_and_load.save_image(name, file, Console(), unsigned=unsigned)
    if as_json:
        emit(done.document())
    else:
        click.echo(f"{file} {done.digest}")
