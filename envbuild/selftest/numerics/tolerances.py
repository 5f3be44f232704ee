"""How far a right result may be from the exact one. Pure formulas; u is a unit roundoff, k a length of summation.

gamma and the GEMM form are the classical ones (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 3.1
and 3.5). 2^-23 instead of 2^-24 stands for tensor cores that truncate instead of rounding (Fasi, Higham, Mikaitis and
Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). Emulated tensor cores of every generation from Volta to
Blackwell, on inputs uniform in [0, 1) and k = 64..16384, err by at most 0.41 of what a tolerance leaves beyond the
rounding of the result; with sums kept in half precision they exceed it (tests/pretend/test_tolerances.py).
"""

from __future__ import annotations

import math

import torch

ACCUMULATOR = 2.0**-23  # a float32 accumulator that truncates
ROUNDED = 2.0**-24  # one that rounds to nearest
LIKELY = 6.0  # times the root of a sum of squares: passed with a probability below 4e-8
TF32 = 2.0**-10  # TF32 truncates each factor to 10 bits of fraction

_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Half the distance of subnormal numbers; where a device flushes those to zero, the smallest normal number.
_SUBNORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}


def unit_roundoff(dtype: torch.dtype) -> float:
    """u of rounding to nearest: half the distance from 1 to the next larger number of that dtype."""
    return _UNIT[str(dtype).replace("torch.", "")]


def factor_roundoff(dtype: torch.dtype, tf32: bool) -> float:
    """u of what enters a product: float32 factors keep TF32's 10 bits where that is allowed."""
    return TF32 if tf32 and dtype == torch.float32 else unit_roundoff(dtype)


def gamma(k: int, u: float) -> float:
    """k u / (1 - k u), Higham's lemma 3.1; infinite where k u is not below 1, as nothing is promised then."""
    return k * u / (1 - k * u) if k * u < 1 else math.inf


def gemm(exact: torch.Tensor, magnitude: torch.Tensor, k: int, dtype: torch.dtype, tf32: bool = False) -> torch.Tensor:
    """Elementwise bound of |C - C*| for C = A B of inner length k with float32 accumulation, rounded once to `dtype`.

    `exact` is C* in float64 from the inputs as quantised, `magnitude` |A| |B|; both (m, n), as is the result:
    u |C*| + gamma_k(2^-23) |A||B|, and with TF32 2 * 2^-10 |A||B| more, as both factors of each product are truncated.
    """
    relative = gamma(k, ACCUMULATOR) + (2 * TF32 if tf32 and dtype == torch.float32 else 0.0)
    return unit_roundoff(dtype) * exact.abs() + relative * magnitude


