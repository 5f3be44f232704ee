"""Replaces messages of the C library, the loader and the shell in other languages with the English messages, and adds
the name of the signal to exit statuses. Pure.

"浮点数例外" becomes "Floating point exception", and "Exit Code:    136" is followed by "[ended by SIGFPE]". So the
patterns for causes need only the English form of these messages, and the names of signals.
"""

from __future__ import annotations

import re
import signal
from functools import cache

from envbuild.explain import required_texts
from envbuild.facts import log_signatures
from envbuild.facts.fact_field_types import SearchPattern

_SIGNALS: dict[int, str] = {
    number: f"SIG{name}"
    for name, number in (
        ("ILL", signal.SIGILL), ("ABRT", signal.SIGABRT), ("BUS", signal.SIGBUS),
        ("FPE", signal.SIGFPE), ("KILL", signal.SIGKILL), ("SEGV", signal.SIGSEGV),
    )
}  # fmt: skip
_STATUS = 128
"""If a signal ended a program, a shell reports this number plus the signal's number."""
_BETWEEN = r"['\"]?[ \t]{0,12}(?:[:=(]|is|was|of|with)?[ \t'\"(]{0,12}"
_EXITS = tuple(
    re.compile(pattern, re.IGNORECASE | re.ASCII)
    for pattern in (
        rf"(?:exit|return|error|termination)(?:ed|ing)?[ _-]?(?:with )?(?:exit[ _-]?)?(?:code|status|value){_BETWEEN}"
        r"(?P<status>-?\d{1,3})(?!\d|[.:]\d)",
        r"\bexited(?: with)?(?: an?)?(?: code| status| error)?[ :=(]{1,4}(?P<status>-?\d{1,3})\b(?![.:]\d)",
        r"\bexitcode[ :=]{1,4}(?P<code>\d{1,3}):(?P<signal>\d{1,2})\b",
        r"\bnon-?zero (?:exit )?code[ :=]{1,3}(?P<status>-?\d{1,3})\b(?![.:]\d)",
        r"\b(?:rc|ret(?:urn)?(?:[ _-]?(?:code|value|val))?|with status)[ :=]{1,3}(?P<status>-\d{1,2}|13\d)\b(?![.:]\d)",
        r"\bexit[ :]{1,3}(?P<status>13[245679])\b(?![.:]\d)",
        r"\*{1,3} \[[^\]]{1,120}\] error (?P<status>\d{1,3})\b",
        r"\bcode=(?:killed|dumped), ?status=(?P<signal>\d{1,2})\b",
        r"\bfailed {1,40}(?P<code>\d{1,3}):(?P<signal>\d{1,2})\b",
        r"\b(?:killed|terminated|interrupted|exited|ended|died|caught|got|received|fatal|term(?:ination)?)"
        r"(?: abnormally| unexpectedly)? (?:by |with |from |on |due to )?"
        r"signal[ :=#(]{1,4}(?P<signal>\d{1,2})\b",
    )
)
"""The exit status as a shell, Python, make, systemd or Slurm prints it. Slurm prints the status and the signal: 0:8."""


def patterns() -> tuple[SearchPattern, ...]:
    """Returns patterns. Every line that `rewritten` changes matches at least one of them."""
    return (*_EXITS, *(form for row in log_signatures.system_messages() for form in row.forms))


def rewritten(text: str) -> str:
    """Replaces localized messages in a line with the English messages, and adds the signal after an exit status."""
    lower = text.lower()
    # a form with several of its texts in the line is tried once
    for english, form in dict.fromkeys([form for needed, form in _forms() if needed in lower]):
        text = form.sub(english, text)
    for pattern in _EXITS:
        text = pattern.sub(_with_signal, text)
    return text


@cache
def _forms() -> tuple[tuple[str, tuple[str, SearchPattern]], ...]:
    """Returns (required text, (English message, pattern)) for each required text of each pattern. Every match of a
    pattern contains at least one of the pattern's required texts."""
    return tuple(
        (needed.decode(), (row.english, form))
        for row in log_signatures.system_messages()
        for form in row.forms
        for needed in required_texts.required_texts(form) or (b"",)
    )


def _with_signal(match: re.Match[str]) -> str:
    found = match.groupdict()
    number = int(found.get("signal") or 0) or _number(int(found.get("status") or found.get("code") or 0))
    return f"{match[0]} [ended by {_SIGNALS[number]}]" if number in _SIGNALS else match[0]


def _number(status: int) -> int:
    """Returns the signal number in an exit status. Python negates the signal number; a shell adds 128 to the number."""
    return -status if status < 0 else status - _STATUS
