from pathlib import Path

import click

from envbuild.cli.console import (
    accept_old_option,
    builder_option,
    emit,
    json_option,
    listener,
    profile_argument,
    requirements_option,
    torch_index_option,
)


@click.command("build", short_help="Build the image, without proof.")
@profile_argument("name")
@click.option("--locked", is_flag=True, help="Refuse a missing or stale lock instead of making it again (exit 8).")
@click.option("--no-cache", is_flag=True, help="Build every layer again.")
@requirements_option
@builder_option
@accept_old_option
@torch_index_option
@json_option
def command(
    name: str,
    locked: bool,
    no_cache: bool,
    requirements: Path | None,
    builder: str | None,
    accept_old: tuple[str, ...],
    as_json: bool,
) -> None:
    """Build the image of a profile and tag it with its lock; no self-test, no evidence.

    Example: envbuild build cpu
    """
    from envbuild.pipeline import workflows  # not for --help
    from envbuild.pipeline.model import Options

    options = Options(
        locked=locked, no_cache=no_cache, requirements=requirements, builder=builder, accept_old=accept_old
    )
    made = workflows.build_only(name, options, listener())
    if as_json:
        emit(made.document())
    elif made.image:
        click.echo(f"built {made.image.id}")
