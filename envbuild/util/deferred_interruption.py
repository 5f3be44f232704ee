"""Interruptions that are not lost while a program is started.

The hooks that Python runs around a fork (those of `logging`, say) ignore exceptions, and with them what a signal's
handler raises.
"""

from __future__ import annotations

import threading


class _State:
    """`starting`: the main thread, where handlers run, is starting a program. `pending`: raised meanwhile."""

    starting = False
    pending: type[BaseException] | None = None


def interrupt(error: type[BaseException]) -> None:
    """For a signal's handler: raise the error at once, or on `let_go` while a program is started."""
    if not _State.starting:
        raise error
    _State.pending = error


def hold_back() -> None:
    """Before a program is started."""
    _State.starting = threading.current_thread() is threading.main_thread()


def let_go() -> None:
    """After it was started, or could not be. Raises what was held back."""
    if threading.current_thread() is threading.main_thread():
        error, _State.starting, _State.pending = _State.pending, False, None
        if error:
            raise error
