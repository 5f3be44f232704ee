"""The debug log of -v, -vv and ENVBUILD_LOG: started processes, HTTP requests, written files, and steps.

Modules log to `logging.getLogger(__name__)`. Level INFO: each action, and how it ended. Level DEBUG: the variables and
the output of a started process. Secrets are masked in every line.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from pathlib import Path

from envbuild.util import url_redaction
from envbuild.util.errors import FileError, printable

FILE = "ENVBUILD_LOG"  # this variable names a file to which every log line is appended, with or without -v
_ROOT = logging.getLogger("envbuild")
_SECRET = re.compile(r"passw|passphrase|token|secret|credential|_key$|apikey", re.IGNORECASE)
_LEAST = 6  # characters: shorter values are not masked, because that would also change unrelated words
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_MOST = 4000  # characters per line


def masked(text: str) -> str:
    """Mask credentials in URLs, HTTP credentials, and the values of environment variables whose names suggest a
    secret."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _LEAST:
            text = text.replace(value, "***")
    return _AUTHORIZATION.sub(r"\1 ***", url_redaction.struck(text))


class _Masked(logging.Formatter):
    """Formats log lines with masked secrets. `dated`: begin with the date and the process id, for a file to which
    several runs write; otherwise with the seconds since the start."""

    def __init__(self, dated: bool) -> None:
        super().__init__()
        self._dated = dated

    def format(self, record: logging.LogRecord) -> str:
        text = printable(masked(record.getMessage()))
        if len(text) > _MOST:
            text = f"{text[:_MOST]} ... ({len(text)} characters)"
        if not self._dated:
            return f"  {record.relativeCreated / 1000:8.3f} s  {text}"
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return f"{when} {record.process} {record.levelname.lower()} {record.name} {text}"


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic only in the type stubs
    """Writes to the current value of sys.stderr, which is replaced while a table is shown in a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(verbosity: int) -> None:
    """Log to stderr: lines of level INFO if `verbosity` is 1, and those of level DEBUG too if it is larger. A second
    call replaces the first handler."""
    for before in [handler for handler in _ROOT.handlers if isinstance(handler, _Stderr)]:
        _ROOT.removeHandler(before)
    handler = _Stderr()
    handler.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
    _add(handler, dated=False)


def log_to_file() -> None:
    """Append every log line to the file that ENVBUILD_LOG names, if the variable is set. Raises FileError if the file
    cannot be written."""
    named = os.environ.get(FILE)
    if not named:
        return
    try:
        os.close(os.open(named, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        handler = logging.FileHandler(Path(named), encoding="utf-8")
    except OSError as error:
        raise FileError(f"{FILE}: {named} cannot be written: {error.strerror}") from None
    _add(handler, dated=True)


def _add(handler: logging.Handler, *, dated: bool) -> None:
    handler.setFormatter(_Masked(dated))
    _ROOT.addHandler(handler)
    _ROOT.setLevel(min(_ROOT.level or logging.CRITICAL, handler.level or logging.DEBUG))


def traceback_text() -> str:
    """The text of the exception being handled, with its traceback and with secrets masked."""
    return masked(traceback.format_exc().rstrip())
