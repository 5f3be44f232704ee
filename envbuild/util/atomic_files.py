"""Atomic file writes: completely or not at all. A project's file is not written through a link out of the project."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from envbuild.util import temporary_files
from envbuild.util.errors import FileError
from envbuild.util.yaml_and_project_paths import inside

_LOG = logging.getLogger(__name__)


def holds_text(file: Path, text: str) -> bool:
    """Whether the file exists and has exactly this content."""
    return file.is_file() and file.read_bytes() == text.encode()


def write_within(project: Path, file: Path, content: str | bytes) -> None:
    """Write a file of a project. Raises FileError if a link leads out of the project: the project's author must not
    choose which other file is written."""
    try:
        inside(str(file.absolute()), file.parent, project)
    except ValueError as error:
        raise FileError(f"{error}: it is not written", hint="remove the link") from None
    write_atomically(file, content)


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a temporary file in the same folder, flush it to disk, then rename it: a reader sees the old or the new
    content, never a part.

    A path that is not a regular file, such as /dev/stdout, is written directly. A link stays a link, and an existing
    file keeps its permissions.
    """
    raw = content if isinstance(content, bytes) else content.encode()
    if file.exists() and not file.is_file():
        file.write_bytes(raw)
        return
    file = file.resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    with temporary_files.file(file.parent) as (stream, made):
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
        made.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o644)
        made.replace(file)
    _LOG.info("wrote %s, %d bytes", file, len(raw))
