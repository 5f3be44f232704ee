from collections.abc import Iterable
from shlex import quote

import click

from envbuild.cli.console import emit, json_option, profile_argument
from envbuild.image import dockerfile_renderer
from envbuild.lock import lock_file
from envbuild.profile import profile_name_lookup
from envbuild.profile.loaded_profile import Source
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util.atomic_files import holds_text, write_within
from envbuild.util.errors import Fault, LockError, OutOfDate, ProfileError
from envbuild.util.yaml_document import display


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
    asked = [quote(name) for name in names]
    for source, text in _rendered(names or profile_name_lookup.own_names()):
        same = holds_text(source.dockerfile, text)
        if not same and check:
            drifted.append(f"{display(source.dockerfile)}{'' if source.dockerfile.exists() else ' (missing)'}")
        elif not same:
            write_within(source.project, source.dockerfile, text)
        rows.append({"profile": source.name, "file": display(source.dockerfile), "changed": not same})
    if drifted:
        raise OutOfDate(
            f"not what the lock gives: {', '.join(drifted)}", hint=" ".join(["run: envbuild render", *asked])
        )
    if as_json:
        emit({"dockerfiles": rows})
        return
    for row in rows:
        click.echo(f"{row['file']}{'' if row['changed'] else ' (unchanged)'}")


def _rendered(names: Iterable[str]) -> list[tuple[Source, str]]:
    """Each profile with the Dockerfile of its lock. Raises what is wrong with any of them, all at once."""
    found, wrong = [], []
    for name in names:
        try:
            source = profile_reader_and_overrides.load(name)
            found.append((source, dockerfile_renderer.render(lock_file.required_lock(source), source.name)))
        except (ProfileError, LockError, OutOfDate) as error:
            wrong.append(error)
    if len(wrong) > 1:
        first = next(
            (error for error in wrong if not isinstance(error, OutOfDate)), wrong[0]
        )  # a fault, if there is one
        faults = [fault for error in wrong for fault in error.faults or [Fault(error.message)]]
        hint = None if first.faults else first.hint
        raise type(first)(f"cannot be rendered: {len(wrong)} of {len(wrong) + len(found)}", hint=hint, faults=faults)
    if wrong:
        raise wrong[0]
    return found
