"""Tolerances: how much a correct result may differ from the exact one. Pure formulas; u is a unit roundoff, k a length
of summation.

gamma and the GEMM form are the classical ones (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 3.1
and 3.5). 2^-23 instead of 2^-24 allows for tensor cores that truncate instead of rounding (Fasi, Higham, Mikaitis and
Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). With the rounding of the result subtracted from both, the
error of emulated tensor cores of every generation from Volta to Blackwell, on inputs uniform in [0, 1) and k =
64..16384, is at most 0.41 of the tolerance; with sums kept in half precision it exceeds the tolerance
(tests/pretend/test_tolerances.py).
"""

from __future__ import annotations

import math

import torch

ACCUMULATOR = 2.0**-23  # a float32 accumulator that truncates
ROUNDED = 2.0**-24  # one that rounds to nearest
LIKELY = 6.0  # times the root of a sum of squares: exceeded with a probability below 4e-8
TF32 = 2.0**-10  # TF32 truncates each factor to 10 bits of fraction

_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Half the distance between subnormal numbers; for dtypes whose subnormals a device may flush to zero, the smallest
# normal number.
_SUBNORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}


def unit_roundoff(dtype: torch.dtype) -> float:
    """u of rounding to nearest: half the distance from 1 to the next larger number of that dtype."""
    return _UNIT[str(dtype).replace("torch.", "")]


def factor_roundoff(dtype: torch.dtype, tf32: bool) -> float:
    """Unit roundoff of the factors of a product: float32 factors keep TF32's 10 bits where TF32 is allowed."""
    return TF32 if tf32 and dtype == torch.float32 else unit_roundoff(dtype)


def gamma(k: int, u: float) -> float:
    """k u / (1 - k u), Higham's lemma 3.1; infinite if k u >= 1, where no error bound exists."""
    return k * u / (1 - k * u) if k * u < 1 else math.inf


def gemm(exact: torch.Tensor, magnitude: torch.Tensor, k: int, dtype: torch.dtype, tf32: bool = False) -> torch.Tensor:
    """Elementwise bound of |C - C*| for C = A B of inner length k with float32 accumulation, rounded once to `dtype`.

    `exact` is C* in float64 from the inputs as quantised, `magnitude` |A| |B|; both (m, n), as is the result:
    u |C*| + gamma_k(2^-23) |A||B|, and with TF32 2 * 2^-10 |A||B| more, as both factors of each product are truncated.
    """
    relative = gamma(k, ACCUMULATOR) + (2 * TF32 if tf32 and dtype == torch.float32 else 0.0)
    return unit_roundoff(dtype) * exact.abs() + relative * magnitude


