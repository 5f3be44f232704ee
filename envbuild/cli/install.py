from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.command_options import json_option, profile_argument
from envbuild.cli.console import emit
from envbuild.util.errors import UsageError, display, printable

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command("install", short_help="Make a virtual environment from a profile's lock.")
@profile_argument("name")
@click.argument("path", metavar="[PATH]", required=False, type=_FOLDER)
@click.option("-o", "--output", type=_FOLDER, metavar="PATH", help="The folder of the environment, instead of PATH.")
@json_option
def command(name: str, path: Path | None, output: Path | None, as_json: bool) -> None:
    """Make a virtual environment of a profile's locked wheels, each checked by its hash. Needs no engine.

    If profile and torch require different versions of a library, torch's installed metadata is changed to require the
    profile's version. So a later pip or uv install keeps this version. pip also uses the locked versions as
    constraints. Activating the environment sets the profile's variables. Repeating the command changes only what
    differs from the lock. The host needs the lock's Python version. Extensions that the profile compiles are left out.

    The wheels come from pip's indexes and find-links folders. The last example uses a folder of wheels and no network.

    Example: envbuild install h20 .venv
    Example: PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR envbuild install NAME venv
    """
    target = output or path
    if target is None or (output and path):
        raise UsageError("name one folder for the environment", hint=f"envbuild install {name} .venv")
    from envbuild.repair import install_plan, lock_installer

    plan = install_plan.cached(name)
    if plan is None:
        from envbuild.repair import install_planner  # imports the resolver, which a cached plan does not need

        plan = install_planner.plan_and_cache(name)

    def say(text: str) -> None:
        click.echo(printable(f"  {text}"), err=True)

    done = lock_installer.install_lock(plan, target, say)
    if as_json:
        emit(done)
        return
    for extension in done.left_out:
        say(f"{extension} is left out: it is compiled only in images")
    count = len(done.installed)
    click.echo(printable(f"{display(target)}: {f'{count} distributions installed' if count else 'up to date'}"))
    say(f"check it: envbuild audit --python {display(target)} --profile {plan.known}")
