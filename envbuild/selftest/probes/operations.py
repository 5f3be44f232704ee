"""operations: what models call besides the operations that have probes of their own, forward and backward."""

from __future__ import annotations

import itertools

from envbuild.selftest.cases import check
from envbuild.selftest.context import Context
from envbuild.selftest.probes import exact_cases, rounded_cases


def operations(context: Context) -> None:
    """operations: addmm, embedding, softmax, cross-entropy, gelu, cumsum, casts, copies and extremes are right."""
    for case in itertools.chain(exact_cases.cases(), rounded_cases.cases(rounded_sums=context.on_cpu)):
        check(context, case)