def half_sums(exact: torch.Tensor, magnitude: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """The same where parts of the sum are kept in `dtype`: LIKELY sqrt(ceil(k / 32)) u |A||B| more.

    Split-K rounds the sum of each slice and adds those up in `dtype`; a slice has 32 products at least, the smallest
    step of a tensor core's tile. So many independent roundings, each of a partial sum of at most |A||B|, leave that
    with a probability below 2 exp(-LIKELY^2 / 2) (Hoeffding; Higham and Mary, 2019, theorem 2.4, as below). Winograd's
    rounded transforms have worst-case bounds too wide to be of use (Barabasz, Anderson, Soodhalter and Gregg, "Error
    analysis and improving the accuracy of Winograd convolution", 2020); emulated, F(2x2, 3x3) and F(4x4, 3x3) stay
    below half of this (tests/selftest/probes/convolution/test_conv_fixed_cases.py). Written for float16;
    of bfloat16 it would ask next to nothing.
    """
    return gemm(exact, magnitude, k, dtype) + LIKELY * math.sqrt(math.ceil(k / 32)) * unit_roundoff(dtype) * magnitude


def fp8(exact: torch.Tensor, magnitude: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """The same for factors of 8 bits with positive products: k 2^-15 |A||B| more.

    Ada's and Hopper's tensor cores keep 13 fraction bits of each product, relative to the largest exponent among the
    products that they add and the running sum (arXiv 2511.10909), and cut the rest toward zero. Cutting costs half a
    unit of the running sum per product on average: emulated for inputs uniform in [0, 1) and k = 128..16384, the error
    is at most 0.57 of this on Ada and Hopper, and next to nothing on Blackwell (tests/pretend/test_tolerances.py). Sums
    that are promoted to float32 on the way err less. A sum that is cut to float16's 10 bits passes as well: gemm.fp8
    sees that on large integers.
    """
    return gemm(exact, magnitude, k, dtype) + k * 2.0**-15 * magnitude


def rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding to `dtype` takes from `exact` at most, results below the normal range included."""
    return exact.abs().mul_(unit_roundoff(dtype)).add_(_SUBNORMAL[str(dtype).replace("torch.", "")])


def summation(n: int) -> float:
    """Relative error of a float32 sum of n terms and of what little is done around it: gamma_m(2^-24) with m =
    ceil(n / 32) + 16, as sums run in 32 lanes or more, which a tree of few levels ends.
    """
    return gamma(math.ceil(n / 32) + 16, ROUNDED)


def running_sum(terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Error of whole numbers that are added one after the other, where each sum is rounded to `dtype`.

    `terms` (n, ...) in the order of addition; the bound has the shape of one term. A rounding takes u |S| at most, with
    S the computed sum, and nothing from a whole number up to 1 / u: running error analysis (Higham, 2nd ed., 4.3).
    """
    u = unit_roundoff(dtype)
    total, error = torch.zeros_like(terms[0]), torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
        largest = total.abs() + error
        error = error + torch.where(largest > 1 / u, u * largest, 0.0)
    return error


def norm(magnitude: torch.Tensor, n: int, times: int, dtype: torch.dtype, roundings: int) -> torch.Tensor:
    """Elementwise bound of the arithmetic of a norm over n elements, without the rounding of its result.

    4 summation(n) `magnitude`, which is |w| (|x| + mean |x|) / sigma + |b| for LayerNorm and GroupNorm, whose x - mean
    may cancel, and |y| for RMSNorm; for a gradient it is the gradient with every term positive, and `times` 2, as an
    error of x / sigma enters twice. Tried for n = 256..8192: right norms stay below 0.05 of it, with statistics in half
    precision they are above 1.9; with n instead of m those would pass.

    `roundings`: those to `dtype` that an implementation is known to do on the way.
    """
    arithmetic = 4 * times * summation(n)
    return (arithmetic + roundings * unit_roundoff(dtype)) * magnitude


def attention_score(depth: int, u: float) -> float:
    """Error of a score q k^T scale, relative to |q||k| scale: the math path scales both factors before it multiplies
    them, and adds a mask (4 u); its float32 sum of `depth` products that are not exact any more has independent
    roundings (Higham and Mary, 2019, theorem 2.4, as below)."""
    return 4 * u + LIKELY * math.sqrt(depth + 4) * ROUNDED


def attention_floor(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """What a fused kernel is always allowed, relative to max |V|.

    One rounding of the probabilities and one of the output (2 u), and float32 arithmetic: logits up to `logit` in
    magnitude with sums over `depth` and their scaling, whose error enters softmax twice (numerator and denominator);
    the exponentials and the two sums over `length`.
    """
    arithmetic = 2 * math.expm1(gamma(depth + 2, ACCUMULATOR) * logit) + 2 * gamma(length + 4, ACCUMULATOR)
    return 2 * factor_roundoff(dtype, tf32) + arithmetic


def attention_cap(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """What no kernel is ever allowed to pass, relative to max |V|.

    A path that keeps everything in `dtype` rounds the scaled q and k, the logits, the probabilities (numerator and
    quotient) and the output: the logits' error, 3 u `logit`, enters softmax twice.
    """
    u = factor_roundoff(dtype, tf32)
    return 2 * math.expm1(3 * u * logit) + 3 * u + attention_floor(dtype, logit, depth, length, tf32)


def attention_gradient_floor(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """What a fused kernel is always allowed of a gradient, relative to its `spread`; its own rounding comes beside.

    `spread` is the root of the sum over the squares of the terms, each with what it is a difference of made positive
    (probes/attention/attention_gradient_cases.py). Roundings to `dtype` are independent of each other, so that n of
    them of unit u leave LIKELY n u `spread` with a probability below 2 exp(-LIKELY^2 / 2) (Hoeffding; Higham and
    Mary, "A new approach to probabilistic rounding error analysis", 2019, theorem 2.4); what a worst case allows is
    wider than the gradients. A fused kernel rounds the output, by way of which the row's sum enters, and the factor
    of the last product.

    Arithmetic in float32 is bounded as in the forward pass, with the sums over `depth` of dO V and dO O; sums of
    absolute values over `depth` or `length` terms are at most sqrt(depth) or sqrt(length) times the roots.
    """
    forward = 2 * math.expm1(gamma(depth + 2, ACCUMULATOR) * logit) + 2 * gamma(length + 4, ACCUMULATOR)
    arithmetic = forward + math.sqrt(depth) * gamma(depth + 2, ACCUMULATOR) + gamma(length, ACCUMULATOR)
    return 2 * LIKELY * factor_roundoff(dtype, tf32) + math.sqrt(length) * arithmetic


def attention_gradient_cap(dtype: torch.dtype, logit: float, depth: int, length: int, tf32: bool = False) -> float:
    """What no kernel is ever allowed to pass, likewise: a path that keeps everything in `dtype` rounds the logits (as
    in the forward pass: 3 u `logit`, twice), the probabilities twice, the gradients of those and of the logits, the
    row's sum and the scaled factor, and the result once more as it is scaled back: 7 u beside the floor.
    """
    u = factor_roundoff(dtype, tf32)
    floor = attention_gradient_floor(dtype, logit, depth, length, tf32)
    return LIKELY * (2 * math.expm1(3 * u * logit) + 7 * u) + floor


def softmax(exact: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Elementwise bound of the arithmetic of softmax over the last dimension, without the rounding of its result:
    rounding x - max(x) moves the exponential by as much, and then there is the sum."""
    distance = x.amax(dim=-1, keepdim=True) - x
    return 4 * summation(x.shape[-1]) * (1 + distance) * exact.abs()


def log_softmax(exact: torch.Tensor, n: int) -> torch.Tensor:
    """The same of log_softmax over n elements, absolute: x - max(x) is rounded, and so is the logarithm of the sum, to
    which each exponential brings the rounding of its own x - max(x), weighted (log n of them at most)."""
    return 4 * summation(n) * (1 + exact.abs())


def activation(x: torch.Tensor) -> torch.Tensor:
    """The same of x times a factor in [0, 1] that float32 knows to 16 roundings of 1: gelu in both forms, and silu."""
    return 16 * ROUNDED * x.abs()


def adam(rate: float, update: torch.Tensor, step: int, correction: float) -> torch.Tensor:
    """Elementwise bound of the arithmetic of one step of Adam in float32, without the rounding of its result.

    `update` is the step over `rate`, with every term positive. Each step before rounds both moments (5 u a step), and
    the last rounds 16 times where division and root are the fast ones of CUDA (2 units in the last place each): below
    16 (step + 1) u. `correction` is the relative error that the bias corrections bring.
    """
    return (16 * (step + 1) * ROUNDED + correction) * rate * update


def power_correction(beta: float, step: int) -> float:
    """Relative error of 1 - beta^step where the power is CUDA's fast one, 2^(step log2 beta): the logarithm is known to
    2^-21.4 (CUDA C++ Programming Guide, intrinsic functions: __log2f), and what is left of 1 is small at first.
    """
    power = beta**step
    return (step + 1) * 2.0**-21 * power / (1 - power)


def fourier(n: int, dtype: torch.dtype) -> float:
    """Error of each element of a Fourier transform of n elements in `dtype`, relative to the root mean square of all.

    Each of log2(n) stages brings 7 u at worst (Higham, 2nd ed., theorem 24.2, whose eta is u + 4 sqrt(2) u), and as the
    roundings are independent of each other they add up to LIKELY times the root. Lengths of large prime factors are
    computed as a convolution (Bluestein) by three transforms of less than four times the length; a factor of 4 is for
    the norms of the chirp's transform.
    """
    smooth = n
    for factor in (2, 3, 5, 7):
        while smooth % factor == 0:
            smooth //= factor
    stages = math.sqrt(math.log2(n)) if smooth == 1 else 4 * math.sqrt(3 * math.log2(4 * n))
    return LIKELY * 7 * unit_roundoff(dtype) * stages


def orthogonal(n: int, dtype: torch.dtype) -> float:
    """Error of n reflections or rotations of a matrix of size n, relative to the norm of what they are applied to.

    Each is known to c sqrt(n) u at worst, all to n sqrt(n) (Higham, 2nd ed., lemmas 19.2 and 19.3); where roundings are
    independent of each other the sum of n terms grows by its root (Higham and Mary, 2019): LIKELY n u.
    """
    return LIKELY * n * unit_roundoff(dtype)


def elimination(n: int, dtype: torch.dtype) -> float:
    """Residual of a system of n equations solved by elimination, relative to |L||U||x|: gamma_3n (Higham, 2nd ed.,
    theorem 9.4), with the root of 3 n as the roundings are independent of each other."""
    return LIKELY * math.sqrt(3 * n) * unit_roundoff(dtype)
