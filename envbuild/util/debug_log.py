"""What -v, -vv and ENVBUILD_LOG show: each process started, request made, file written and step taken.

Modules log to `logging.getLogger(__name__)`: INFO for an action, DEBUG for what it gave. Secrets are masked in every
line, wherever it goes.
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

FILE = "ENVBUILD_LOG"  # a file to add everything to, whatever -v says
_ROOT = logging.getLogger("envbuild")
_SECRET = re.compile(r"passw|passphrase|token|secret|credential|_key$|apikey", re.IGNORECASE)
_LEAST = 6  # characters; a shorter value would be masked in words that only look like it
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_MOST = 4000  # characters of a line


def masked(text: str) -> str:
    """The text without passwords in addresses, HTTP credentials, and values of variables that are named as secrets."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _LEAST:
            text = text.replace(value, "***")
    return _AUTHORIZATION.sub(r"\1 ***", url_redaction.struck(text))


class _Masked(logging.Formatter):
    """`dated`: with date and process, for a file that several runs write to; otherwise seconds since the start."""

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


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Writes to what stderr is when a line comes: while a table is shown in a terminal, that is another stream."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(verbosity: int) -> None:
    """Show actions on stderr (1), and what they gave too (2 or more); the last call counts."""
    for before in [handler for handler in _ROOT.handlers if isinstance(handler, _Stderr)]:
        _ROOT.removeHandler(before)
    handler = _Stderr()
    handler.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
    _add(handler, dated=False)


def log_to_file() -> None:
    """Add everything to the file that ENVBUILD_LOG names, if it does. Raises FileError where that cannot be written."""
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
    """The exception that is being handled, with its traceback."""
    return masked(traceback.format_exc().rstrip())
