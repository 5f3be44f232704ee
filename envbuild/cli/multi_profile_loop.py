"""Runs a command for several profiles, one after the other. If the command fails for one profile, it still runs for the
others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from envbuild.cli.console import emit
from envbuild.util import disk_space
from envbuild.util.errors import EnvbuildError, SomeFailed, printable, some
from envbuild.util.json_output_types import plain


def for_each(names: Sequence[str], work: Callable[[str], object], as_json: bool) -> None:
    """Call `work` once with each name. `work` returns the profile's JSON document, and itself prints output for people.

    With `as_json`, print the document; for several names, print an object with the list `profiles`. For one name,
    errors of `work` are raised. For several names, SomeFailed is raised with the most severe exit code.
    """
    names = list(dict.fromkeys(names))
    if len(names) == 1:
        document = work(names[0])
        if as_json:
            emit(document)
        return
    rows: list[object] = []
    failed: dict[str, int] = {}
    for name in names:
        try:
            rows.append(work(name))
        except (EnvbuildError, OSError) as raised:
            error = disk_space.system_fault(raised) if isinstance(raised, OSError) else raised
            failed[name] = error.code
            rows.append({"profile": name, **error.partial, "error": error.document()})
            if not as_json:
                click.echo(printable("\n".join(error.lines())), err=True)
    if failed:
        from envbuild.pipeline.multi_profile_make import worst_exit_code  # imports the engine's client

        text = f"{len(failed)} of {some(len(names), 'profile')} failed: {', '.join(failed)}"
        some_failed = SomeFailed(text, worst_exit_code(list(failed.values())))
        some_failed.partial = {"profiles": plain(rows)}
        raise some_failed
    if as_json:
        emit({"profiles": rows})
