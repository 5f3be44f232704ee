"""Shared code of the campaigns' and benchmarks' command lines: parses option values, and ends the programs cleanly."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def positive(text: str) -> int:
    """Parse a number of at least 1, for argparse."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return found


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM. Like Ctrl-C, it is not caught as an ordinary error, so that running work is cleaned up."""


def program(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit. After Ctrl-C or SIGTERM, print one line and exit with code 130 or 143."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _again
    try:
        sys.exit(main())
    except KeyboardInterrupt as error:
        by = _signal(type(error))
        print(f"interrupted by {by.name}", file=sys.stderr, flush=True)
        sys.exit(128 + by)


def _terminate(*_: object) -> None:
    raise Terminated


def _signal(kind: type[BaseException]) -> signal.Signals:
    return signal.SIGTERM if issubclass(kind, Terminated) else signal.SIGINT


def _again(lost: sys.UnraisableHookArgs) -> None:
    """Send a signal again that arrived during garbage collection: there Python only prints the exception and continues.
    The signal is sent a little later, after the collection."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, os.kill, (os.getpid(), _signal(lost.exc_type))).start()
    else:
        sys.__unraisablehook__(lost)
