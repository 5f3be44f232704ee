import click

from envbuild.attest import ci_job_renderer
from envbuild.cli.console import emit, json_option
from envbuild.evidence import profile_proofs
from envbuild.registry.oci_types import Reference
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util import settings
from envbuild.util.errors import UsageError


@click.command("ci", short_help="A CI job that verifies an image, then uses it by digest.")
@click.argument("system", type=click.Choice(ci_job_renderer.SYSTEMS))
@click.argument("name")
@click.option("--image", metavar="REGISTRY/NAME", help="Where it was pushed; default: registry.example/NAME.")
@click.option(
    "--install",
    metavar="SOURCE",
    help="What the job installs envbuild from: a commit (git+https://HOST/PATH@COMMIT) or a wheel with #sha256=HEX; "
    "default: ci_install in config.yaml.",
)
@json_option
def command(system: str, name: str, image: str | None, install: str | None, as_json: bool) -> None:
    """Print a job for a CI system: verify a profile's image by policy.yaml, then run in it by digest.

    Nothing is printed unless the job would install one commit or one file of envbuild.
    Example: envbuild ci gitlab h20 --image registry.example/h20 > .gitlab-ci.yml
    """
    source = profile_reader_and_overrides.load(name)
    reference = Reference.parse(image or f"registry.example/{source.name}")
    if reference.tag or reference.digest:
        raise UsageError(f"{image} has a tag or a digest", hint=f"name the repository: {reference.repository}")
    pinned = install or settings.setting("ci_install")
    text = ci_job_renderer.render(
        system, source.name, reference.repository, profile_proofs.models_to_prove(source.profile), pinned
    )
    if as_json:
        emit({"system": system, "profile": source.name, "text": text})
    else:
        click.echo(text, nl=False)
