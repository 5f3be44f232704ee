from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.command_options import (
    accept_old_option,
    builder_option,
    json_option,
    profile_argument,
    requirements_option,
    torch_index_option,
)
from envbuild.cli.console import listener
from envbuild.cli.multi_profile_loop import for_each

if TYPE_CHECKING:
    from envbuild.pipeline.model import MakeDocument


@click.command("build", short_help="Build the image only, without a self-test.")
@profile_argument("names", nargs=-1, required=True)
@click.option("--locked", is_flag=True, help="Refuse a missing or stale lock instead of writing a new one (exit 8).")
@click.option("--no-cache", is_flag=True, help="Make every layer again, even if it is cached.")
@requirements_option
@builder_option
@accept_old_option
@torch_index_option
@json_option
def command(
    names: tuple[str, ...],
    locked: bool,
    no_cache: bool,
    requirements: Path | None,
    builder: str | None,
    accept_old: tuple[str, ...],
    as_json: bool,
) -> None:
    """Build the image of each profile, and tag it with the id of its lock. Run no self-test, and write no evidence.

    If no engine can be used, only the digests of the layers and of the image are computed and shown (exit 0): nothing
    is loaded or audited.

    To test the image afterwards: envbuild test NAME --record.

    Example: envbuild build cpu
    """
    from envbuild.pipeline import make_build_and_test  # not for --help
    from envbuild.pipeline.model import Options

    options = Options(
        locked=locked, no_cache=no_cache, requirements=requirements, builder=builder, accept_old=accept_old
    )

    shown = listener()

    def build(name: str) -> MakeDocument:
        result = make_build_and_test.build_only(name, options, shown)
        if result.image and not as_json:
            click.echo(f"{result.state} {result.image.id}")
        return result.document()

    for_each(names, build, as_json)