def half_sums(exact: torch.Tensor, magnitude: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Like gemm, but parts of the sum may be kept in `dtype`: LIKELY sqrt(ceil(k / 32)) u |A||B| more.

    Split-K rounds the sum of each slice and adds the slices in `dtype`; a slice has 32 products at least, the smallest
    step of a tensor core's tile. That many independent roundings, each of a partial sum of at most |A||B|, exceed this
    with a probability below 2 exp(-LIKELY^2 / 2) (Hoeffding; Higham and Mary, 2019, theorem 2.4, as below). Winograd's
    rounded transforms have worst-case bounds too wide to be useful (Barabasz, Anderson, Soodhalter and Gregg, "Error
    analysis and improving the accuracy of Winograd convolution", 2020); emulated, F(2x2, 3x3) and F(4x4, 3x3) stay
    below half of this tolerance (tests/selftest/probes/convolution/test_conv.py). Intended for float16;
    for bfloat16 it would detect almost nothing.
    """
    return gemm(exact, magnitude, k, dtype) + LIKELY * math.sqrt(math.ceil(k / 32)) * unit_roundoff(dtype) * magnitude


def fp8(exact: torch.Tensor, magnitude: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Like gemm, for 8-bit factors with positive products: k 2^-15 |A||B| more.

    Ada's and Hopper's tensor cores keep 13 fraction bits of each product, relative to the largest exponent among the
    products that they add and the running sum (arXiv 2511.10909), and truncate the rest toward zero. Truncation costs
    half a unit of the running sum per product on average: emulated for inputs uniform in [0, 1) and k = 128..16384, the
    error is at most 0.57 of this tolerance on Ada and Hopper, and almost zero on Blackwell
    (tests/pretend/test_tolerances.py). Sums with intermediate promotion to float32 have smaller errors. A sum truncated
    to float16's 10 bits passes as well: gemm.fp8 detects that with large integers.
    """
    return gemm(exact, magnitude, k, dtype) + k * 2.0**-15 * magnitude


def rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error of rounding `exact` to `dtype`, including results below the normal range."""
    return exact.abs().mul_(unit_roundoff(dtype)).add_(_SUBNORMAL[str(dtype).replace("torch.", "")])


def summation(n: int) -> float:
    """Relative error of a float32 sum of n terms and of a few operations around it.

    gamma_m(2^-24) with m = ceil(n / 32) + 16, because sums run in at least 32 lanes that a tree of few levels combines.
    """
    return gamma(math.ceil(n / 32) + 16, ROUNDED)


def running_sum(terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Error of adding whole numbers one after the other, where each sum is rounded to `dtype`.

    `terms` (n, ...) in the order of addition; the bound has the shape of one term. A rounding changes the computed sum
    S by at most u |S|, and whole numbers up to 1 / u not at all: running error analysis (Higham, 2nd ed., 4.3).
    """
    u = unit_roundoff(dtype)
    total, error = torch.zeros_like(terms[0]), torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
        largest = total.abs() + error
        error = error + torch.where(largest > 1 / u, u * largest, 0.0)
    return error


def norm(magnitude: torch.Tensor, n: int, times: int, dtype: torch.dtype, roundings: float) -> torch.Tensor:
    """Elementwise bound of the arithmetic of a norm over n elements, without the rounding of its result.

    The bound is 4 summation(n) `magnitude`. The magnitude is |w| (|x| + mean |x|) / sigma + |b| for LayerNorm and
    GroupNorm, whose x - mean may cancel, and |y| for RMSNorm. For a gradient it is the gradient with every term
    positive, and `times` is 2, because an error of x / sigma enters twice. Measured for n = 256..8192: correct norms
    stay below 0.05 of it, those with statistics in half precision are above 1.9; with n instead of m those would pass.

    `roundings`: the number of intermediate roundings to `dtype` in a known implementation.
    """
    arithmetic = 4 * times * summation(n)
    return (arithmetic + roundings * unit_roundoff(dtype)) * magnitude


def attention_score(depth: int, u: float) -> float:
    """Error of a score q k^T scale, relative to |q||k| scale.

    The math path scales both factors before it multiplies them, and adds a mask (4 u); its float32 sum of `depth`
    products, whose sum is not exact any more, has independent roundings (Higham and Mary, 2019, theorem 2.4, as below).
    """
    return 4 * u + LIKELY * math.sqrt(depth + 4) * ROUNDED


def attention_floor(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """The minimum tolerance of a fused attention kernel, relative to max |V|.

    It covers one rounding of the probabilities and one of the output (2 u), and float32 arithmetic: logits up to
    `logit` in magnitude with sums over `depth` and their scaling, whose error enters softmax twice (numerator and
    denominator); the exponentials and the two sums over `length`.
    """
    arithmetic = 2 * math.expm1(gamma(depth + 2, ACCUMULATOR) * logit) + 2 * gamma(length + 4, ACCUMULATOR)
    return 2 * factor_roundoff(dtype, tf32) + arithmetic


def attention_cap(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """The maximum tolerance of any attention kernel, relative to max |V|.

    An implementation that keeps everything in `dtype` rounds the scaled q and k, the logits, the probabilities
    (numerator and quotient) and the output: the logits' error, 3 u `logit`, enters softmax twice.
    """
    u = factor_roundoff(dtype, tf32)
    return 2 * math.expm1(3 * u * logit) + 3 * u + attention_floor(dtype, logit, depth, length, tf32)


def attention_gradient_floor(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """The minimum tolerance of a fused kernel's gradient, relative to its `spread`, without the rounding of the
    gradient itself.

    `spread` is the root of the sum of the squared terms, where the differences inside each term are replaced by sums of
    positive parts (probes/attention/attention_gradient_cases.py). Roundings to `dtype` are independent of each other,
    so n of them of unit u exceed LIKELY n u `spread` with a probability below 2 exp(-LIKELY^2 / 2) (Hoeffding; Higham
    and Mary, "A new approach to probabilistic rounding error analysis", 2019, theorem 2.4); a worst-case bound would be
    larger than the gradients. A fused kernel rounds the output, from which the row's sum is computed, and the factor of
    the last product.

    Arithmetic in float32 is bounded as in the forward pass, with the sums over `depth` of dO V and dO O; sums of
    absolute values over `depth` or `length` terms are at most sqrt(depth) or sqrt(length) times the roots.
    """
    forward = 2 * math.expm1(gamma(depth + 2, ACCUMULATOR) * logit) + 2 * gamma(length + 4, ACCUMULATOR)
    arithmetic = forward + math.sqrt(depth) * gamma(depth + 2, ACCUMULATOR) + gamma(length, ACCUMULATOR)
    return 2 * LIKELY * factor_roundoff(dtype, tf32) + math.sqrt(length) * arithmetic


def attention_gradient_cap(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """The maximum tolerance of any kernel's gradient, relative to its `spread`.

    An implementation that keeps everything in `dtype` rounds the logits (as in the forward pass: 3 u `logit`, twice),
    the probabilities twice, their gradients and those of the logits, the row's sum and the scaled factor, and the
    result once more as it is scaled back: 7 u in addition to the floor.
    """
    u = factor_roundoff(dtype, tf32)
    floor = attention_gradient_floor(dtype, logit, depth, length, tf32)
    return LIKELY * (2 * math.expm1(3 * u * logit) + 7 * u) + floor


def softmax(exact: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Elementwise bound of the arithmetic of softmax over the last dimension, without the rounding of its result.

    The rounding of x - max(x) changes the exponential by the same relative amount; the sum adds its own error.
    """
    distance = x.amax(dim=-1, keepdim=True) - x
    return 4 * summation(x.shape[-1]) * (1 + distance) * exact.abs()


def log_softmax(exact: torch.Tensor, n: int) -> torch.Tensor:
    """Absolute elementwise bound of the arithmetic of log_softmax over n elements, without the rounding of its result.

    x - max(x) is rounded, and so is the logarithm of the sum, to which each exponential contributes the rounding of its
    own x - max(x), weighted (log n of them at most).
    """
    return 4 * summation(n) * (1 + exact.abs())


def activation(x: torch.Tensor) -> torch.Tensor:
    """The same bound for x times a factor in [0, 1] with a float32 error of 16 roundings of 1: both forms of gelu, and
    silu.
    """
    return 16 * ROUNDED * x.abs()


def adam(rate: float, update: torch.Tensor, step: int, correction: float) -> torch.Tensor:
    """Elementwise bound of the arithmetic of one step of Adam in float32, without the rounding of its result.

    `update` is the step divided by `rate`, with every term positive. Each earlier step rounds both moments (5 u a
    step), and the last rounds 16 times with CUDA's fast division and root (2 units in the last place each): below 16
    (step + 1) u. `correction` is the relative error of the bias corrections.
    """
    return (16 * (step + 1) * ROUNDED + correction) * rate * update


def power_correction(beta: float, step: int) -> float:
    """Relative error of 1 - beta^step with CUDA's fast power, 2^(step log2 beta).

    The logarithm has an error of 2^-21.4 (CUDA C++ Programming Guide, intrinsic functions: __log2f), and 1 - beta^step
    is small for the first steps.
    """
    power = beta**step
    return (step + 1) * 2.0**-21 * power / (1 - power)


def fourier(n: int, dtype: torch.dtype) -> float:
    """Error of each element of a Fourier transform of n elements in `dtype`, relative to the root mean square of all.

    Each of log2(n) stages adds 7 u in the worst case (Higham, 2nd ed., theorem 24.2, whose eta is u + 4 sqrt(2) u);
    because the roundings are independent, they add up to LIKELY times the root. Lengths with large prime factors are
    computed as a convolution (Bluestein) by three transforms of less than four times the length; a factor of 4 covers
    the norms of the chirp's transform.
    """
    smooth = n
    for factor in (2, 3, 5, 7):
        while smooth % factor == 0:
            smooth //= factor
    stages = math.sqrt(math.log2(n)) if smooth == 1 else 4 * math.sqrt(3 * math.log2(4 * n))
    return LIKELY * 7 * unit_roundoff(dtype) * stages


def orthogonal(n: int, dtype: torch.dtype) -> float:
    """Error of n reflections or rotations of a matrix of size n, relative to the norm of the matrix they are applied
    to.

    The worst case is c sqrt(n) u for each and n sqrt(n) u for all (Higham, 2nd ed., lemmas 19.2 and 19.3); with
    independent roundings the sum of n terms grows by its root (Higham and Mary, 2019): LIKELY n u.
    """
    return LIKELY * n * unit_roundoff(dtype)


def elimination(n: int, dtype: torch.dtype) -> float:
    """Residual of a system of n equations solved by elimination, relative to |L||U||x|.

    gamma_3n (Higham, 2nd ed., theorem 9.4), with the root of 3 n because the roundings are independent.
    """
    return LIKELY * math.sqrt(3 * n) * unit_roundoff(dtype)
