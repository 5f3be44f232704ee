"""The bounds: right arithmetic stays within them, and arithmetic that sums in half precision does not."""

import math

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest import bounds, inputs
from selftest import tensor_cores

needs_fp8 = pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="this torch has no fp8")
BLOCK = 16  # a tensor core adds this many products at a time
LENGTHS = (64, 256, 1024, 4096)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def truncate(values: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 cut toward zero to this many significant bits, as an accumulator that truncates."""
    fraction, exponent = torch.frexp(values)
    return torch.ldexp(torch.trunc(fraction * 2.0**bits), exponent - bits)


def multiply(a: torch.Tensor, b: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(0, a.shape[1], BLOCK):
        total = truncate(total + a[:, k : k + BLOCK] @ b[k : k + BLOCK], bits)
    return total.to(dtype).to(torch.float64)


def ratio(k: int, bits: int, dtype: torch.dtype) -> float:
    a = inputs.uniform((24, k), 1).to(dtype).to(torch.float64)
    b = inputs.uniform((k, 24), 2).to(dtype).to(torch.float64)
    exact = a @ b
    error = (multiply(a, b, bits, dtype) - exact).abs()
    return float((error / bounds.gemm(exact, exact, k, dtype)).max())


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulation_in_float32_stays_within(k: int, dtype: torch.dtype) -> None:
    assert ratio(k, bits=24, dtype=dtype) <= 1


@pytest.mark.parametrize("k", LENGTHS)
def test_accumulation_in_float16_does_not(k: int) -> None:
    assert ratio(k, bits=11, dtype=torch.float16) > 1.15


@pytest.mark.parametrize("k", LENGTHS)
def test_accumulation_in_bfloat16_does_not(k: int) -> None:
    assert ratio(k, bits=8, dtype=torch.bfloat16) > 1.15


def test_tf32_is_within_its_own_bound_only() -> None:
    k = 1024
    a, b = (inputs.uniform((24, k), 1), inputs.uniform((k, 24), 2))
    exact = a.double() @ b.double()
    cut = [(values.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for values in (a, b)]
    error = ((cut[0] @ cut[1]).float().double() - exact).abs()
    assert bool((error <= bounds.gemm(exact, exact, k, torch.float32, tf32=True)).all())
    assert bool((error > bounds.gemm(exact, exact, k, torch.float32)).any())


def fp8_ratio(k: int, core: tensor_cores.Core, promoted_every: int | None = None) -> float:
    """The largest error over tolerance of products of e4m3 in [0, 1), added up as this core does."""
    a = inputs.uniform((24, k), 51).to(torch.float8_e4m3fn)
    b = inputs.uniform((24, k), 52).to(torch.float8_e4m3fn).t()
    exact = a.double() @ b.double()
    got = tensor_cores.multiply(a, b, core, promoted_every).float().to(torch.bfloat16).double()
    return float(((got - exact).abs() / bounds.fp8(exact, exact, k, torch.bfloat16)).max())


@needs_fp8
@pytest.mark.parametrize("k", [128, 1040, 4096, 16384])
@pytest.mark.parametrize("name", tensor_cores.FP8_CORES)
def test_sums_of_every_fp8_core_stay_well_within_the_tolerance(k: int, name: str) -> None:
    assert fp8_ratio(k, tensor_cores.FP8_CORES[name]) < 0.7


@needs_fp8
@pytest.mark.parametrize("promoted_every", [128, 256, 512, 1024])
def test_sums_that_are_promoted_to_float32_stay_well_within_the_tolerance(promoted_every: int) -> None:
    assert fp8_ratio(4096, tensor_cores.HOPPER_FP8, promoted_every) < 0.7


@needs_fp8
@pytest.mark.parametrize("k", [1040, 4096])
def test_fp8_sums_in_half_precision_exceed_the_tolerance(k: int) -> None:
    assert fp8_ratio(k, tensor_cores.HALF_ACCUMULATOR) > 1.5


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
