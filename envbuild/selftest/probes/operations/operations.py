"""operations: operations of models that have no probe of their own, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import pairwise_case_sampling
from envbuild.selftest.numerics.operation_case import Case, check
from envbuild.selftest.numerics.pairwise_case_sampling import Operation
from envbuild.selftest.probes.images import (
    image_interpolation_cases,
    image_pooling_and_resize_cases,
    pooling_padding_and_unfold_cases,
)
from envbuild.selftest.probes.operations import (
    broadcast_and_complex_cases,
    ctc_loss_cases,
    elementwise_and_copy_cases,
    embedding_and_indexing_cases,
    exact_fixed_cases,
    large_embedding_and_bag_cases,
    loss_cases,
    scatter_and_gather_cases,
    softmax_and_cross_entropy_sampled_cases,
    softmax_cross_entropy_and_gelu_fixed_cases,
    tensor_rearrangement_cases,
)
from envbuild.selftest.probes.reductions import (
    matrix_reduction_and_sort_cases,
    multi_dim_reduction_and_scan_cases,
    reduction_gradient_cases,
    row_order_and_counting_cases,
)


def operations(context: Context) -> None:
    """operations: softmax, cross-entropy, activations, indexing, sums, sorting, pooling, casts and copies are right."""
    if context.at_least("standard"):
        for case in cases(rounded_sums=context.on_cpu):
            check(context, case)
    pairwise_case_sampling.check(context, sampled_operations(rounded_sums=context.on_cpu))


def cases(rounded_sums: bool) -> Iterator[Case]:
    """Yield every fixed case, with inputs on the host; `rounded_sums` as in
    softmax_cross_entropy_and_gelu_fixed_cases.Rounding."""
    yield from exact_fixed_cases.cases()
    yield from softmax_cross_entropy_and_gelu_fixed_cases.cases(rounded_sums)


def sampled_operations(rounded_sums: bool) -> tuple[Operation, ...]:
    """Return every operation whose cases are sampled."""
    return (
        *softmax_and_cross_entropy_sampled_cases.sampled_operations(rounded_sums),
        *elementwise_and_copy_cases.sampled_operations(rounded_sums),
        *matrix_reduction_and_sort_cases.sampled_operations(rounded_sums),
        *tensor_rearrangement_cases.OPERATIONS,
        *multi_dim_reduction_and_scan_cases.OPERATIONS,
        *reduction_gradient_cases.OPERATIONS,
        *row_order_and_counting_cases.OPERATIONS,
        *large_embedding_and_bag_cases.OPERATIONS,
        *embedding_and_indexing_cases.OPERATIONS,
        *loss_cases.OPERATIONS,
        *image_pooling_and_resize_cases.OPERATIONS,
        *pooling_padding_and_unfold_cases.OPERATIONS,
        *image_interpolation_cases.OPERATIONS,
        *scatter_and_gather_cases.OPERATIONS,
        *broadcast_and_complex_cases.OPERATIONS,
        *ctc_loss_cases.OPERATIONS,
    )
