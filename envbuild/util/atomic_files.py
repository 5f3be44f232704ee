"""Writes files atomically: a file is replaced completely or not at all. `write_within` also refuses links that lead out
of a project."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from envbuild.util import temporary_files
from envbuild.util.errors import FileError

_LOG = logging.getLogger(__name__)


def holds_text(file: Path, text: str) -> bool:
    """Whether the file exists and contains exactly this text."""
    return file.is_file() and file.read_bytes() == text.encode()


def write_within(project: Path, file: Path, content: str | bytes) -> None:
    """Write a file of a project. Raises FileError if a link leads out of the project, because a project's author must
    not be able to have files outside of the project overwritten."""
    from envbuild.util.yaml_and_project_paths import inside  # imports the YAML parser

    try:
        inside(str(file.absolute()), file.parent, project)
    except ValueError as error:
        raise FileError(f"not written: {error}", hint="remove the link") from None
    write_atomically(file, content)


def write_atomically(file: Path, content: str | bytes, *, flush: bool = True) -> None:
    """Write a temporary file in the same folder, flush it to disk, and rename it to `file`. A reader sees the old or
    the new content, never a part. Without `flush`, this may not hold after a power failure.

    A path that is not a regular file, such as /dev/stdout, is written directly. For a symbolic link, the target is
    replaced. An existing file keeps its permissions.
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
        if flush:
            os.fsync(stream.fileno())
        made.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o644)
        made.replace(file)
    _LOG.info("wrote %s, %d bytes", file, len(raw))
