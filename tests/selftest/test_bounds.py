"""The formulas of tolerances. Products of tensor cores are held against theirs in tests/pretend/test_tolerances.py."""

import math

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest import bounds, inputs

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_gamma_is_highams() -> None:
    assert bounds.gamma(4, 2.0**-4) == 0.25 / 0.75
    assert bounds.gamma(1 << 24, 2.0**-24) == math.inf


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_unit_roundoff_is_half_of_torchs_eps(dtype: torch.dtype) -> None:
    assert bounds.unit_roundoff(dtype) == torch.finfo(dtype).eps / 2


def attention(dtype: torch.dtype, wide: bool) -> tuple[float, float, float]:
    """(error, floor, cap) of attention over random values: rounded once to dtype, or at every step."""
    length, depth = 256, 64
    q, k = (inputs.signed((length, depth), seed).to(dtype).double() for seed in (3, 4))
    v = inputs.uniform((length, depth), 5).to(dtype).double()
    logits = q @ k.T / math.sqrt(depth)
    exact = torch.softmax(logits, -1) @ v

    def keep(values: torch.Tensor) -> torch.Tensor:
        return values if wide else values.to(dtype).double()

    weights = keep(torch.exp(keep(keep(keep(q @ k.T) / math.sqrt(depth)))))
    got = keep(keep(weights / weights.sum(-1, keepdim=True)) @ v).to(dtype).double()
    arguments = (dtype, float(logits.abs().max()), depth, length)
    error = float((got - exact).abs().max())
    return error, bounds.attention_floor(*arguments), bounds.attention_cap(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_rounded_once_is_within_the_floor_and_rounded_always_within_the_cap(dtype: torch.dtype) -> None:
    error, floor, cap = attention(dtype, wide=True)
    assert error <= floor <= cap
    error, floor, cap = attention(dtype, wide=False)
    assert error <= cap
