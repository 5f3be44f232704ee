"""Debug log for -v, -vv and ENVBUILD_LOG: processes started, requests made, files written, steps taken.

Modules log to `logging.getLogger(__name__)`: INFO for an action, DEBUG for its result. Secrets are masked in every line
and every destination.
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

FILE = "ENVBUILD_LOG"  # names a file that every log line is appended to, independent of -v
_ROOT = logging.getLogger("envbuild")
_SECRET = re.compile(r"passw|passphrase|token|secret|credential|_key$|apikey", re.IGNORECASE)
_LEAST = 6  # characters; masking a shorter value would also change unrelated words
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_MOST = 4000  # characters per line


def masked(text: str) -> str:
    """Mask passwords in URLs, HTTP credentials, and values of environment variables with names of secrets."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _LEAST:
            text = text.replace(value, "***")
    return _AUTHORIZATION.sub(r"\1 ***", url_redaction.struck(text))


class _Masked(logging.Formatter):
    """Formats masked log lines. `dated`: prefix with date and process id, for a file that several runs write to;
    otherwise with seconds since the start."""

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
    """Writes to the current sys.stderr: it is replaced while a table is shown in a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(verbosity: int) -> None:
    """Show actions on stderr (1), and their results too (2 or more). A later call replaces an earlier one."""
    for before in [handler for handler in _ROOT.handlers if isinstance(handler, _Stderr)]:
        _ROOT.removeHandler(before)
    handler = _Stderr()
    handler.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
    _add(handler, dated=False)


def log_to_file() -> None:
    """Append every log line to the file named by ENVBUILD_LOG, if set. Raises FileError if the file cannot be
    written."""
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
    """The exception being handled, with its traceback and masked secrets."""
    return masked(traceback.format_exc().rstrip())
