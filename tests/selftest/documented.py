"""docs/cases.md: which cases the self-test samples, from the operations themselves.

python -m selftest.documented        in tests/; writes the page
"""

from __future__ import annotations

import importlib
import pkgutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from envbuild.selftest import probes
from envbuild.selftest.harness.job_document import LEVELS
from envbuild.selftest.numerics import pairwise_case_sampling
from envbuild.selftest.numerics.pairwise_case_sampling import Operation
from envbuild.selftest.numerics.torch_fault_exclusions import KNOWN_FAULTS, KnownFault

PAGE = Path(__file__).parents[2] / "docs" / "cases.md"
_MOST = 16  # number of values of a dimension that are listed
_HEAD = """# The cases that the self-test samples

Made by `python -m selftest.documented` in `tests/`; a test holds it to the operations. For the CPU; a GPU has more
backends and dtypes. A run takes the points that cover most pairs of values of two dimensions, by its seed. The columns
say how many cases a run has at each level, and how many of the possible pairs those cover with seed 1; full covers
nearly all. The fixed cases of other probes: [selftest.md](selftest.md). Not covered: the speed of single shapes, whole
models, and what has no probe there.
"""
_TERMS = """
## Terms

Layouts of a tensor in memory. Gaps contain NaN or large numbers, so that a kernel that reads them gives a wrong result.

- contiguous: without gaps, the last dimension innermost. expanded: a smaller tensor, repeated by strides of 0.
- rows apart, columns apart: a gap follows each row or each column. elements apart: every second element of a buffer.
- matrices apart, batch apart, images apart: a gap follows each matrix, element of the batch, or image.
- transposed, last two swapped, turned: the last two dimensions are exchanged in memory.
- batch inside: the first two dimensions are exchanged in memory. channels last: the channels are the innermost ones.
- heads inside: the heads of one position are next to each other, as in a projection that is split into heads.
- padded: rows apart, as a part of a larger tensor. packed: one of two tensors that a common projection gives.
- shifted, offset: the data begin one element after the start of the buffer; shifted by 8: eight elements.

Scores of attention:

- scattered: the keys that a query matches are spread over all keys.
- late: they are next to each other, for some queries at the end, where a kernel that reads keys block by block has to
  correct all earlier sums.
- flat: all keys match, so that the scores are nearly equal.
- near 100, near -100: every score is near this number, where an exponential leaves the range of float32.

Other dimensions:

- late (optimizer): the last parameter gets its first gradient one step after the others.
- past, queries past, keys past: this number is added to a size, so that it is not a multiple of a tile.
"""
_LEFT_OUT = """
## What is left out

torch is known to compute these results wrongly. The self-test does not compute them
(`envbuild/selftest/numerics/torch_fault_exclusions.py`);
`tests/selftest/numerics/test_torch_fault_exclusions.py` reproduces each in torch alone.
"""


def operations() -> Iterator[Operation]:
    """Return every operation whose cases are sampled."""
    modules = pkgutil.walk_packages(probes.__path__, f"{probes.__name__}.")
    for name in sorted((found.name for found in modules), key=lambda name: name.rpartition(".")[2]):
        yield from getattr(importlib.import_module(name), "OPERATIONS", ())


def page() -> str:
    rows = ["| operation | " + " | ".join(LEVELS) + " |", "|---" * (len(LEVELS) + 1) + "|"]
    sections = []
    for operation in operations():
        cells = []
        for level in LEVELS:
            count = operation.counts.get(level, 0)
            share = f" ({_covered(operation, count):.0%})" if count and level != "full" else ""
            cells.append(f"{count or '-'}{share}")
        rows.append(f"| {operation.name} | {' | '.join(cells)} |")
        values = [
            f"- {name}: {_listed(list(dict.fromkeys(map(_written, values))))}"
            for name, values in operation.space.items()
        ]
        sections += ["", f"## {operation.name}", "", *values]
    return "\n".join([_HEAD, *rows, _TERMS.rstrip(), _LEFT_OUT, *map(_left_out, KNOWN_FAULTS), *sections]) + "\n"


def _left_out(fault: KnownFault) -> str:
    conditions = [f"{name} {_listed(list(map(_written, values)))}" for name, values in fault.where.items()]
    conditions += [f"{name} not {_listed(list(map(_written, values)))}" for name, values in fault.unless.items()]
    results = ", ".join(fault.results)
    line = (
        f"- {fault.operation}, {results}, device {fault.device}: {fault.name} ({'; '.join(conditions)}). "
        f"Known since torch {fault.torch}: {fault.reason}."
    )
    return textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _covered(operation: Operation, count: int) -> float:
    taken = pairwise_case_sampling.sample(operation, count, seed=1)
    return taken.covered / taken.of


def _listed(values: list[str]) -> str:
    shown = ", ".join(values[:_MOST])
    return f"{shown} and {len(values) - _MOST} more" if len(values) > _MOST else shown


def _written(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_written, value)) + ")"
    return str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
