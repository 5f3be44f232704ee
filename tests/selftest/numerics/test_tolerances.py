"""The formulas of tolerances. tests/pretend/test_tolerances.py compares the tolerances of products with the errors of
emulated tensor cores."""

import math

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_gamma_is_highams() -> None:
    assert tolerances.gamma(4, 2.0**-4) == 0.25 / 0.75
    assert tolerances.gamma(1 << 24, 2.0**-24) == math.inf


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_unit_roundoff_is_half_of_torchs_eps(dtype: torch.dtype) -> None:
    assert tolerances.unit_roundoff(dtype) == torch.finfo(dtype).eps / 2


def attention(dtype: torch.dtype, wide: bool) -> tuple[float, float, float]:
    """Return (error, floor, cap) of attention over random values, rounded to dtype only once, or at every step."""
    length, depth = 256, 64
    q, k = (hashed_inputs.signed((length, depth), seed).to(dtype).double() for seed in (3, 4))
    v = hashed_inputs.uniform((length, depth), 5).to(dtype).double()
    logits = q @ k.T / math.sqrt(depth)
    exact = torch.softmax(logits, -1) @ v

    def keep(values: torch.Tensor) -> torch.Tensor:
        return values if wide else values.to(dtype).double()

    weights = keep(torch.exp(keep(keep(keep(q @ k.T) / math.sqrt(depth)))))
    got = keep(keep(weights / weights.sum(-1, keepdim=True)) @ v).to(dtype).double()
    arguments = (dtype, float(logits.abs().max()), depth, length)
    error = float((got - exact).abs().max())
    return error, tolerances.attention_floor(*arguments), tolerances.attention_cap(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_rounded_once_is_within_the_floor_and_rounded_always_within_the_cap(dtype: torch.dtype) -> None:
    error, floor, cap = attention(dtype, wide=True)
    assert error <= floor <= cap
    error, floor, cap = attention(dtype, wide=False)
    assert error <= cap


def test_a_running_sum_that_is_rounded_each_time_is_within_its_bound_and_a_lost_term_is_not() -> None:
    terms = torch.full((67, 2), 5.0, dtype=torch.float64)
    terms[:, 1] = -1
    total = torch.zeros(2, dtype=torch.bfloat16)
    for term in terms:
        total = total + term.bfloat16()
    exact, bound = terms.sum(dim=0), tolerances.running_sum(terms, torch.bfloat16)
    error = (total.double() - exact).abs()
    assert 10 < error[0] <= bound[0] < 30
    assert bound[1] == 0, "whole numbers up to 256 are exact: each lost term is seen"
    assert not tolerances.running_sum(terms, torch.float16).any()
    assert (tolerances.running_sum(terms[:3], torch.bfloat16) == 0).all()
