"""Files that a command writes because an option names them; `-` is stdout. Whether they can be written is checked
before the work begins."""

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
    """Add `-o` and `--output` as the parameter `file`, None if not given. `default`: where the document goes by
    default."""
    return click.option("-o", "--output", "file", type=FILE, metavar="FILE", help=f"-: stdout. Default: {default}.")


def prepare(*files: Path | None, as_json: bool = False, text: bool = True) -> None:
    """Create the folders of these files (None: not requested), and report that on stderr.

    Raises UsageError if stdout is chosen for output that is not `text`, or for more than one document; OSError if a
    folder cannot be created or written to.
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
    """Write the file completely or not at all; to stdout directly."""
    if file == STDOUT:
        click.echo(content if isinstance(content, str) else content.decode(), nl=False)
    else:
        write_atomically(file, content)
