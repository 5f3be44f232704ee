"""operations: what models call besides the operations that have probes of their own, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.selftest.cases import Case, check
from envbuild.selftest.context import Context
from envbuild.selftest.probes import exact_cases, rounded_cases


def operations(context: Context) -> None:
    """operations: addmm, embedding, softmax, cross-entropy, gelu, cumsum, casts, copies and extremes are right."""
    for case in cases(rounded_sums=context.on_cpu):
        check(context, case)


def cases(rounded_sums: bool) -> Iterator[Case]:
    """Every case, on the host; `rounded_sums` as rounded_cases.Rounding has it."""
    yield from exact_cases.cases()
    yield from rounded_cases.cases(rounded_sums)
