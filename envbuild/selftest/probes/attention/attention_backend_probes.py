"""attention.<backend>: each of torch's attention kernels, against known results and against float64.

One batch contains four problems, so that a single kernel call computes all of them: random values, compared with
float64; V = 1, whose output is 1; q = 0, whose output is the mean of V; and q = k = 40. In the last problem all logits
are equal, so the output is again the mean of V, but the logits exceed float16's range unless the kernel scales them
first. From level standard on, gradients are checked too.

attention_needle_cases.py adds the masks, grouped heads, head sizes, lengths and strides that models use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context, short_name
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.harness.shared_reference_results import EXACT
from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.element_comparison import Worst, compare
from envbuild.selftest.probes.attention import attention_gradient_cases, attention_needle_cases
from envbuild.selftest.probes.attention.attention_half_precision_traits import note_upcast, report_traits
from envbuild.selftest.probes.attention.forced_attention_backend import is_refused, only, skip_deprioritized_cudnn

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# CPU autocast of torch 2.0 supports only bfloat16
AUTOCAST, AUTOCAST_CPU = (torch.float16, torch.bfloat16), (torch.bfloat16,)
DEPTHS = (64, 128)
SHORT, LONG, LONG_CPU = 128, 2925, 365  # 2925 occurs in a video model; LONG and LONG_CPU are not multiples of a tile
# HEADS_FEW: on the CPU, and for LONG at level quick, where making and comparing data take most time
HEADS, HEADS_FEW = 2, 1
PROBLEMS = ("random", "V=1", "q=0", "q=k=40")
LARGE = 40.0
# queries in a kernel's smallest tile; approximate number of evenly spaced queries in `sampled_queries`
TILE, SAMPLES = 64, 48


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention. Queries, keys and values have the shape (len(PROBLEMS), heads, length, depth)."""

    dtype: torch.dtype
    heads: int
    length: int
    depth: int
    causal: bool
    autocast: bool = False
    own: bool = False  # a shape from the profile

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (len(PROBLEMS), self.heads, self.length, self.depth)

    @property
    def name(self) -> str:
        name = "{} {}{}".format(short_name(self.dtype), "x".join(map(str, self.shape)), self.how)
        return f"own {name}" if self.own else name

    @property
    def how(self) -> str:
        return (" causal" if self.causal else "") + (" autocast" if self.autocast else "")


@dataclass(frozen=True)
class Inputs:
    """q, k and v on the host, rounded to the case's dtype; v lies in [0, 1]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attention_math(context: Context) -> None:
    """attention.math: separate products and softmax give known results, and match float64."""
    check_backend(context, "math")


def attention_flash(context: Context) -> None:
    """attention.flash: FlashAttention's kernel gives known results, and matches float64."""
    check_backend(context, "flash")


def attention_efficient(context: Context) -> None:
    """attention.efficient: the memory-efficient kernel gives known results, and matches float64."""
    check_backend(context, "efficient")


def attention_cudnn(context: Context) -> None:
    """attention.cudnn: cuDNN's fused kernel gives known results, and matches float64."""
    skip_deprioritized_cudnn()
    check_backend(context, "cudnn")


def attention_shapes(context: Context) -> Iterator[AttentionCase]:
    """The shapes from the profile first, then the built-in shapes."""
    for shape in context.job.own.attentions:
        yield AttentionCase(getattr(torch, shape.dtype), shape.heads, shape.length, shape.depth, shape.causal, own=True)
    quick = not context.at_least("standard")
    long = LONG_CPU if context.on_cpu else LONG
    many = HEADS_FEW if context.on_cpu else HEADS
    for dtype in DTYPES:
        for depth in DEPTHS:
            for length, heads in ((SHORT, many), (long, HEADS_FEW if quick else many)):
                for causal in (False, True):
                    yield AttentionCase(dtype, heads, length, depth, causal)
    for dtype in AUTOCAST_CPU if context.on_cpu else AUTOCAST:
        yield AttentionCase(dtype, many, SHORT, DEPTHS[0], causal=False, autocast=True)


def attention_inputs(case: AttentionCase) -> Inputs:
    """Return q and k in [-1, 1] and v in [0, 1], rounded to the case's dtype, with the special values of the problems
    filled in. All other values are hashes of counters."""
    return _rounded(case.dtype, case.shape)


