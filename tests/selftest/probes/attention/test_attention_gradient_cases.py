"""Attention gradients: the reference equals autograd, and allowed rounding stays within the bounds."""

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import tolerances
from envbuild.selftest.probes.attention.attention_gradient_cases import (
    DTYPES,
    PROBLEMS,
    ExactGradients,
    GradientCase,
    Three,
    exact_gradients,
    gradient_inputs,
    shared,
)

LENGTH, DEPTH = 192, 64
RANDOM = PROBLEMS.index("random")
CASES = [
    GradientCase(torch.float16, 2, 33, 33, DEPTH),
    GradientCase(torch.float16, 1, 33, 33, DEPTH, causal=True),
    GradientCase(torch.float16, 1, 64, 64, DEPTH, masked=True),
    GradientCase(torch.float16, 1, 1, 128, DEPTH),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_is_autograds_in_float64(case: GradientCase) -> None:
    given = gradient_inputs(case)
    q, k, v = (values.double().requires_grad_() for values in (given.q, given.k, given.v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
    wanted = torch.autograd.grad(output, (q, k, v), given.grad.double())
    for got, values in zip(exact_gradients(case, given).gradients, wanted, strict=True):
        assert float((got - values).abs().max()) < 1e-10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_common_result_of_backends_is_the_reference(case: GradientCase) -> None:
    given = gradient_inputs(case)
    wanted = exact_gradients(case, given)
    for found in (shared(case, given), shared(case, given)):
        assert found.logits == wanted.logits
        for parts, all_wanted in ((found.gradients, wanted.gradients), (found.spreads, wanted.spreads)):
            assert all(map(torch.equal, parts, all_wanted))


def written_out(case: GradientCase, always: bool) -> tuple[Three, ExactGradients]:
    """Compute attention step by step, rounded to the dtype where a fused kernel rounds, or with `always` at every
    step."""

    def some(values: torch.Tensor) -> torch.Tensor:
        return values.to(case.dtype).double()

    def every(values: torch.Tensor) -> torch.Tensor:
        return some(values) if always else values

    given, root = gradient_inputs(case), DEPTH**-0.25
    q, k, v, grad = (values.double() for values in (given.q, given.k, given.v, given.grad))
    logits = every(every(q * root) @ every(k * root).mT).masked_fill(case.ahead, float("-inf"))
    weights = every(torch.softmax(logits, dim=-1))
    output, slope = some(weights @ v), every(grad @ v.mT)
    change = some(weights * (slope - every((grad * output).sum(-1, keepdim=True))))
    found = (change @ every(k * root) * root, change.mT @ every(q * root) * root, some(weights).mT @ grad)
    return (some(found[0]), some(found[1]), some(found[2])), exact_gradients(case, given)


def ratios(case: GradientCase, got: Three, known: ExactGradients, always: bool) -> list[float]:
    """Return the largest ratio of error to tolerance of each gradient of the random problem."""
    form = tolerances.attention_gradient_cap if always else tolerances.attention_gradient_floor
    factor = form(case.dtype, known.logits[RANDOM], DEPTH, LENGTH)
    found = []
    for values, wanted, spread in zip(got, known.gradients, known.spreads, strict=True):
        limit = factor * spread + tolerances.rounding(wanted, case.dtype)
        found.append(float(((values - wanted).abs() / limit)[RANDOM].max()))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_rounding_where_it_is_allowed_stays_within(dtype: torch.dtype, causal: bool, always: bool) -> None:
    case = GradientCase(dtype, 1, LENGTH, LENGTH, DEPTH, causal)
    got, known = written_out(case, always)
    assert max(ratios(case, got, known, always)) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", range(3))
def test_a_row_of_its_neighbour_leaves_the_floor(dtype: torch.dtype, which: int) -> None:
    case = GradientCase(dtype, 1, LENGTH, LENGTH, DEPTH)
    got, known = written_out(case, always=False)
    got[which][..., 20, :] = got[which][..., 19, :]
    assert ratios(case, got, known, always=False)[which] > 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_way_back_that_forgets_the_rows_sum_leaves_the_floor(dtype: torch.dtype) -> None:
    """With V = 1, the right gradients of q and k are 0, and gradients computed without the sum of the row are not 0."""
    case = GradientCase(dtype, 1, LENGTH, LENGTH, DEPTH)
    given, known = gradient_inputs(case), exact_gradients(case, gradient_inputs(case))
    constant = PROBLEMS.index("V=1")
    q, k, grad = (values[constant].double() for values in (given.q, given.k, given.grad))
    weights = torch.softmax(q @ k.mT / DEPTH**0.5, dim=-1)
    wrong = (weights * grad.sum(-1, keepdim=True)) @ k / DEPTH**0.5
    factor = tolerances.attention_gradient_floor(dtype, known.logits[constant], DEPTH, LENGTH)
    assert float((wrong.abs() / (factor * known.spreads[0][constant])).max()) > 2
