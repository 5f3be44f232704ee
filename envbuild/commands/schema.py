import click

from envbuild.commands.console import emit, json_option
from envbuild.plan import profile


@click.command("schema", short_help="The JSON Schema of profiles.")
@json_option
def command(as_json: bool) -> None:
    """Print the JSON Schema of profiles, by which editors complete and check them.

    Example: envbuild schema > profiles/profile.schema.json
    """
    emit(profile.schema())
