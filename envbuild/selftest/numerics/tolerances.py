"""Tolerances: how much a correct result may differ from the exact result. All functions are pure formulas.

In the formulas, u is a unit roundoff, k is the number of summed terms, and |A| is the matrix of the absolute values of
A.

The functions gamma and gemm use the classical bounds (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd
ed., 3.1 and 3.5). The unit roundoff of accumulation is 2^-23 instead of 2^-24, because tensor cores may truncate
instead of rounding (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).

`make pretend` emulates the tensor cores of every generation from Volta to Blackwell (tests/pretend/sweep.py), with
inputs uniform in [0, 1) and k = 64..16384. Their error is at most 0.41 of the tolerance `gemm` and 0.57 of the
tolerance `fp8`, where the rounding of the result is subtracted from both the error and the tolerance. If sums are kept
in half precision, the error exceeds the tolerance; `fp8` describes an exception.
"""

from __future__ import annotations

import math

import torch

ACCUMULATOR = 2.0**-23  # unit roundoff of a float32 accumulator that truncates
ROUNDED = 2.0**-24  # unit roundoff of a float32 accumulator that rounds to nearest
# A sum of independent errors exceeds LIKELY sqrt(sum of the squares of their bounds) with a probability below 4e-8.
LIKELY = 6.0
TF32 = 2.0**-10  # unit roundoff of TF32, which truncates each factor to 10 bits of fraction

_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The largest error of rounding a number below the normal range. It is half the distance between subnormal numbers. For
# dtypes whose subnormal numbers a device may flush to zero, it is the smallest normal number.
_SUBNORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of rounding to nearest: half the distance from 1 to the next larger number of
    `dtype`."""
    return _UNIT[str(dtype).replace("torch.", "")]


def factor_roundoff(dtype: torch.dtype, tf32: bool) -> float:
    """Return the unit roundoff of the factors of a product: that of TF32 for float32 if TF32 is allowed, else that of
    `dtype`."""
    return TF32 if tf32 and dtype == torch.float32 else unit_roundoff(dtype)


def gamma(k: int, u: float) -> float:
    """Return k u / (1 - k u) (Higham, lemma 3.1); infinity if k u >= 1, because no error bound exists then."""
    return k * u / (1 - k * u) if k * u < 1 else math.inf


def gemm(exact: torch.Tensor, magnitude: torch.Tensor, k: int, dtype: torch.dtype, tf32: bool = False) -> torch.Tensor:
    """Return an elementwise bound of |C - C*| for a product C = A B of inner length k.

    C is accumulated in float32 and rounded once to `dtype`. `exact` is C*, computed in float64 from the inputs after
    they were rounded to their dtype. `magnitude` is |A| |B|. Both have the shape (m, n), and so has the result:
    u |C*| + gamma_k(2^-23) |A||B|. With TF32, 2 * 2^-10 |A||B| is added, because both factors of each product are
    truncated.
    """
    relative = gamma(k, ACCUMULATOR) + (2 * TF32 if tf32 and dtype == torch.float32 else 0.0)
    return unit_roundoff(dtype) * exact.abs() + relative * magnitude


def half_sums(exact: torch.Tensor, magnitude: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the bound of gemm plus LIKELY sqrt(ceil(k / 32)) u |A||B|, for kernels that keep partial sums in `dtype`.

    A split-K kernel rounds the sum of each slice and adds the slices in `dtype`. A slice has at least 32 products, the
    smallest step of a tensor core's tile. So there are at most ceil(k / 32) independent roundings, each of a partial
    sum of at most |A||B|. They exceed the added term with a probability below 2 exp(-LIKELY^2 / 2) (Hoeffding; Higham
    and Mary, 2019, theorem 2.4, cited in full in attention_gradient_floor).

    For Winograd's rounded transforms, worst-case bounds are too wide to be useful (Barabasz, Anderson, Soodhalter and
    Gregg, "Error analysis and improving the accuracy of Winograd convolution", 2020). Emulated F(2x2, 3x3) and F(4x4,
    3x3) stay below half of this tolerance (tests/selftest/probes/convolution/test_conv.py). The bound is intended for
    float16; for bfloat16 it would detect almost nothing.
    """
    return gemm(exact, magnitude, k, dtype) + LIKELY * math.sqrt(math.ceil(k / 32)) * unit_roundoff(dtype) * magnitude


