"""Writes the output files that options name; `-` is stdout. Commands call `prepare` before their work, to check that
the files can be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import UsageError
from envbuild.util.yaml_and_project_paths import display

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)
STDOUT = Path("-")


def output_option(default: str) -> Callable[[F], F]:
    """Add the option `-o`, `--output` as the parameter `file`, which is None if the option is not given. `default`: the
    default file, for the help."""
    return click.option("-o", "--output", "file", type=FILE, metavar="FILE", help=f"-: stdout. Default: {default}.")


def prepare(*files: Path | None, as_json: bool = False, text: bool = True) -> None:
    """Create the missing folders of output files, and report them on stderr. A file that is None is not written.

    Raises UsageError if stdout is chosen although the output is not `text`, or for more than one document. Raises
    OSError if a folder cannot be created or written to.
    """
    named = [file for file in files if file is not None]
    if STDOUT in named and not text:
        raise UsageError("the output is binary: pass a file instead of -")
    if named.count(STDOUT) + as_json > 1:
        raise UsageError("more than one document for stdout: use - only once, and without --json")
    for folder in dict.fromkeys(file.parent for file in named):
        if not folder.is_dir():
            try:
                folder.mkdir(parents=True)
            except FileExistsError as error:
                raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder)) from error
            click.echo(f"made folder {display(folder)}", err=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "cannot be written to", str(folder))


def write(file: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, or write to stdout."""
    if file == STDOUT:
        click.echo(content if isinstance(content, str) else content.decode(), nl=False)
    else:
        write_atomically(file, content)
