"""operations: operations of models that have no probe of their own, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import case_sampling
from envbuild.selftest.numerics.case_sampling import Operation
from envbuild.selftest.numerics.operation_case import Case, check
from envbuild.selftest.probes.operations import (
    arrangement_cases,
    block_reduction_cases,
    elementwise_and_copy_cases,
    embedding_cases,
    exact_fixed_cases,
    indexing_cases,
    loss_cases,
    pooling_and_resize_cases,
    pooling_padding_and_unfold_cases,
    reduction_and_sort_cases,
    rounded_fixed_cases,
    softmax_and_loss_cases,
)


def operations(context: Context) -> None:
    """operations: softmax, cross-entropy, activations, indexing, sums, sorting, pooling, casts and copies are right."""
    if context.at_least("standard"):
        for case in cases(rounded_sums=context.on_cpu):
            check(context, case)
    case_sampling.check(context, sampled_operations(rounded_sums=context.on_cpu))


def cases(rounded_sums: bool) -> Iterator[Case]:
    """Every fixed case, on the host; `rounded_sums` as in rounded_fixed_cases.Rounding."""
    yield from exact_fixed_cases.cases()
    yield from rounded_fixed_cases.cases(rounded_sums)


def sampled_operations(rounded_sums: bool) -> tuple[Operation, ...]:
    """Every operation whose cases are sampled."""
    return (
        *softmax_and_loss_cases.sampled_operations(rounded_sums),
        *elementwise_and_copy_cases.sampled_operations(rounded_sums),
        *reduction_and_sort_cases.sampled_operations(rounded_sums),
        *arrangement_cases.OPERATIONS,
        *block_reduction_cases.OPERATIONS,
        *embedding_cases.OPERATIONS,
        *indexing_cases.OPERATIONS,
        *loss_cases.OPERATIONS,
        *pooling_and_resize_cases.OPERATIONS,
        *pooling_padding_and_unfold_cases.OPERATIONS,
    )
