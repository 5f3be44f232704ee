"""Sampled cases of operations: right on the CPU, and each changed input element is detected."""

from collections.abc import Iterator, Mapping

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import layouts_with_finite_gaps, pairwise_case_sampling
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import Case, worst
from envbuild.selftest.numerics.pairwise_case_sampling import Operation
from envbuild.selftest.probes.gemm import gemm_sampled_cases
from envbuild.selftest.probes.linear_algebra import (
    fft_block_and_gradient_cases,
    fft_sampled_cases,
    linalg_structure_and_gradient_cases,
)
from envbuild.selftest.probes.operations import elementwise_and_copy_cases, operations
from selftest.numerics.test_operation_case import any_wrong

OF_STANDARD = (
    *fft_sampled_cases.OPERATIONS,
    *fft_block_and_gradient_cases.OPERATIONS,
    *linalg_structure_and_gradient_cases.OPERATIONS,
)
OPERATIONS = (
    *gemm_sampled_cases.sampled_operations(tf32=False),
    *operations.sampled_operations(rounded_sums=True),
    *OF_STANDARD,
)
SEEDS = (1, 2)
POINTS = 4  # number of points of each operation for each seed
LARGE = ("large rearrangement", "long order", "place in a long vector")  # a comparison takes 0.1 s to 0.5 s: one seed
POSITIONS = 3  # number of changed elements of each input, including the first and the last
# Calls whose results leave out some of their inputs' elements.
PARTIAL = (
    "padding_idx",
    "by a mask",
    "to distinct places",
    "of triangles",
    "cast of 50x9",
    "ignore_index",
    "weights",
    "ignored row",
    "embedding bags max",
    " cut to ",
    "frames of",
    *fft_sampled_cases.FROM_HALF,
    "triangular",
    "solve of vectors",
    "images resized",
    "images sampled",
    "channels moved by max_unpool",
    "losses by ctc_loss",
    "blocks by gather",
    "blocks by pairs",
    "broadcast where",
    "broadcast maximum",
    "broadcast minimum",
    "broadcast clamp",
    "images pooled",
    "images padded by constant",
    "windows as columns",
    "losses by nll_loss",
    "losses by multi_margin_loss p 2, weight",
    *elementwise_and_copy_cases.ACTIVATIONS,
)
OF_TARGETS = (
    "losses by nll_loss",
    "losses by multi_margin_loss p 2, weight",
)  # only classes that are a row's target count
ORDERED = "orders of"
COUNTED = "truths of"
WITHOUT_SIGN = (" svdvals ", " norms ")  # the sign of an element may not count
INDICES = (torch.int64, torch.int32)


def sampled(operation: Operation, seed: int) -> Iterator[Case]:
    taken = pairwise_case_sampling.sample(operation, POINTS, seed)
    return pairwise_case_sampling.cases(operation, taken.points, seed)


def changed(case: Case, index: int, position: int) -> Iterator[torch.Tensor]:
    """Return the input with one element changed: the element is negated, or increased by one if it is 0 or only copied,
    or moved past all other elements if the order counts, or replaced by a different index."""
    values = case.given[index]
    flat = values.flatten()
    value = flat[position]
    if case.name.startswith(ORDERED):
        limits = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
        others = [limits.max, limits.min]
    elif case.name.startswith(COUNTED) or values.dtype == torch.bool:
        others = [(value == 0).to(values.dtype)]
    elif values.dtype in INDICES and (index or case.dtype not in INDICES):
        others = [value - 1 if value > 0 else torch.ones_like(value)]
    elif case.name.startswith("losses by binary_cross_entropy,") and index < 2:
        others = [value / 2]  # probabilities
    elif any(word in case.name for word in WITHOUT_SIGN):
        others = [2 * value]
    elif case.name.startswith("copies") or not value:
        others = [value + 1 if value < flat.max() else value - 1]
    else:
        others = [-value]
    for other in others:
        moved = flat.clone()
        moved[position] = other
        yield moved.reshape(values.shape)


def positions(case: Case, index: int, count: int) -> list[int]:
    """Return positions of an input that are spread over the whole input; in OF_TARGETS, the positions of targets."""
    values = case.given[index]
    if case.name.startswith(OF_TARGETS) and index in (0, 2) and values.dim() == (1 if index else 2):
        targets = case.given[1].tolist()
        return [row * values.shape[1] + target if index == 0 else target for row, target in enumerate(targets)][-16:]
    last = values.numel() - 1
    return sorted({step * last // (count - 1) for step in range(count)})


def is_seen(case: Case, expected: Mapping[str, Exact], index: int, position: int) -> bool:
    """Return whether changing one element of an input makes a result wrong."""
    for values in changed(case, index, position):
        given = [*case.given[:index], values, *case.given[index + 1 :]]
        try:
            if any_wrong(case.run(*given), expected):
                return True
        except (ValueError, torch.linalg.LinAlgError):  # results of a different shape, or no result
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "seed"),
    [(operation, seed) for operation in OPERATIONS for seed in (SEEDS[:1] if operation.name in LARGE else SEEDS)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_right_kernel_passes_and_each_element_of_its_inputs_matters(operation: Operation, seed: int) -> None:
    for case in sampled(operation, seed):
        expected = case.expected()
        right = worst(case.run(*case.given), expected)
        assert not any(found.wrong for found in right.values()), (case.dtype, case.name, right)
        judge = any if any(word in case.name for word in PARTIAL) else all
        for index in range(len(case.given)):
            places = positions(case, index, 16 if judge is any else POSITIONS)
            seen = (is_seen(case, expected, index, position) for position in places)  # `judge` stops when it knows
            assert judge(seen), f"{case.dtype} {case.name}: input {index}, elements {places}"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_more_cases_are_tried_at_each_level(operation: Operation) -> None:
    counts = [operation.counts.get(level, 0) for level in ("quick", "standard", "full")]
    assert (0 if operation in OF_STANDARD else 1) <= counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize("layout", layouts_with_finite_gaps.BATCHES)
def test_a_layout_keeps_the_values(layout: str) -> None:
    x = torch.arange(30.0).view(2, 3, 5)
    laid_out = layouts_with_finite_gaps.with_large_gaps(x, layout)
    assert torch.equal(laid_out, x)
    dense = laid_out.is_contiguous() and laid_out.storage_offset() == 0
    assert dense == (layout == "contiguous")
