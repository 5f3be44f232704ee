from pathlib import Path

import click

from envbuild.attest import policy
from envbuild.attest.image_verifier import Verdict
from envbuild.cli import output_files
from envbuild.cli.console import Console, emit, json_option
from envbuild.pipeline import push_and_bundle
from envbuild.util.errors import printable
from envbuild.util.rejected_input_errors import Refusal


@click.group("bundle", short_help="A verified image with its evidence as one file, for closed sites.")
def command() -> None:
    """Carry a verified image to a site that has no registry in common with this one.

    Example: envbuild bundle export h20 -o h20.tar
    """


@command.command("export", short_help="Write the file.")
@click.argument("name")
@click.option(
    "-o", "--output", "file", required=True, type=output_files.FILE, metavar="FILE", help="The file to write."
)
@click.option("--unsigned", is_flag=True, help="Export without a signature; `bundle import` refuses such a file.")
@json_option
def export(name: str, file: Path, unsigned: bool, as_json: bool) -> None:
    """Write an OCI layout with a profile's verified image, its evidence, the public key and the lock.

    A signing key is needed (signing_key in config.yaml), or --unsigned.
    Example: envbuild bundle export h20 -o h20.tar
    """
    output_files.prepare(file, text=False)
    done = push_and_bundle.export_bundle(name, file, Console(), unsigned=unsigned)
    if as_json:
        emit(done.document())
    else:
        click.echo(f"{file} {done.digest}")


@command.command("import", short_help="Verify the file, then load its image.")
@click.argument("file", type=output_files.FILE)
@click.option(
    "--key",
    type=output_files.FILE,
    metavar="PUB",
    help="The public key that must have signed it, not the bundle's own.",
)
@click.option(
    "--policy", "policy_file", type=output_files.FILE, metavar="FILE", help="What is asked for, as for verify."
)
@json_option
def bring(file: Path, key: Path | None, policy_file: Path | None, as_json: bool) -> None:
    """Check a bundle's evidence and every byte of it, then load its image into the engine; exit 5 loads nothing.

    Example: envbuild bundle import h20.tar --key team.pub
    """
    try:
        verdict, tag = push_and_bundle.import_bundle(file, policy.read(policy_file, {}, key), Console())
    except Refusal as refusal:
        Verdict(str(file), reasons=[refusal.reason]).require()
        raise
    if as_json:
        emit({**verdict.document(), "tag": tag})
    else:
        click.echo(f"{tag} {verdict.image.id if verdict.image else ''}")
        click.echo(printable(verdict.summary), err=True)
