from pathlib import Path

import click

from envbuild.commands.console import (
    Console,
    emit,
    gpus_option,
    json_option,
    pin_option,
    profile_argument,
    requirements_option,
)
from envbuild.errors import NotProved


@click.command("make", short_help="From a profile to a verified image.")
@profile_argument("name")
@click.option("--locked", is_flag=True, help="Refuse a missing or stale lock instead of making it again (exit 8).")
@requirements_option
@pin_option
@click.option("--write", is_flag=True, help="With --pin: change the profile's lock and Dockerfile for good.")
@click.option("--no-cache", is_flag=True, help="Build every layer again.")
@click.option("--allow-unproved", is_flag=True, help="Exit 0 where the image is built and no card here can prove it.")
@gpus_option
@json_option
def command(
    name: str,
    requirements: Path | None,
    locked: bool,
    pins: dict[str, str],
    write: bool,
    no_cache: bool,
    allow_unproved: bool,
    gpus: tuple[str, ...],
    as_json: bool,
) -> None:
    """From a profile to a verified image: lock, render, build, self-test, evidence, tag.

    NAME is a profile's name or a path to a YAML file. Example: envbuild make cpu
    """
    from envbuild import pipeline  # not for --help
    from envbuild.making import Options
    from envbuild.proof.job import Asked

    try:
        made = pipeline.make(
            name,
            Options(
                locked=locked,
                no_cache=no_cache,
                pins=pins,
                write=write,
                requirements=requirements,
                asked=Asked(gpus=gpus),
            ),
            Console(),
        )
    except NotProved as unproved:
        if not allow_unproved:
            raise
        if as_json:
            emit(unproved.partial)
        else:
            click.echo(f"{unproved.message}\n  {unproved.hint}", err=True)
            click.echo(f"built {unproved.partial['image']['id']}")
        return
    if as_json:
        emit(made.document())
    elif made.image:
        click.echo(f"{made.status} {made.image.id}")
