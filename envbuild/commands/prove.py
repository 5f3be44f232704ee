import click

from envbuild.commands.console import Console, emit, gpus_option, json_option, profile_argument


@click.command("prove", short_help="Self-test, evidence and the tag, for a built image.")
@profile_argument("name")
@click.option("--image", "reference", metavar="REF", help="Which image, if not the one of the current lock.")
@gpus_option
@json_option
def command(name: str, reference: str | None, gpus: tuple[str, ...], as_json: bool) -> None:
    """Run the self-test in an image that envbuild built from the profile's lock, write evidence, move the tag.

    Example: envbuild prove cpu
    """
    from envbuild import pipeline  # not for --help

    made = pipeline.prove(name, reference, Console(), gpus)
    if as_json:
        emit(made.document())
    elif made.image:
        click.echo(f"{made.status} {made.image.id}")
