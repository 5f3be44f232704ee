"""Delays interruptions while a program is being started, so that they are not lost.

Python ignores exceptions in hooks that it runs around a fork (those of `logging`, for example), including exceptions
raised by a signal handler at that moment.
"""

from __future__ import annotations

import threading


class _State:
    """`starting`: the main thread, where signal handlers run, is starting a program. `pending`: the delayed error."""

    starting = False
    pending: type[BaseException] | None = None


def interrupt(error: type[BaseException]) -> None:
    """Raise the error at once, or in `let_go` if a program is being started. Called by signal handlers."""
    if not _State.starting:
        raise error
    _State.pending = error


def hold_back() -> None:
    """Delay interruptions; call before starting a program."""
    _State.starting = threading.current_thread() is threading.main_thread()


def let_go() -> None:
    """Raise a delayed interruption; call after the program was started or failed to start."""
    if threading.current_thread() is threading.main_thread():
        error, _State.starting, _State.pending = _State.pending, False, None
        if error:
            raise error
