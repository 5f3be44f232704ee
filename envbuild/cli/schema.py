import click

from envbuild.cli.console import emit, json_option
from envbuild.profile import model as profile_model


@click.command("schema", short_help="The JSON Schema of profiles.")
@json_option
def command(as_json: bool) -> None:
    """Print the JSON Schema of profiles, by which editors complete and check them.

    Example: envbuild schema > profiles/profile.schema.json
    """
    emit(profile_model.schema())
