"""Attention in which a few keys decide every result: masks, grouped heads, head sizes, lengths and strides of models.

The keys are divided into classes, and each query looks for one class. All keys of a class have the same code of +-1,
with small differences between the keys. The query is 16 times the code of its class, and one further column subtracts
the score of a full match. So the keys of that class have scores between -4 and 4. The score of any other key is so much
lower that its weight is lost in rounding.

The result of a query therefore depends on a handful of keys, on each of them by more than the tolerance. For every
position, in some sample and head, a query looks for the class of the key there (with local masks or a single query, for
most positions). tests/selftest/probes/attention/test_attention_needle_cases.py checks both statements for every case.
Thus the comparison detects a key that is not read, is read twice, comes from a different tile or head, or is shown or
hidden by mistake. A kernel that reads zeros beyond the last key is detected too, because such a key would score 0, like
a match.

Neighbouring keys share a class, so that causal and local masks are tested on both sides of their edge. Scores rise
along the keys: the largest come last, so that an online softmax must rescale its partial sums. In every eighth column
the queries are 0 and the keys differ, so that the gradients of the queries are large in this column. Every input is
exact in each dtype, and every product and sum in a score is exact in float32. Therefore one reference serves all
dtypes: the softmax over the keys of the class, in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context, short_name
from envbuild.selftest.harness.shared_reference_results import EXACT
from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.element_comparison import compare
from envbuild.selftest.numerics.layouts_with_nan_gaps import with_nan_gaps
from envbuild.selftest.probes.attention.attention_gradient_cases import ROUNDINGS, ROUNDINGS_CPU, TITLES, Three
from envbuild.selftest.probes.attention.forced_attention_backend import is_refused, only

DEPTHS = (40, 64, 72, 80, 96, 128, 160, 256)
MASKS = ("none", "causal", "window", "padding", "bias")
LAYOUTS = ("contiguous", "heads inside", "padded", "packed")
HEADS = ((2, 2), (4, 2), (3, 1))  # (heads of the queries, heads of the keys and values)
# (number of queries, number of keys); most are near multiples of a tile.
LENGTHS = (
    (129, 129),
    (127, 127),
    (65, 257),
    (257, 65),
    (1, 193),
    (255, 255),
    (63, 191),
    (192, 128),
    (193, 193),
    (64, 255),
    (257, 257),
)
CASES, CASES_QUICK = 40, 8  # 40 cover every pair of values of depth, mask, layout and heads; 8 cover every single value
LONG, LONG_CPU_QUICK = 2925, 365  # the same lengths as in attention_backend_probes.py
BATCH = 2

SHARP = 16  # the factor between a query's code and a key's code
NEAR = 4.0  # the largest score of a key in the class that a query looks for
LOST = tolerances.ROUNDED  # an upper bound of the total weight of all keys of other classes
LEVEL, OFFSET, FREE = 0, 1, 7  # two special columns, and column % 8 where queries are 0 and have large gradients
WINDOW = 40  # with the mask "window": the number of keys that a query sees on each side
STRIDE = 1237  # a prime: successive queries look for keys that are this far apart
SEED = 81

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class NeedleCase:
    """One call: queries of (batch, heads, queries, depth), keys and values of (batch, groups, keys, depth)."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    depth: int
    mask: str = MASKS[0]
    layout: str = LAYOUTS[0]

    @property
    def name(self) -> str:
        shape = f"{self.batch}x{self.heads}x{self.queries}x{self.depth}"
        return f"{shape} on {self.groups}x{self.keys} keys{self.how}"

    @property
    def how(self) -> str:
        return "".join(f" {what}" for what in (self.mask, self.layout) if what not in (MASKS[0], LAYOUTS[0]))

    @property
    def coded(self) -> list[int]:
        """The indices of the columns that contain the code."""
        return [column for column in range(2, self.depth) if column % 8 != FREE]

    @property
    def classes(self) -> int:
        """The number of classes. Each class has at least four keys, and usually some query looks for it."""
        return min(self.keys // 4, max(self.heads, self.queries * self.heads // 8))

    @property
    def largest_sum(self) -> float:
        """The largest sum of |q| |k| / sqrt(depth), approximately."""
        return 2 * SHARP * len(self.coded) / math.sqrt(self.depth)


@dataclass(frozen=True)
class Needle:
    """Inputs in float32, torch's mask (bool, or float32 to be added), and the expected results in float64.

    `spreads`: the magnitudes that tolerances.attention_gradient_floor is relative to, as in
    attention_gradient_cases.ExactGradients.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    mask: torch.Tensor | None
    output: torch.Tensor
    gradients: Three
    spreads: Three


def needle_cases(context: Context, backend: str) -> Iterator[tuple[NeedleCase, torch.dtype]]:
    """Yield the long cases first, then cases in which all parameters vary. Each case has one of the dtypes that the
    backend may support."""
    quick = not context.at_least("standard")
    dtypes = _dtypes(context, backend)
    long = LONG_CPU_QUICK if context.on_cpu and quick else LONG
    # The depth is 128, because with 64 some weights are subnormal numbers, which make a CPU five times as slow.
    yield NeedleCase(1, 1, 1, long, long, 128), dtypes[0]
    yield NeedleCase(1, 1, 1, long, long, 128, "causal"), dtypes[-1]
    drawn = hashed_inputs.hashes(CASES, SEED).tolist()
    for index in range(CASES_QUICK if quick else CASES):
        yield varied(index), dtypes[drawn[index] % len(dtypes)]


def varied(index: int) -> NeedleCase:
    """Return the case with this index. The lists of values, except LAYOUTS, have lengths without common factors, so
    that all pairs of values occur soon. The layouts are shifted by one after each pass through DEPTHS, because both
    lengths are multiples of 4."""
    heads, groups = HEADS[index % len(HEADS)]
    queries, keys = LENGTHS[index % len(LENGTHS)]
    depth, mask = DEPTHS[index % len(DEPTHS)], MASKS[index % len(MASKS)]
    return NeedleCase(
        BATCH, heads, groups, queries, keys, depth, mask, LAYOUTS[(index + index // len(DEPTHS)) % len(LAYOUTS)]
    )


def _dtypes(context: Context, backend: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes for a backend. The math path scales q and k before their product and rounds them. Its inputs
    therefore need a finer dtype than half precision or TF32."""
    if backend == "math":
        return (torch.float64 if context.job.allow_tf32 else torch.float32,)
    halves = (torch.float16, torch.bfloat16)
    return halves if backend in ("flash", "cudnn") and not context.on_cpu else (*halves, torch.float32)


@functools.lru_cache(maxsize=1)
def make_needle(case: NeedleCase) -> Needle:
    """Return the inputs and the reference of a case. The reference is computed once for all backends. All values are
    hashes of counters."""
    low, high = _seen(case)
    wanted = _wanted(case, low, high)
    batches, heads = torch.arange(case.batch)[:, None], torch.arange(case.heads)
    group = heads // (case.heads // case.groups)
    # pairs of keys of one class begin at even positions in some heads, at odd positions in others
    shift = batches + torch.arange(case.groups)
    classes = (torch.arange(case.keys) + shift[..., None]) // 2 % case.classes
    sought = (wanted + shift[:, group, None]) // 2 % case.classes

    codes = _signs((case.batch, case.groups, case.classes, len(case.coded)), SEED + 1)
    q = torch.zeros(case.batch, case.heads, case.queries, case.depth)
    q[..., LEVEL], q[..., OFFSET] = round(math.sqrt(case.depth)), SHARP * len(case.coded)
    q[..., case.coded] = SHARP * codes[batches[..., None], group[:, None], sought]
    k = _signs((case.batch, case.groups, case.keys, case.depth), SEED + 2)
    k[..., LEVEL], k[..., OFFSET] = torch.arange(case.keys) * 64 // case.keys / 64, -1
    own = codes[batches[..., None], torch.arange(case.groups)[:, None], classes]
    k[..., case.coded] = own * (1 + hashed_inputs.ternary(own.shape, SEED + 3) / SHARP)
    # multiples of 1/256 in [0, 1), which bfloat16 represents
    v = (hashed_inputs.uniform(k.shape, SEED + 4) * 256).floor() / 256
    grad = _signs(q.shape, SEED + 5)

    mask = _mask(case, low, high, wanted)
    rows = torch.arange(-(-(case.keys + 2 + case.batch + case.groups) // (2 * case.classes)))
    pairs = 2 * (sought[..., None] + case.classes * rows) - shift[:, group, None, None]
    places = torch.stack((pairs, pairs + 1), dim=-1).flatten(-2)
    visible = (places >= low[:, None, :, None]) & (places < high[:, None, :, None])
    solve = functools.partial(_solved, case, (q, k, v, grad), mask, places.clamp(0, case.keys - 1), visible)
    output, for_q, for_k, for_v, of_q, of_k, of_v = EXACT.get(f"attention needle {case}", solve)
    return Needle(q, k, v, grad, mask, output, (for_q, for_k, for_v), (of_q, of_k, of_v))


def _solved(
    case: NeedleCase, given: Four, mask: torch.Tensor | None, places: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the output, the gradients of q, k and v, and the spreads of these gradients.

    `places`: the positions of the keys in each query's class, (batch, heads, queries, number of keys). `visible`:
    whether the query sees the key. The gradients and spreads are those of attention_gradient_cases.exact_gradients,
    summed over these keys only.
    """

    def dotted(of_keys: torch.Tensor, of_queries: torch.Tensor) -> torch.Tensor:
        return (of_keys @ of_queries[..., None]).squeeze(-1)

    q, k, v, grad = (values.to(torch.float64) for values in given)
    batches, heads = torch.arange(case.batch).view(-1, 1, 1, 1), torch.arange(case.heads).view(-1, 1, 1)
    groups = heads // (case.heads // case.groups)
    its_k, its_v = k[batches, groups, places], v[batches, groups, places]
    scale = 1 / math.sqrt(case.depth)
    scores = dotted(its_k, q) * scale
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.to(torch.float64)[0, heads, torch.arange(case.queries)[:, None], places]
    weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
    slope, sizes = dotted(its_v, grad), dotted(its_v.square(), grad.square()).sqrt()
    total = (weights * slope).sum(-1, keepdim=True)
    row = total.abs() + (weights * sizes).sum(-1, keepdim=True)
    change, terms = weights * (slope - total), weights * (slope.abs() + sizes + row)

    keys = ((batches * case.groups + groups) * case.keys + places).flatten()

    def mixed(factors: torch.Tensor, of_keys: torch.Tensor) -> torch.Tensor:
        return (factors[..., None, :] @ of_keys).squeeze(-2)

    def gathered(factors: torch.Tensor, of_queries: torch.Tensor) -> torch.Tensor:
        parts = (factors[..., None] * of_queries[..., None, :]).flatten(0, -2)
        return torch.zeros(k.numel() // case.depth, case.depth, dtype=k.dtype).index_add(0, keys, parts).view(k.shape)

    gradients = (scale * mixed(change, its_k), scale * gathered(change, q), gathered(weights, grad))
    spread = mixed(terms.square(), its_k.square()).sqrt() + row * mixed(weights, its_k).abs()
    squares = gathered(terms.square(), q.square()), gathered(weights.square(), grad.square())
    spreads = (scale * spread, scale * squares[0].sqrt(), squares[1].sqrt())
    return mixed(weights, its_v), *gradients, *spreads


def _signs(shape: tuple[int, ...] | torch.Size, seed: int) -> torch.Tensor:
    return hashed_inputs.signs(math.prod(shape), seed).reshape(shape)


def _seen(case: NeedleCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each query, the first key that it sees and the key after the last one that it sees: two tensors
    (batch, queries). With "causal", query i sees keys 0 to i whatever the lengths, as torch documents."""
    rows, zero = torch.arange(case.queries), torch.zeros(case.batch, case.queries, dtype=torch.int64)
    low, high = zero, zero + case.keys
    if case.mask == "causal":
        high = zero + (rows + 1).clamp(max=case.keys)
    elif case.mask == "window":
        centre = rows * case.keys // case.queries
        low, high = zero + (centre - WINDOW).clamp(min=0), zero + (centre + WINDOW + 1).clamp(max=case.keys)
    elif case.mask == "padding":
        high = high - torch.arange(case.batch)[:, None] * (case.keys // 3)
    return low, high


def _wanted(case: NeedleCase, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return, for each query, the position of one key in the class that the query looks for, (batch, heads, queries).
    For successive queries these positions are far apart. In every second head with a causal or window mask, the
    position is the last visible key."""
    low, high = low[:, None], high[:, None]
    batch, head = torch.arange(case.batch)[:, None, None], torch.arange(case.heads)[:, None]
    apart = low + (torch.arange(case.queries) * STRIDE + 2 * (case.heads * batch + head)) % (high - low)
    if case.mask in ("causal", "window"):
        return torch.where(head % 2 == 0, high - 1, apart)
    return apart


def _mask(case: NeedleCase, low: torch.Tensor, high: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """Return a boolean mask of (queries, keys) or (batch, 1, 1, keys), or an additive mask of (1, heads, queries,
    keys), or None. The additive mask contains multiples of 1/8 in [-1, 1), and -inf at about one in four positions."""
    if case.mask == "window":
        places = torch.arange(case.keys)
        return (places >= low[0, :, None]) & (places < high[0, :, None])
    if case.mask == "padding":
        return (torch.arange(case.keys) < high[:, :1])[:, None, None]
    if case.mask == "bias":
        drawn = hashed_inputs.hashes(case.heads * case.queries * case.keys, SEED + 6)
        drawn = drawn.view(1, case.heads, case.queries, case.keys) % 64
        hidden = (drawn < 16).scatter(-1, wanted.permute(1, 2, 0)[None], False)
        return ((drawn % 16) / 8 - 1).masked_fill(hidden, -math.inf)
    return None


def check_needles(context: Context, backend: str) -> None:
    """Run and check every case; from level standard on with gradients. Record the cases for which the backend or this
    torch version has no kernel."""
    for case, dtype in needle_cases(context, backend):
        needle = make_needle(case)
        name = f"{short_name(dtype)} {case.name}"
        with context.step(f"{backend} needle {name}", is_refused) as step:
            got = _attend(context, backend, case, needle, dtype)
        if step.refused:
            continue
        wanted = (needle.output, *needle.gradients)
        limits = _limits(context, backend, case, needle, dtype)
        for title, values, expected, limit in zip(("output", *TITLES), got, wanted, limits):
            worst = compare(values, expected, limit)
            what = f"{title} of needle"
            context.compared(what + case.how, dtype, values.shape, worst, step.seconds)
            if worst.wrong:
                context.fail(worst.kind, f"{what} {name}: {worst}")


def _attend(context: Context, backend: str, case: NeedleCase, needle: Needle, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the output on the host, and from level standard on also the gradients of q, k and v."""
    backward = context.at_least("standard")
    q, k, v, grad = (
        lay_out_heads(values.to(context.device, dtype), case.layout).detach()
        for values in (needle.q, needle.k, needle.v, needle.grad)
    )
    options: dict[str, Any] = {"dropout_p": 0.0}
    if needle.mask is not None:
        mask = needle.mask.to(context.device)
        options["attn_mask"] = mask if mask.dtype == torch.bool else mask.to(dtype)
    if case.mask == "causal":
        options["is_causal"] = True
    if case.groups != case.heads:
        options["enable_gqa"] = True
    for values in (q, k, v):
        values.requires_grad_(backward)
    with only(backend):
        output = F.scaled_dot_product_attention(q, k, v, **options)
        found = backward_pass.gradients(output, (q, k, v), grad) if backward else ()
    return [values.detach().cpu() for values in (output, *found)]


def lay_out_heads(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the values in a tensor (batch, heads, length, depth) with different strides.

    "heads inside": the heads vary faster than the positions. "padded": rows and columns are parts of a larger tensor.
    "packed": the tensor is one half of a combined projection. Gaps contain NaN, so that a kernel that reads them gives
    wrong results.
    """
    batch, heads, length, depth = values.shape
    if layout == "heads inside":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        return with_nan_gaps(values, "rows apart")
    if layout == "packed":
        return values.new_full((batch, length, 2, heads, depth), math.nan)[:, :, 1].transpose(1, 2).copy_(values)
    return values.contiguous()


def _limits(context: Context, backend: str, case: NeedleCase, needle: Needle, dtype: torch.dtype) -> Four:
    """Return the tolerances of the output and of each gradient. Only the math path rounds the scores, because it scales
    q and k first. In a fused kernel the scores are exact, so the tolerance is that for scores of at most NEAR."""
    by_math, length, tf32 = backend == "math", max(case.queries, case.keys), context.job.allow_tf32
    logit = case.largest_sum if by_math else NEAR
    forward = tolerances.attention_cap if by_math else tolerances.attention_floor
    backward = tolerances.attention_gradient_cap if by_math else tolerances.attention_gradient_floor
    factor = backward(dtype, logit, case.depth, length, tf32)
    roundings = ROUNDINGS_CPU if context.on_cpu else ROUNDINGS
    of_q, of_k, of_v = (
        factor * spread + LOST * spread.max() + roundings * tolerances.rounding(wanted, dtype)
        for wanted, spread in zip(needle.gradients, needle.spreads)
    )
    return torch.tensor(forward(dtype, logit, case.depth, length, tf32), dtype=torch.float64), of_q, of_k, of_v
