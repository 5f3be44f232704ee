from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.console import emit, json_option, profile_argument
from envbuild.util.errors import printable
from envbuild.util.yaml_document import display


@click.command("install", short_help="Make a virtual environment from a profile's lock.")
@profile_argument("name")
@click.argument("target", metavar="PATH", type=click.Path(path_type=Path, file_okay=False))
@json_option
def command(name: str, target: Path, as_json: bool) -> None:
    """Make a virtual environment of a profile's locked wheels, each checked by its hash. Needs no engine.

    Overrides hold against a later pip or uv install: the installed metadata require them, and pip reads the locked
    versions as constraints. Activation sets the profile's variables. Repeating the command changes only what differs.
    The host needs the lock's Python. Extensions that the profile compiles are left out.

    Example: envbuild install h20 .venv
    """
    from envbuild.lock import lock_file
    from envbuild.repair import lock_installer
    from envbuild.resolve import plan_resolver, profile_reader_and_overrides

    source = profile_reader_and_overrides.load(name)
    lock = lock_file.current(lock_file.read(source.known_lock), plan_resolver.resolve(source), source.lock_file)

    def say(text: str) -> None:
        click.echo(printable(f"  {text}"), err=True)

    done = lock_installer.install_lock(source.name, lock, source.profile.env, target, say)
    if as_json:
        emit(done)
        return
    for extension in done.left_out:
        say(f"{extension} is left out: it is compiled only in images")
    count = len(done.installed)
    click.echo(printable(f"{display(target)}: {f'{count} distributions installed' if count else 'up to date'}"))
    say(f"check it: envbuild audit --python {display(target)} --profile {source.known}")
