from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.attest import policy
from envbuild.attest.image_verifier import Verdict, VerdictDocument
from envbuild.cli import output_files
from envbuild.cli.command_options import json_option
from envbuild.cli.console import Console, emit
from envbuild.pipeline import push_save_and_load
from envbuild.util.errors import printable
from envbuild.util.untrusted_input_errors import Refusal


@dataclass(frozen=True)
class LoadedDocument(VerdictDocument):
    """The document of `load`, which has all keys of the document of `verify`. `tag`: the tag of the image in the
    engine."""

    tag: str


@click.command("load", short_help="Check a saved image, then load it into the engine.")
@click.argument("file", type=output_files.FILE)
@click.option(
    "--key",
    type=output_files.FILE,
    metavar="PUB",
    help="The public key that must have signed the file; the key in the file is not trusted.",
)
@click.option(
    "--policy",
    "policy_file",
    type=output_files.FILE,
    metavar="FILE",
    help="Read the requirements from a file, as for verify.",
)
@json_option
def command(file: Path, key: Path | None, policy_file: Path | None, as_json: bool) -> None:
    """Check the evidence and every byte of a file that `envbuild save` wrote, then load its image into the engine. If a
    check fails, load nothing and exit with 5.

    Example: envbuild load h20.tar --key team.pub
    """
    try:
        verdict, tag = push_save_and_load.load_saved_image(file, policy.read(policy_file, {}, key), Console())
    except Refusal as refusal:
        Verdict(str(file), reasons=[refusal.reason]).require()
        raise
    if as_json:
        emit(LoadedDocument(**vars(verdict.document()), tag=tag))
    else:
        click.echo(f"{tag} {verdict.image.id if verdict.image else ''}")
        click.echo(printable(verdict.summary), err=True)
