"""Reads torch's pins from the wheel metadata of the configured index, and shows where they differ from the facts.

Example: .venv/bin/python scripts/torch_pins.py --release 2.7.1
"""

from __future__ import annotations

import argparse
import sys

from envbuild.facts import database
from envbuild.fetch import torch_pin_comparison
from envbuild.util.errors import EnvbuildError


def main() -> int:
    """Return the exit code: 0 also if there are differences."""
    known = database.torch_releases()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--release", action="append", choices=known, help="only this release; may be repeated")
    releases = parser.parse_args().release or list(known)
    found = 0
    for name in releases:
        try:
            differences = torch_pin_comparison.pin_differences(known[name], lambda text: print(text, file=sys.stderr))
        except EnvbuildError as error:
            print(f"error: {error.message}", file=sys.stderr)
            return error.code
        for item in differences:
            print(f"torch {item.release}: {item.distribution}: facts {item.facts or '-'}, index {item.index or '-'}")
        found += len(differences)
    print(f"{len(releases)} releases read, {found} differences")
    return 0


if __name__ == "__main__":
    sys.exit(main())
