import click

from envbuild.commands.console import emit, json_option, profile_argument
from envbuild.errors import OutOfDate
from envbuild.image import dockerfile
from envbuild.plan import lock, sources
from envbuild.plan.document import display
from envbuild.plan.store import holds_text, write_atomically


@click.command("render", short_help="Write the Dockerfile of a lock.")
@profile_argument("names", nargs=-1)
@click.option(
    "--check", is_flag=True, help="Write nothing; exit 8 if a committed Dockerfile is not what its lock gives."
)
@json_option
def command(names: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Write dockerfiles/NAME.Dockerfile from the lock of each profile; without a name, of all.

    Example: envbuild render --check
    """
    rows, drifted = [], []
    for name in names or sources.own_names():
        source = sources.load(name)
        text = dockerfile.render(lock.required(source), source.name)
        same = holds_text(source.dockerfile, text)
        if not same and check:
            drifted.append(f"{display(source.dockerfile)}{'' if source.dockerfile.exists() else ' (missing)'}")
        elif not same:
            write_atomically(source.dockerfile, text)
        rows.append({"profile": source.name, "file": display(source.dockerfile), "changed": not same})
    if drifted:
        raise OutOfDate(f"not what the lock gives: {', '.join(drifted)}", hint="run: envbuild render")
    if as_json:
        emit({"dockerfiles": rows})
        return
    for row in rows:
        click.echo(f"{row['file']}{'' if row['changed'] else ' (unchanged)'}")
