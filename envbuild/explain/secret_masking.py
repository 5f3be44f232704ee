"""Masks text that looks like a secret in lines of a log before they are printed. Pure."""

from __future__ import annotations

import re

WIDTH = 200
"""Maximum number of characters of a log line that are printed."""
_SECRET = re.compile(
    r"(?i)((?:[\w-]{0,40}(?:token|passw(?:or)?d|passphrase|secret|api_?key|credential)[\w-]{0,20})['\"]?\s{0,3}[=:]\s{0,3}['\"]?"
    r"|--[\w-]{0,40}(?:token|password|passphrase|secret|key)\s{1,3}|\b(?:bearer|basic) )[^\s'\",;]+"
    r"|(://)[^/\s@]{1,256}(?=@)"
    r"|\b(?:hf_|gh[opsu]_|github_pat_|glpat-|xox[bp]-|sk-|nvapi-)[\w-]{16,}|\bAKIA[A-Z0-9]{16}\b"
)


def safe_line(text: str) -> str:
    """Returns a line of a log in the form in which it may be printed: shortened, and with secrets masked."""
    hidden = _SECRET.sub(lambda match: f"{match[1] or match[2] or ''}***", text.strip())
    return hidden if len(hidden) <= WIDTH else hidden[: WIDTH - 3] + "..."
