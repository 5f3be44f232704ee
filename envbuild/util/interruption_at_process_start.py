"""Delays interruptions while a program is being started, so that they are not lost.

Python ignores exceptions in the hooks that it runs around a fork, for example those of `logging`. If a signal handler
raises an exception at that moment, that exception is ignored too.
"""

from __future__ import annotations

import threading


class _State:
    """`starting`: whether the main thread, in which signal handlers run, is starting a program. `pending`: the delayed
    exception."""

    starting = False
    pending: type[BaseException] | None = None


def interrupt(error: type[BaseException]) -> None:
    """Raise `error` at once, or later in `let_go` if a program is being started. Signal handlers call this function."""
    if not _State.starting:
        raise error
    _State.pending = error


def hold_back() -> None:
    """Delay interruptions from now on. Call this before starting a program."""
    _State.starting = threading.current_thread() is threading.main_thread()


def let_go() -> None:
    """Stop delaying, and raise a delayed interruption. Call this after the program was started or failed to start."""
    if threading.current_thread() is threading.main_thread():
        error, _State.starting, _State.pending = _State.pending, False, None
        if error:
            raise error
