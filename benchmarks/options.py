"""What the command lines of the campaigns and benchmarks share: values of options, and how they end."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def positive(text: str) -> int:
    """At least one, for argparse: of none there is no result."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return found


class Terminated(KeyboardInterrupt):
    """SIGTERM. Who catches exceptions and exits lets it pass, as Ctrl-C; what is under way is cleaned up."""


def program(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` to its end. Ctrl-C and SIGTERM end it with a line, and with exit code 130 or 143."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(main())
    except KeyboardInterrupt as error:
        by = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        print(f"interrupted by {by.name}", file=sys.stderr, flush=True)
        sys.exit(128 + by)


def _terminate(*_: object) -> None:
    raise Terminated
