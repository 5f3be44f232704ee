"""Writes files whole or not at all, and only where their folder's owner means them to be."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from envbuild.util import temporary_files
from envbuild.util.errors import FileError
from envbuild.util.yaml_document import inside

_LOG = logging.getLogger(__name__)


def holds_text(file: Path, text: str) -> bool:
    """Whether a file is there with exactly this content."""
    return file.is_file() and file.read_bytes() == text.encode()


def write_within(project: Path, file: Path, content: str | bytes) -> None:
    """Write a file of a project. Raises FileError where a link leads out of the project: its author may not choose
    which file is written."""
    try:
        inside(str(file.absolute()), file.parent, project)
    except ValueError as error:
        raise FileError(f"{error}: it is not written", hint="remove the link") from None
    write_atomically(file, content)


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write beside, flush to disk, then rename: a reader sees the old content or the new, never half.

    What is no file, as /dev/stdout, is written to; a link stays one, and a file keeps its permissions.
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
