"""Files that a command writes because an option names them; `-` is stdout. Whether they can be written is seen before
the work begins, not after it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import UsageError
from envbuild.util.yaml_document import display

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)
STDOUT = Path("-")


def output_option(default: str) -> Callable[[F], F]:
    """`-o` and `--output`: the parameter `file`, None if it is not given. `default`: where the document goes then."""
    return click.option("-o", "--output", "file", type=FILE, metavar="FILE", help=f"-: stdout. Default: {default}.")


def prepare(*files: Path | None, as_json: bool = False, text: bool = True) -> None:
    """Make the folders of these files (None: not asked for), and say so on stderr.

    Raises UsageError where stdout is named for what is not `text`, or for more than one document; OSError where a
    folder cannot be made or written to.
    """
    named = [file for file in files if file is not None]
    if STDOUT in named and not text:
        raise UsageError("the output is binary: name a file instead of -")
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
    """Whole or not at all; to stdout as it is."""
    if file == STDOUT:
        click.echo(content if isinstance(content, str) else content.decode(), nl=False)
    else:
        write_atomically(file, content)
