"""Values of options that the campaigns and benchmarks share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """At least one, for argparse: of none there is no result."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return found