def fp8(exact: torch.Tensor, magnitude: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the bound of gemm plus k 2^-15 |A||B|, for 8-bit factors whose products are positive.

    Ada's and Hopper's tensor cores keep 13 fraction bits of each product and truncate the rest toward zero. The bits
    are relative to the largest exponent among the products that are added and the running sum (arXiv 2511.10909). On
    average, truncation loses half a unit in the last place of the running sum for each product.

    `make pretend` emulates this for inputs uniform in [0, 1) and k = 64..16384 (tests/pretend/sweep.py). The error is
    at most 0.57 of this tolerance on Ada and Hopper, and almost zero on Blackwell. Kernels that promote intermediate
    sums to float32 have smaller errors. A sum truncated to the 10 bits of float16 is also within this tolerance; the
    probe gemm.fp8 detects such sums with large integers.
    """
    return gemm(exact, magnitude, k, dtype) + k * 2.0**-15 * magnitude


def rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest error of rounding `exact` to `dtype`, also for results below the normal range."""
    return exact.abs().mul_(unit_roundoff(dtype)).add_(_SUBNORMAL[str(dtype).replace("torch.", "")])


def summation(n: int) -> float:
    """Return the error of a float32 sum of n terms and of a few further operations, relative to the sum of the absolute
    values.

    It is gamma_m(2^-24) with m = ceil(n / 32) + 16, because kernels sum in at least 32 lanes, and combine the lanes in
    a tree of few levels.
    """
    return gamma(math.ceil(n / 32) + 16, ROUNDED)


def running_sum(terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bound of the error of adding whole numbers one after the other, where each sum is rounded to `dtype`.

    `terms` has the shape (n, ...), in the order of addition. The bound has the shape of one term. Rounding changes a
    computed sum S by at most u |S|, and does not change whole numbers up to 1 / u. The bound is a running error
    analysis (Higham, 2nd ed., 4.3).
    """
    u = unit_roundoff(dtype)
    total, error = torch.zeros_like(terms[0]), torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
        largest = total.abs() + error
        error = error + torch.where(largest > 1 / u, u * largest, 0.0)
    return error


def norm(magnitude: torch.Tensor, n: int, times: int, dtype: torch.dtype, roundings: float) -> torch.Tensor:
    """Return an elementwise bound of the error of a norm over n elements, without the rounding of its result.

    The bound is (4 `times` summation(n) + `roundings` u) `magnitude`. For LayerNorm and GroupNorm, the magnitude is
    |w| (|x| + mean |x|) / sigma + |b|, because x - mean may cancel. For RMSNorm, it is |y|, the absolute output. For a
    gradient, it is the formula of the gradient with every term replaced by its absolute value.

    `times` is 2 for a gradient, because an error of x / sigma enters twice, else 1. `roundings`: the number of
    intermediate roundings to `dtype` in a known implementation.

    Measured for n = 256..8192, correct norms stay below 0.05 of the bound, and norms with statistics in half precision
    are above 1.9 of it. If summation(n) used gamma_n instead of gamma_m, the norms with statistics in half precision
    would be within the bound.
    """
    arithmetic = 4 * times * summation(n)
    return (arithmetic + roundings * unit_roundoff(dtype)) * magnitude


def attention_score(depth: int, u: float) -> float:
    """Return the error of an attention score q k^T scale, relative to |q||k| scale.

    torch's math implementation scales both factors before it multiplies them, and then adds a mask. The roundings of
    these steps count 4 u. The float32 sum of `depth` products is not exact, because the scaled factors are rounded. Its
    roundings are independent (Higham and Mary, 2019, theorem 2.4, cited in full in attention_gradient_floor).
    """
    return 4 * u + LIKELY * math.sqrt(depth + 4) * ROUNDED


def attention_floor(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """Return the tolerance of a fused attention kernel, relative to max |V|. It is the minimum of all tolerances for
    attention.

    It covers one rounding of the probabilities and one of the output (2 u). It also covers the float32 arithmetic: the
    scaled logits, which are sums over `depth` of at most `logit` in magnitude, the exponentials, and the two sums over
    `length`. An error of a logit enters softmax twice, in the numerator and in the denominator.
    """
    arithmetic = 2 * math.expm1(gamma(depth + 2, ACCUMULATOR) * logit) + 2 * gamma(length + 4, ACCUMULATOR)
    return 2 * factor_roundoff(dtype, tf32) + arithmetic


def attention_cap(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """Return the maximum tolerance of any attention kernel, relative to max |V|.

    An implementation that keeps all intermediate results in `dtype` rounds the scaled q and k, the logits, the
    probabilities (numerator and quotient) and the output. The error of a logit is 3 u `logit`, and enters softmax
    twice.
    """
    u = factor_roundoff(dtype, tf32)
    return 2 * math.expm1(3 * u * logit) + 3 * u + attention_floor(dtype, logit, depth, length, tf32)


def attention_gradient_floor(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """Return the tolerance of a gradient that a fused attention kernel computes, relative to the gradient's `spread`.

    The rounding of the gradient itself is not included. `spread` is the root of the sum of the squared terms, where a
    difference inside a term is replaced by the sum of the absolute values of its parts
    (probes/attention/attention_gradient_cases.py).

    Roundings to `dtype` are independent of each other. Therefore n roundings of each term, with unit roundoff u, exceed
    LIKELY n u `spread` with a probability below 2 exp(-LIKELY^2 / 2) (Hoeffding; Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019, theorem 2.4). A worst-case bound would be larger than the gradients. A
    fused kernel rounds twice (n = 2): it rounds the output, from which the row sum of dO O is computed, and a factor of
    the last product.

    float32 arithmetic is bounded as in the forward pass, and in addition for the sums of dO V and dO O over `depth`. A
    sum of n absolute values (n = `depth` or `length`) is at most sqrt(n) times the root of the sum of their squares.
    """
    forward = 2 * math.expm1(gamma(depth + 2, ACCUMULATOR) * logit) + 2 * gamma(length + 4, ACCUMULATOR)
    arithmetic = forward + math.sqrt(depth) * gamma(depth + 2, ACCUMULATOR) + gamma(length, ACCUMULATOR)
    return 2 * LIKELY * factor_roundoff(dtype, tf32) + math.sqrt(length) * arithmetic


def attention_gradient_cap(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """Return the maximum tolerance of a gradient of any attention kernel, relative to the gradient's `spread`.

    An implementation that keeps all intermediate results in `dtype` rounds the logits, with the error 3 u `logit` that
    enters twice, as in the forward pass. In addition to the roundings in attention_gradient_floor, it rounds seven
    times (7 u). It rounds the probabilities twice, and once each their gradients, the gradients of the logits, the row
    sum and the scaled factor. It rounds the result once more when it scales the result back.
    """
    u = factor_roundoff(dtype, tf32)
    floor = attention_gradient_floor(dtype, logit, depth, length, tf32)
    return LIKELY * (2 * math.expm1(3 * u * logit) + 7 * u) + floor


def softmax(exact: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return an elementwise bound of the error of softmax over the last dimension, without the rounding of its result.

    An absolute error of x - max(x) changes the exponential by the same relative amount. The sum of the exponentials
    adds its own error.
    """
    distance = x.amax(dim=-1, keepdim=True) - x
    return 4 * summation(x.shape[-1]) * (1 + distance) * exact.abs()


def log_softmax(exact: torch.Tensor, n: int) -> torch.Tensor:
    """Return an elementwise bound of the absolute error of log_softmax over n elements, without the rounding of its
    result.

    Both x - max(x) and the logarithm of the sum are rounded. The sum also contains the error of each exponential, which
    is the rounding of its x - max(x). Weighted by the exponentials, these are at most log n roundings.
    """
    return 4 * summation(n) * (1 + exact.abs())


def activation(x: torch.Tensor) -> torch.Tensor:
    """Return an elementwise bound of the error of both forms of gelu and of silu, without the rounding of the result.

    Each is x times a factor in [0, 1]. The error of the factor in float32 is taken as 16 roundings of 1.
    """
    return 16 * ROUNDED * x.abs()


def adam(rate: float, update: torch.Tensor, step: int, correction: float) -> torch.Tensor:
    """Return an elementwise bound of the error of one step of Adam in float32, without the rounding of its result.

    `update` is the change of the parameter divided by `rate`, with every term replaced by its absolute value. Each
    earlier step rounds both moments (5 u for each step). The last step rounds 16 times, where CUDA's fast division and
    root count 2 units in the last place each. Together, these errors are below 16 (step + 1) u, relative to `rate`
    times `update`. `correction` is the relative error of the bias corrections.
    """
    return (16 * (step + 1) * ROUNDED + correction) * rate * update


def power_correction(beta: float, step: int) -> float:
    """Return the relative error of 1 - beta^step if CUDA's fast power computes beta^step as 2^(step log2 beta).

    The logarithm has an error of 2^-21.4 (CUDA C++ Programming Guide, intrinsic functions: __log2f). The relative error
    is large in the first steps, because 1 - beta^step is small there.
    """
    power = beta**step
    return (step + 1) * 2.0**-21 * power / (1 - power)


def fourier(n: int, dtype: torch.dtype) -> float:
    """Return the error of an element of a Fourier transform of n elements in `dtype`, relative to the root mean square
    of all elements.

    Each of log2(n) stages adds at most 7 u (Higham, 2nd ed., theorem 24.2, whose eta is u + 4 sqrt(2) u). Because the
    roundings are independent, they add up to LIKELY sqrt(log2(n)) 7 u. A length with a prime factor above 7 is computed
    as a convolution (Bluestein), by three transforms of less than four times the length. A factor of 4 then covers the
    norms of the transform of Bluestein's chirp.
    """
    smooth = n
    for factor in (2, 3, 5, 7):
        while smooth % factor == 0:
            smooth //= factor
    stages = math.sqrt(math.log2(n)) if smooth == 1 else 4 * math.sqrt(3 * math.log2(4 * n))
    return LIKELY * 7 * unit_roundoff(dtype) * stages


def orthogonal(n: int, dtype: torch.dtype) -> float:
    """Return the error of applying n reflections or rotations to a matrix of size n, relative to the norm of the
    matrix.

    The worst case is c sqrt(n) u for each and n sqrt(n) u for all (Higham, 2nd ed., lemmas 19.2 and 19.3). With
    independent roundings, n errors add up to sqrt(n) times one error (Higham and Mary, 2019). This gives LIKELY n u.
    """
    return LIKELY * n * unit_roundoff(dtype)


def elimination(n: int, dtype: torch.dtype) -> float:
    """Return the bound of the residual of n equations solved by elimination, relative to |L||U||x|.

    The worst case is gamma_3n (Higham, 2nd ed., theorem 9.4). Because the roundings are independent, 3 n is replaced by
    LIKELY sqrt(3 n).
    """
    return LIKELY * math.sqrt(3 * n) * unit_roundoff(dtype)