@functools.lru_cache(maxsize=1)
def _rounded(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> Inputs:
    """Round the values to `dtype`. The result is cached, because the case with a causal mask and the same case
    without a mask have the same inputs."""
    return Inputs(*(values.to(dtype) for values in _values(shape)))


@functools.lru_cache(maxsize=2 * len(DEPTHS))
def _values(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, ...]:
    """Return q, k and v in float32. Cached per shape, because generating them takes longer than all calculations with
    them."""
    q, k = (hashed_inputs.signed(shape, seed) for seed in (31, 32))
    v = hashed_inputs.uniform(shape, seed=33)
    v[PROBLEMS.index("V=1")] = 1
    q[PROBLEMS.index("q=0")] = 0
    q[PROBLEMS.index("q=k=40")] = LARGE
    k[PROBLEMS.index("q=k=40")] = LARGE
    return q, k, v


def mean_of_keys(v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return the output for equal attention weights: for each query, the mean of v over all keys, or over the keys up
    to the query's position if `causal`. The result is float64 and has the shape of v."""
    if not causal:
        return v.mean(dim=-2, keepdim=True, dtype=torch.float64).expand_as(v)
    places = torch.arange(1, v.shape[-2] + 1, dtype=torch.float64)
    return v.cumsum(dim=-2, dtype=torch.float64).div_(places[:, None])


def sampled_queries(length: int) -> torch.Tensor:
    """Return the queries of the random problem whose output is computed in float64. For a short case these are all
    queries. For a long case they are the first one, the last two, both sides of every fourth tile edge, and evenly
    spaced others. The other three problems are checked for every query."""
    if length <= SHORT:
        return torch.arange(length)
    edges = [place for tile in range(TILE, length, 4 * TILE) for place in (tile - 1, tile)]
    return torch.tensor(sorted({*edges, *range(0, length, length // SAMPLES), length - 2, length - 1}))


def exact_attention(data: Inputs, causal: bool) -> tuple[torch.Tensor, float]:
    """Return softmax(q k^T / sqrt(d)) v in float64 for the sampled queries of the random problem, (heads, queries,
    depth). Also return an upper bound of the sums of |q| |k| / sqrt(d)."""
    q, k, v = (values[0].to(torch.float64) for values in (data.q, data.k, data.v))
    places = sampled_queries(q.shape[-2])
    scale = 1 / math.sqrt(q.shape[-1])
    logits = q[..., places, :] @ k.transpose(-1, -2) * scale
    if causal:
        ahead = torch.arange(k.shape[-2]) > places[:, None]
        logits = logits.masked_fill(ahead, -math.inf)
    largest = float((q.norm(dim=-1).max() * k.norm(dim=-1).max()) * scale)  # Cauchy-Schwarz inequality
    return torch.softmax(logits, dim=-1) @ v, largest


def shared_attention(case: AttentionCase, data: Inputs) -> tuple[torch.Tensor, float]:
    """`exact_attention` of the case, computed once for all backends."""

    def compute() -> tuple[torch.Tensor, ...]:
        reference, logit = exact_attention(data, case.causal)
        return reference, torch.tensor([logit], dtype=torch.float64)

    reference, logit = EXACT.get(f"attention {case}", compute)
    return reference, float(logit)


def check_backend(context: Context, backend: str) -> None:
    """Check one backend: "math", "flash", "efficient" or "cudnn".

    Raises Skip if torch cannot select the backend, or if the backend supports no case on this device.
    """
    if context.on_cpu and backend != "math" and not hasattr(torch.nn, "attention"):
        raise Skip(f"torch {torch.__version__} cannot choose a backend on the CPU")
    context.traits["torch"] = str(torch.__version__)
    if backend == "cudnn":
        context.traits["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if context.on_cpu:
        context.traits["shapes"] = "cpu subset"
    for case in attention_shapes(context):
        data = attention_inputs(case)
        # The math path supports every shape. If it refuses a shape from the profile, the probe therefore fails.
        with context.step(f"{backend} {case.name}", None if case.own and backend == "math" else is_refused) as step:
            got = _attend(context, backend, data, case.causal, case.autocast)
        if not step.refused:
            _judge(context, backend, case, data, got, step.seconds)
    if not context.figures:
        raise Skip(f"no {backend} attention on this device: {next(iter(context.traits['unsupported'].values()))}")
    if context.at_least("standard"):
        attention_gradient_cases.check_gradients(context, backend)
    attention_needle_cases.check_needles(context, backend)
    _tell(context, backend)


def _attend(context: Context, backend: str, data: Inputs, causal: bool, autocast: bool = False) -> torch.Tensor:
    """Return the output on the host. With `autocast`, q is passed as float32, as a norm layer would produce it, while k
    and v keep their dtype."""
    q, k, v = (values.to(context.device) for values in (data.q, data.k, data.v))
    with only(backend):
        if autocast:
            with torch.autocast(context.device.type, data.q.dtype):
                return F.scaled_dot_product_attention(q.to(torch.float32), k, v, is_causal=causal).cpu()
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).cpu()


def _upcast(context: Context, backend: str, data: Inputs, causal: bool) -> torch.Tensor:
    """Return the output for the same values in float32, computed by this backend. If the backend does not support
    float32, the math path computes the output."""
    wide = Inputs(*(values.to(torch.float32) for values in (data.q, data.k, data.v)))
    try:
        return _attend(context, backend, wide, causal)
    except RuntimeError as error:
        if not is_refused(error):
            raise
        return _attend(context, "math", wide, causal)


def _tell(context: Context, backend: str) -> None:
    def attend(*data: torch.Tensor) -> torch.Tensor | None:
        try:
            return _attend(context, backend, Inputs(*data), causal=False)
        except RuntimeError as error:
            if not is_refused(error):
                raise
            return None

    context.step(f"{backend} in half precision")
    report_traits(context, attend, lambda *data: _upcast(context, backend, Inputs(*data), causal=False))


def _judge(
    context: Context, backend: str, case: AttentionCase, data: Inputs, got: torch.Tensor, seconds: float
) -> None:
    equal = tolerances.attention_floor(case.dtype, 0.0, case.depth, case.length, context.job.allow_tf32)
    if got.shape != case.shape or got.dtype not in (case.dtype, *([torch.float32] if case.autocast else [])):
        context.fail("mismatch", f"{case.name}: output is {tuple(got.shape)} {got.dtype}")
        return
    reference, logit = shared_attention(case, data)
    known = [mean_of_keys(v, case.causal) for v in data.v[1:]]
    limits = (_random_bound(context, backend, case, data, reference, logit), equal, equal, equal)
    smallest, largest = float(got.min()), float(got.max())  # NaN if any element is NaN
    is_finite = math.isfinite(smallest) and math.isfinite(largest)
    found = [
        _compare_sampled(reference, got, limits[0], is_finite),
        *(compare(*each, torch.tensor(equal, dtype=torch.float64)) for each in zip(got[1:], known)),
    ]
    before = len(context.faults)
    for problem, worst in zip(PROBLEMS, found):
        context.compared(problem + case.how, case.dtype, case.shape, worst, seconds)
        if worst.wrong:
            context.fail(worst.kind, f"{problem} {case.name}: {worst}")
    if len(context.faults) > before:
        wide = _upcast(context, backend, data, case.causal)
        helps = case.dtype != torch.float32 and all(
            compare(values, wanted).error <= limit
            for values, wanted, limit in zip(wide, [_completed(reference, wide), *known], limits)
        )
        # setdefault: the first wrong case decides
        context.traits.setdefault("workaround", "upcast" if helps else "none")
        if helps:
            note_upcast(context, case.dtype)
    low, high = float(data.v.min()) - equal, float(data.v.max()) + equal
    if not low <= smallest <= largest <= high:
        context.fail("bound", f"{case.name}: output leaves the range of V, {low:g} to {high:g}")


def _compare_sampled(reference: torch.Tensor, output: torch.Tensor, limit: float, is_finite: bool) -> Worst:
    """Compare the sampled queries of the random problem. If any element is wrong or not finite, compare the whole
    output to find its position."""
    bound = torch.tensor(limit, dtype=torch.float64)
    worst = compare(output[0, :, sampled_queries(output.shape[-2])], reference, bound)
    if worst.wrong or not is_finite:
        worst = compare(output[0], _completed(reference, output), bound)
    return worst


def _completed(reference: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the random problem's output with the sampled queries replaced by the reference. Of the other queries, only
    NaN and infinity are then detected."""
    whole = output[0].to(torch.float64)
    whole[..., sampled_queries(output.shape[-2]), :] = reference
    return whole


def _random_bound(
    context: Context, backend: str, case: AttentionCase, data: Inputs, reference: torch.Tensor, logit: float
) -> float:
    """Return the tolerance for the random problem: twice the error of the math path in the same precision, but at least
    the floor and at most the cap of the rounding errors. For the math path itself, it is the cap."""
    cap = tolerances.attention_cap(case.dtype, logit, case.depth, case.length, context.job.allow_tf32)
    if backend == "math":
        return cap
    random = Inputs(*(values[:1] for values in (data.q, data.k, data.v)))
    output = _attend(context, "math", random, case.causal)[0, :, sampled_queries(case.length)]
    error = float((output.to(torch.float64) - reference).abs().max())
    floor = tolerances.attention_floor(case.dtype, logit, case.depth, case.length, context.job.allow_tf32)
    return min(cap, max(floor, 2 * error if math.isfinite(error) else cap))
