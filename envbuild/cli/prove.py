import click

from envbuild.cli.console import Console, emit, gpus_option, json_option, on_options, profile_argument


@click.command("prove", short_help="Self-test, evidence and the tag, for a built image.")
@profile_argument("name")
@click.option("--image", "reference", metavar="REF", help="Which image, if not the one of the current lock.")
@gpus_option
@on_options
@json_option
def command(
    name: str,
    reference: str | None,
    gpus: tuple[str, ...],
    on: str | None,
    resume: str | None,
    gpu: str | None,
    nodes: int,
    dry_run: bool,
    as_json: bool,
    given: dict[str, dict[str, str]] | None = None,
) -> None:
    """Run the self-test in an image that envbuild built from the profile's lock, write evidence, move the tag.

    Example: envbuild prove cpu; envbuild prove h20 --on slurm
    """
    from envbuild.pipeline import workflows  # not for --help
    from envbuild.pipeline.model import On
    from envbuild.testrun.selftest_job import RunRequest

    where = On(on, given or {}, resume, gpu, nodes)
    if dry_run:
        script = workflows.cluster_script(name, reference, Console(), where, RunRequest(gpus=gpus), brief=not as_json)
        emit({"script": script}) if as_json else click.echo(script, nl=False)
        return
    made = workflows.prove(name, reference, Console(), gpus, where)
    if as_json:
        emit(made.document())
    elif made.image:
        click.echo(f"{made.status} {made.image.id}")
