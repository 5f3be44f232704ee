"""The float64 references of fingerprint operations agree with torch's float64, and the bounds of the references allow
rounding but not larger errors."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import fingerprint_operation_chain, float64_reference_operations, hashed_inputs
from envbuild.selftest.numerics.float64_reference_operations import Arithmetic

HOW = Arithmetic(torch.float32)


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    return hashed_inputs.signed(shape, seed).double()


def near(found: float64_reference_operations.Exact, wanted: torch.Tensor) -> None:
    assert found.value.dtype == torch.float64
    assert found.value.shape == wanted.shape == found.bound.expand_as(wanted).shape
    assert float((found.value - wanted).abs().max()) < 1e-13
    assert bool((found.bound > 0).all())


def test_each_is_what_torch_gives_in_float64() -> None:
    x, w, b = values(2, 5, 24), values(7, 24, seed=2), values(7, seed=3)
    near(float64_reference_operations.linear(HOW, x, w, b), F.linear(x, w, b))
    near(float64_reference_operations.matmul(HOW, x, w.t()), x @ w.t())
    near(float64_reference_operations.silu(HOW, 5 * x), F.silu(5 * x))
    near(float64_reference_operations.gelu(HOW, 5 * x), F.gelu(5 * x))
    near(float64_reference_operations.gelu_tanh(HOW, 5 * x), F.gelu(5 * x, approximate="tanh"))
    near(float64_reference_operations.softmax(HOW, 5 * x), torch.softmax(5 * x, dim=-1))
    near(float64_reference_operations.mean(HOW, x, 1), x.mean(dim=1))
    near(float64_reference_operations.total(HOW, x, -1), x.sum(dim=-1))
    scale, shift = values(24, seed=4), values(24, seed=5)
    near(
        float64_reference_operations.layer_norm(HOW, x, scale, shift, 1e-3), F.layer_norm(x, (24,), scale, shift, 1e-3)
    )
    near(
        float64_reference_operations.rms_norm(HOW, x, scale, 1e-3),
        x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3) * scale,
    )


def test_attention_is_what_torch_gives_in_float64() -> None:
    q, k, v = (values(2, 3, 11, 8, seed=seed) for seed in (1, 2, 3))
    near(float64_reference_operations.attention(HOW, q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1), (2, 0)])
def test_convolutions_are_what_torch_gives_in_float64(stride: int, padding: int) -> None:
    flat, solid = values(2, 3, 9, 7), values(2, 3, 5, 6, 7)
    w2, w3, b = values(4, 3, 3, 3, seed=2), values(4, 3, 3, 2, 3, seed=3), values(4, seed=4)
    near(
        float64_reference_operations.convolution(HOW, flat, w2, b, stride, padding),
        F.conv2d(flat, w2, b, stride, padding),
    )
    near(
        float64_reference_operations.convolution(HOW, solid, w3, b, stride, padding),
        F.conv3d(solid, w3, b, stride, padding),
    )
    near(
        float64_reference_operations.convolution(HOW, solid, w3, None, stride, padding),
        F.conv3d(solid, w3, None, stride, padding),
    )


def test_tf32_is_within_its_own_bound_and_not_within_float32s() -> None:
    x, w = hashed_inputs.signed((64, 256), 1), hashed_inputs.signed((256, 64), 2)
    cut = [(part.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for part in (x, w)]
    got = cut[0] @ cut[1]
    for tf32 in (True, False):
        found = float64_reference_operations.matmul(Arithmetic(torch.float32, tf32), x.double(), w.double())
        assert bool(((got - found.value).abs() <= found.bound).all()) == tf32


def split(convolve: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, slices: int) -> torch.Tensor:
    """Return a split-K convolution, as cuDNN may compute it: each slice's sum is rounded to float16, and the slices are
    added in float16."""
    parts = zip(x.float().chunk(slices, 1), w.float().chunk(slices, 1), strict=True)
    total, *others = (convolve(*part, padding=1).half() for part in parts)
    for other in others:
        total = (total.float() + other.float()).half()
    return total


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_split_k_in_half_precision_is_within_a_gpus_bound_and_a_lost_channel_is_not(slices: int) -> None:
    x, w = (
        fingerprint_operation_chain.input_video().half(),
        fingerprint_operation_chain.operation_chain()[0].weights[0].half(),
    )
    plain, allowed = (
        float64_reference_operations.convolution(Arithmetic(torch.float16, half_sums=half), x.double(), w.double())
        for half in (False, True)
    )
    error = (split(F.conv3d, x, w, slices).double() - plain.value).abs()
    assert bool((error > plain.bound).any())
    assert bool((error <= allowed.bound).all())
    lost = F.conv3d(x[:, :-1].float(), w[:, :-1].float(), padding=1).half()
    assert bool(((lost.double() - plain.value).abs() > allowed.bound).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_float16_may_be_added_up_in_half_precision(dtype: torch.dtype) -> None:
    x, w = (
        part.to(dtype).double()
        for part in (
            fingerprint_operation_chain.input_video(),
            fingerprint_operation_chain.operation_chain()[0].weights[0],
        )
    )
    plain, allowed = (
        float64_reference_operations.convolution(Arithmetic(dtype, half_sums=half), x, w) for half in (False, True)
    )
    assert torch.equal(plain.bound, allowed.bound)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 10), (torch.float16, 8), (torch.bfloat16, 5)])
def test_the_last_rounding_is_within_every_bound_and_fewer_bits_are_not(dtype: torch.dtype, bits: int) -> None:
    """An error of 2^-bits of the largest value fails every operation."""
    golden = fingerprint_operation_chain.input_video().to(dtype)
    for op in fingerprint_operation_chain.operation_chain():
        found = op.exact(Arithmetic(dtype), golden.double(), *(part.to(dtype).double() for part in op.weights))
        golden = found.value.to(dtype)
        assert bool(torch.isfinite(golden).all()), op.name
        assert bool(((golden.double() - found.value).abs() <= found.bound).all()), op.name
        off = 2.0**-bits * found.value.abs().max()
        assert bool((off > found.bound).any()), op.name


def test_the_first_input_and_the_weights_keep_the_chain_in_range() -> None:
    golden = fingerprint_operation_chain.input_video().double()
    for op in fingerprint_operation_chain.operation_chain():
        golden = op.exact(HOW, golden, *(part.double() for part in op.weights)).value
        assert 0.005 < float(golden.square().mean().sqrt()) < 60, op.name
        assert float(golden.abs().max()) < 100, op.name
