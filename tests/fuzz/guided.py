"""The same targets, led by coverage: `python tests/fuzz/guided.py TARGET [-runs=N, and whatever else libFuzzer takes]`.

Optional: needs atheris (`pip install -e '.[fuzz]'`). The bytes from atheris are used as hypothesis's choices, so that
the inputs have the same form as in the campaign. The run stops at the first fault.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import atheris

with atheris.instrument_imports(include=["envbuild"]):
    from fuzz.runner import around
    from fuzz.target import sandbox, tried
    from fuzz.targets import TARGETS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"name a target: {', '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]

    def each(value: Any) -> None:
        tried(target, value)

    made: Any = around(target, 1)(each)
    chance = random.Random(1)
    with sandbox() as folder:
        first = folder / "first"
        first.mkdir()
        for number in range(50):  # without seeds, libFuzzer begins with too few bytes for any choice
            (first / str(number)).write_bytes(chance.randbytes(2000))
        options = ["-max_len=8000", "-len_control=0", *sys.argv[1:], str(first)]
        atheris.Setup([sys.argv[0], *options], made.hypothesis.fuzz_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
