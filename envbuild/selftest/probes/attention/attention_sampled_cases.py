"""attention.cases: scaled_dot_product_attention with torch's default backend and with each backend, on sampled
arguments.

All inputs are integers, small enough for every dtype, so that most scores are exact. The keys are divided into classes,
whose codes consist of +-1; each class has four variants of its code. A query has the code of one visible key: the one
nearest to a position that moves from query to query. The keys of that class have nearly all of the weight, also at the
edge of a mask. If there are many keys for few queries, the variants repeat.

Only elements that affect the result in every dtype are inputs of a case. These are the queries that see all variants of
their class, the keys and values that some query looks for, the gradients of the output for queries that see a key, and
often the elements of an additive mask for pairs of such queries and keys. All other elements are constants of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import backward_pass, hashed_inputs, pairwise_case_sampling, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_nan_gaps import LAYOUTS, with_nan_gaps
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.probes.attention import attention_needle_cases, multihead_cases
from envbuild.selftest.probes.attention.attention_gradient_cases import ROUNDINGS, ROUNDINGS_CPU
from envbuild.selftest.probes.attention.forced_attention_backend import cudnn_is_deprioritized, is_refused, only

CHOSEN = "torch's choice"
BACKENDS_CPU = (CHOSEN, "math", CHOSEN, "flash")
BACKENDS = (CHOSEN, "math", "flash", "efficient", "cudnn")
COUNTS = {"quick": 64, "standard": 320, "full": 3000}
TITLES = ("gradient of q", "gradient of k", "gradient of v", "gradient of the mask")
MOST = 200_000  # maximum number of elements of all inputs and scores of a case

# How the keys of a class are arranged, or how large the scores are.
SCATTERED, LATE, FLAT, HIGH, LOW = "scattered", "late", "flat", "near 100", "near -100"
SCORES = (SCATTERED, LATE, FLAT, HIGH, LOW)  # with FLAT, all keys belong to one class
OFFSET = 100.0  # the exponential of a score above 100 exceeds float32's range
VARIANTS = 4  # variants of a class's code: two pairs; the variants of the first pair differ in every column
# lower bounds: approximately of the score of a key of the class, and of `Call.element`
MATCH, ELEMENT = 8.0, 0.25
SPREAD, SPREAD_FLAT = 0.7, 0.2  # approximate spread of the scores within a class
# by dtype, the maximum number of queries per class of keys, because the gradient of a key is a sum over these queries
SHARED = {torch.bfloat16: 60}
SHARED_OTHERS = 200
COARSE = 1 / 12  # the smallest factor of the scores (1 / sqrt(depth) or `scale`) for scores around +-100 in bfloat16
REPEATED = 16  # the most keys per class with which elements of a mask are inputs

HIDING = ("causal", "boolean", "added -inf", "learned -inf")
GIVEN = ("boolean", "added", "learned", "added -inf", "learned -inf")  # masks that are passed as tensors
LEARNED = ("learned", "learned -inf")  # masks that have a gradient
_NO_MASK_GRADIENT = "derivative for 'attn_bias' is not implemented"  # from torch, for cuDNN's attention
HIDDEN_ROWS = "some queries see nothing"
HIDDEN_EVERY = 5  # distance between two queries that see no key
SHAPES = ("queries x keys", "1x1", "batch x 1", "1 x heads", "batch x heads", "batch x 1 x 1")

# A length is the sum of a multiple of a tile or block size and an offset ("past").
LENGTHS, PAST = (0, 16, 32, 64, 128, 256), (1, -1, 0, 1, 2, 5, 8, -3, -8)
LENGTHS_KEYS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048)

SPACE: Mapping[str, Sequence[Any]] = {
    "backend": BACKENDS_CPU,
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "mask": ("none", "none", "causal", "causal", *GIVEN),
    "mask shape": SHAPES,
    "pattern": ("random", "window", "documents", "aligned to the end", "padding", "everything", HIDDEN_ROWS),
    # (heads of the queries, heads of the keys and values)
    "heads": ((1, 1), (2, 2), (3, 3), (4, 2), (6, 2), (4, 1), (3, 1)),
    "shared heads": ("enable_gqa", "expanded"),
    "batch": (1, 2, 3),
    "queries": LENGTHS,
    "queries past": PAST,
    "keys": LENGTHS_KEYS,
    "keys past": PAST,
    # Fused kernels pad depths that are not multiples of 8, and have one kernel for each of a few depths up to 256.
    "depth": (8, 13, 16, 17, 20, 24, 32, 40, 48, 56, 64, 65, 72, 80, 88, 96, 100, 112, 128, 129, 160, 192, 224, 256),
    "depth of values": ("the same", "the same", "half", "more"),
    "scale": (None, None, 0.6, 1.5),  # multiplied by 1 / sqrt(depth)
    "scores": SCORES,
    "layout": (*attention_needle_cases.LAYOUTS, "batch apart", "last two swapped", "shifted by 8"),
    "gradient layout": ("contiguous", "heads inside", "padded"),
    "batched": (True, True, True, False),
}


@dataclass(frozen=True)
class AttentionArithmetic:
    """How a device may round.

    `roundings`: how often a gradient is rounded to its dtype. `tf32`: float32 factors may be rounded to TF32.
    `half_scores`: the math path may compute in half precision, as torch before 2.5 does.
    """

    roundings: int = ROUNDINGS_CPU
    tf32: bool = False
    half_scores: bool = not hasattr(torch.backends.cuda, "allow_fp16_bf16_reduction_math_sdp")

    def factor(self, dtype: torch.dtype) -> float:
        """Return the unit roundoff of the math path's arithmetic for inputs of this dtype."""
        wide = dtype == torch.float32 or self.half_scores
        return tolerances.factor_roundoff(dtype if wide else torch.float32, self.tf32 and dtype == torch.float32)


@dataclass(frozen=True)
class Call:
    """One call: queries of (batch, heads, queries, depth), keys and values of (batch, groups, keys, ...)."""

    backend: str
    dtype: torch.dtype
    mask: str
    mask_shape: str
    pattern: str
    heads: int
    groups: int
    expanded: bool
    batch: int
    queries: int
    keys: int
    depth: int
    values: int
    scale: float | None
    scores: str
    layout: str
    gradient_layout: str
    batched: bool

    @classmethod
    def at(cls, point: Point) -> Call:
        """Return the call for one combination of parameter values (`point`)."""
        heads, groups = point["heads"]
        depth, batched = point["depth"], point["batched"]
        values = {"the same": depth, "half": depth // 2, "more": depth + 8}[point["depth of values"]]
        return cls(
            point["backend"],
            point["dtype"],
            point["mask"],
            point["mask shape"],
            point["pattern"],
            heads,
            groups,
            groups == 1 and point["shared heads"] == "expanded",
            point["batch"] if batched else 1,
            length(point["queries"], point["queries past"]),
            length(point["keys"], point["keys past"]),
            depth,
            values,
            None if point["scale"] is None else point["scale"] / math.sqrt(depth),
            point["scores"],
            point["layout"],
            point["gradient layout"],
            batched,
        )

    @property
    def size(self) -> int:
        """An upper bound of the number of elements of all inputs and scores."""
        of_queries = self.heads * self.queries * (self.depth + self.values + 2 * self.keys)
        return self.batch * (of_queries + self.groups * self.keys * (self.depth + self.values))

    @property
    def element(self) -> float:
        """Approximately how much the score of a key in its class rises if one element of the key is larger by 1."""
        return max(ELEMENT, MATCH / (2 * self.depth))

    @property
    def rows(self) -> int:
        """The number of queries per head of keys: queries times the query heads that share this head."""
        return self.heads // self.groups * self.queries

    @property
    def classes(self) -> int:
        return 1 if self.scores == FLAT else max(1, min(self.keys // VARIANTS, self.rows))

    @property
    def factor(self) -> float:
        """The factor that scores are multiplied by."""
        return 1 / math.sqrt(self.depth) if self.scale is None else self.scale

    @property
    def masked(self) -> str:
        """The mask's part of the case name."""
        if self.mask not in GIVEN:
            return "" if self.mask == "none" else f", {self.mask}"
        pattern = f", {self.pattern}" if self.mask in HIDING else ""
        return f", mask {self.mask} of {'x'.join(map(str, self.mask_sizes))}{pattern}"

    @property
    def hides_rows(self) -> bool:
        """Whether the mask may hide all keys from some queries."""
        return self.mask in HIDING and self.mask in GIVEN and self.pattern == HIDDEN_ROWS

    @property
    def mask_sizes(self) -> tuple[int, ...]:
        queries = 1 if self.mask_shape == SHAPES[-1] else self.queries
        if self.mask_shape == SHAPES[0]:
            return (queries, self.keys)
        batch = self.batch if "batch" in self.mask_shape else 1
        heads = self.heads if "heads" in self.mask_shape else 1
        return (batch, heads, queries, self.keys) if self.batched else (heads, queries, self.keys)

    @property
    def name(self) -> str:
        batch = f"{self.batch}x" if self.batched else ""
        shape = f"{batch}{self.heads}x{self.queries}x{self.depth} on {batch}{self.groups}x{self.keys} keys"
        values = f", values of {self.values}" if self.values != self.depth else ""
        shared = ", expanded heads" if self.expanded and self.heads > 1 else ""
        scale = "" if self.scale is None else f", scale {self.scale:.4g}"
        layouts = f", {self.layout}, gradient {self.gradient_layout}, scores {self.scores}"
        return f"attention by {self.backend} {shape}{values}{shared}{self.masked}{scale}{layouts}"


def length(multiple: int, past: int) -> int:
    """Return `multiple` + `past`, a length near a multiple of a tile; a small positive length if `multiple` is 0."""
    return multiple + past if multiple else abs(past) + 1 if past <= 0 else past


def possible(point: Point, half_only: Sequence[str] = (), zeros: Sequence[str] = BACKENDS_CPU) -> bool:
    """Return whether the combination of parameter values (`point`) can be tested. The call must be small enough, each
    of its inputs must affect the result, and no fused kernel may refuse its shape or strides.

    `half_only`: backends that do not support float32. `zeros`: backends that return 0 for a query that sees no key.
    """
    call = Call.at(point)
    if call.hides_rows and (call.backend not in zeros or call.mask == "learned -inf"):
        return False
    shared = call.rows / call.classes
    if call.dtype == torch.bfloat16 and call.scores in (HIGH, LOW) and call.factor < COARSE:
        return False
    if call.keys < 2 or call.size > MOST or shared > SHARED.get(call.dtype, SHARED_OTHERS):
        return False
    if call.backend in (CHOSEN, "math"):
        return True
    if not call.batched or call.layout == "last two swapped":
        return False
    if call.backend in half_only and call.dtype == torch.float32:
        return False
    return call.backend == "efficient" or call.values == call.depth


def sampled_operations(
    backends: Sequence[str],
    how: AttentionArithmetic,
    half_only: Sequence[str] = (),
    zeros: Sequence[str] = BACKENDS_CPU,
) -> tuple[Operation, ...]:
    """Return the operations of this probe for these backends."""
    make = functools.partial(case, how=how)
    # Before torch 2.5 the output of a query that sees no key was NaN (PyTorch pull request 131863).
    may_be = functools.partial(possible, half_only=half_only, zeros=zeros if hasattr(torch, "_safe_softmax") else ())
    return (
        Operation("attention", {**SPACE, "backend": backends}, make, COUNTS, may_be),
        multihead_cases.operation(how.tf32),
    )


def attention_cases(context: Context) -> None:
    """attention.cases: masks, grouped heads, scales, lengths and strides, drawn by seed, forward and backward."""
    if context.on_cpu:
        pairwise_case_sampling.check(context, OPERATIONS)
    else:
        how = AttentionArithmetic(ROUNDINGS, context.job.allow_tf32)
        backends = BACKENDS[:-1] if cudnn_is_deprioritized() else BACKENDS
        # torch's own tests require zeros from these backends, but not from cuDNN, which torch may choose by default.
        zeros = ("math", "efficient")
        pairwise_case_sampling.check(
            context, sampled_operations(backends, how, half_only=("flash", "cudnn"), zeros=zeros)
        )


def case(point: Point, seed: int, how: AttentionArithmetic) -> Case:
    """Build the case for one combination of parameter values (`point`)."""
    call = Call.at(point)
    return Case(call.name, call.dtype, *_made(call, 8 * seed, how))


@dataclass(frozen=True)
class AttentionPart:
    """A tensor, and a boolean mask of the elements that are inputs of the case."""

    whole: torch.Tensor
    given: torch.Tensor

    @property
    def any(self) -> bool:
        return bool(self.given.any())

    @property
    def inputs(self) -> torch.Tensor:
        return self.whole[self.given]

    def filled(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tensor with its inputs replaced by `values`, on the device and in the dtype of `values`."""
        found = self.whole.to(values.device, values.dtype, copy=True)
        if self.any:
            found[self.given.to(values.device)] = values
        return found


@dataclass(frozen=True)
class AttentionProblem:
    """The tensors of a case.

    `parts`: the tensors by name; keys and values contain each variant once. `index`: the variant at each key position.
    `mask`: a boolean mask in the call's shape, or None. `visible`: which keys each query sees, (batch, heads, queries,
    keys).
    """

    parts: dict[str, AttentionPart]
    index: torch.Tensor
    mask: torch.Tensor | None
    visible: torch.Tensor

    def filled(self, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all tensors of the call by name, built from the inputs of the case."""
        left = iter(given)
        found = {name: part.filled(next(left) if part.any else given[-1][:0]) for name, part in self.parts.items()}
        places = self.index.to(found["k"].device)
        return {**found, "k": found["k"][:, :, places], "v": found["v"][:, :, places]}


def _made(call: Call, seed: int, how: AttentionArithmetic) -> tuple[Any, Any, Any]:
    """Return the inputs on the host, and the functions `run` and `exact` of the case."""
    problem = _problem(call, seed)
    given = tuple(part.inputs.to(call.dtype) for part in problem.parts.values() if part.any)
    return (
        given,
        functools.partial(_run, call=call, problem=problem),
        functools.partial(_exact, call=call, problem=problem, how=how),
    )


def _problem(call: Call, seed: int) -> AttentionProblem:
    mask = _pattern(call, seed) if call.mask in GIVEN and call.mask in HIDING else None
    visible = _visible(call, mask)
    places, heads = torch.arange(call.keys), torch.arange(call.heads)
    if call.scores == LATE:
        members, variants = places * call.classes // call.keys, places % VARIANTS
    else:
        members, variants = places // 2 % call.classes, places % 2 + places // (2 * call.classes) % 2 * 2
    preferred = _preferred(call)
    distance = (places - preferred[..., None]).abs().expand(visible.shape)
    wanted = members[distance.masked_fill(~visible, 2 * call.keys).argmin(-1)]
    near = visible & (members == wanted[..., None])
    # queries that see all four variants
    whole = torch.stack([(near & (variants == n)).any(-1) for n in range(VARIANTS)]).all(0)

    shape = (call.batch, call.groups, call.classes, VARIANTS, call.depth)
    codes = hashed_inputs.whole((*shape[:3], call.depth), seed, 1)
    bits = _bits(call, shape, seed + 1)
    k = codes[:, :, :, None] * (1 + 2 * bits)
    strength = math.ceil(call.element / call.factor)
    group = heads // (call.heads // call.groups)
    q = strength * codes[torch.arange(call.batch)[:, None, None], group[:, None], wanted]
    if call.scores in (HIGH, LOW):
        offset = OFFSET + (2 * call.depth * strength * call.factor if call.scores == LOW else 0)
        level = math.ceil(offset / (200 * call.factor))
        q[..., 0] = level
        k[..., 0] = (round(offset / (level * call.factor)) + bits[..., 0]) * (1 if call.scores == HIGH else -1)
    signs = hashed_inputs.whole((*shape[:3], VARIANTS // 2, call.values), seed + 3, 1)
    v = torch.stack((signs, -signs), dim=4).flatten(3, 4)
    grad = hashed_inputs.whole((*q.shape[:-1], call.values), seed + 4, 1)

    def looked_for(by: torch.Tensor) -> torch.Tensor:
        """Return which variants occur at a position marked in `by`, (batch, groups, classes x variants)."""
        any_row = by.view(call.batch, call.groups, -1, call.keys).any(2)
        found = torch.zeros(call.batch, call.groups, call.classes * VARIANTS, dtype=torch.int64)
        index = (VARIANTS * members + variants).expand(any_row.shape)
        return found.scatter_add(-1, index, any_row.to(torch.int64)) > 0

    parts = {
        "q": AttentionPart(q, whole),
        "k": AttentionPart(k.flatten(2, 3), looked_for(near & whole[..., None])),
        "v": AttentionPart(v.flatten(2, 3), looked_for(near)),
        "grad": AttentionPart(grad, visible.any(-1).expand(grad.shape[:-1])),
    }
    if call.mask in GIVEN and call.mask != "boolean":
        few = call.keys <= REPEATED * call.classes
        matters = (near & whole[..., None]).to(torch.int64).sum_to_size(call.mask_sizes) > 0
        parts["bias"] = AttentionPart(hashed_inputs.whole(call.mask_sizes, seed + 6, 2).abs() - 1, matters & few)
    return AttentionProblem(parts, VARIANTS * members + variants, mask, visible)


def _preferred(call: Call) -> torch.Tensor:
    """Return the position near which each query looks for a key, (heads, queries). Of the queries that share a head of
    keys, every second one counts back from the last key. The positions are thus spread from the first to the last key.
    If there are as many keys as queries, about a quarter of the positions are those of keys that a causal mask hides
    from the query."""
    each = call.heads // call.groups
    row = torch.arange(call.queries) * each + torch.arange(call.heads)[:, None] % each
    forward = row * call.keys // call.rows
    return torch.where(row % 2 == 0, forward, call.keys - 1 - forward)


def _bits(call: Call, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return 0 or 1 for each element of the keys' variants. In each variant about half of the elements are 1, so all
    variants would have about the same score. Some elements of the second pair of variants are therefore flipped."""
    column = torch.arange(call.depth)
    first, second = column % 2, column // 2 % 2
    regular = torch.stack((first, 1 - first, second, 1 - second)).to(torch.float32)
    spread = SPREAD_FLAT if call.scores == FLAT else SPREAD
    turned = hashed_inputs.uniform(shape, seed) < min(0.25, (spread / 2 / call.element) ** 2 / call.depth)
    turned[:, :, :, :2] = False
    return torch.where(turned, 1 - regular, regular)


def _pattern(call: Call, seed: int) -> torch.Tensor:
    """Return a mask of the call's shape, True where a query sees a key. Each query sees at least one key, unless the
    pattern is HIDDEN_ROWS."""
    sizes = (1,) * (4 - len(call.mask_sizes)) + call.mask_sizes
    batch, head, i, j = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    shift, queries, keys = batch + head, sizes[2], call.keys
    centre = i * keys // queries
    if call.pattern in ("random", HIDDEN_ROWS):
        found = hashed_inputs.hashes(math.prod(sizes), seed + 7).view(sizes) % 4 > 0
    elif call.pattern == "window":
        found = (j - centre).abs() <= 2 + shift + keys // 8
    elif call.pattern == "documents":
        found = j * (2 + shift) // keys == i * (2 + shift) // queries
    elif call.pattern == "aligned to the end":
        found = j <= i + keys - queries - shift
    elif call.pattern == "padding":
        found = j < keys - (1 + shift) * keys // 5
    else:
        found = torch.ones(sizes, dtype=torch.bool)
    found = found | (j == centre)
    # hides every fifth query, and every fourth block of 16 queries: parts of tiles, and whole tiles
    if call.pattern == HIDDEN_ROWS:
        found = found & (i % HIDDEN_EVERY != (HIDDEN_EVERY - 1 + shift) % HIDDEN_EVERY) & (i // 16 % 4 != 2)
    return found.reshape(call.mask_sizes)


def _visible(call: Call, mask: torch.Tensor | None) -> torch.Tensor:
    """Return a boolean mask (batch, heads, queries, keys) of the keys that each query sees."""
    whole = (call.batch, call.heads, call.queries, call.keys)
    if call.mask == "causal":
        return (torch.arange(call.keys) <= torch.arange(call.queries)[:, None]).expand(whole)
    return torch.ones(1, dtype=torch.bool).expand(whole) if mask is None else mask.expand(whole)


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    return with_nan_gaps(values, layout) if layout in LAYOUTS else attention_needle_cases.lay_out_heads(values, layout)


def _run(*given: torch.Tensor, call: Call, problem: AttentionProblem) -> dict[str, torch.Tensor]:
    """Return the output with all gradients, and the output computed without gradients. A call with different values,
    and with a different scale if the call has one, comes first, so that state kept from it is detected."""
    tensors = problem.filled(given)
    leaves = [_laid_out(tensors[name], call.layout) for name in "qkv"]
    grad = _laid_out(tensors["grad"], call.gradient_layout)
    if not call.batched:
        leaves, grad = [values[0] for values in leaves], grad[0]
    mask = None if problem.mask is None else problem.mask.to(grad.device)
    if "bias" in tensors:
        mask = tensors["bias"] if mask is None else tensors["bias"].masked_fill(~mask, -math.inf)
    leaves = [values.detach().requires_grad_() for values in leaves]
    if call.mask in LEARNED and mask is not None:
        leaves.append(mask.requires_grad_())
    attend = functools.partial(_attend, mask=mask, call=call)
    other = call if call.scale is None else dataclasses.replace(call, scale=2 * call.scale)
    try:
        with torch.no_grad():
            attend(-leaves[0], *leaves[1:3], call=other)
        output = attend(*leaves[:3])
        computed = backward_pass.gradients(output, leaves, grad)
        with torch.no_grad():
            again = attend(*leaves[:3])
    except (RuntimeError, TypeError, Skip) as error:
        if isinstance(error, Skip) or is_refused(error) or _NO_MASK_GRADIENT in str(error):
            raise NotImplementedError(str(error)) from error
        raise
    found = dict(zip(TITLES, computed), **{"output": output.detach(), "output without gradients": again})
    return {name: values if call.batched or name == TITLES[3] else values[None] for name, values in found.items()}


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, call: Call, mask: torch.Tensor | None
) -> torch.Tensor:
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": 0.0, "is_causal": call.mask == "causal"}
    if call.scale is not None:
        options["scale"] = call.scale
    if call.expanded:
        k, v = (values.expand(*values.shape[:-3], call.heads, *values.shape[-2:]) for values in (k, v))
    elif call.groups != call.heads:
        options["enable_gqa"] = True
    if call.backend == CHOSEN:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with only(call.backend):
        return F.scaled_dot_product_attention(q, k, v, **options)


def _exact(*given: torch.Tensor, call: Call, problem: AttentionProblem, how: AttentionArithmetic) -> dict[str, Exact]:
    """Return the exact output and gradients with their tolerances. The spreads are those of
    attention_gradient_cases.exact_gradients, with float64 products over every key."""
    tensors = problem.filled(given)
    q, grad, visible = tensors["q"], tensors["grad"], problem.visible
    its_k, its_v = (tensors[name].repeat_interleave(call.heads // call.groups, 1) for name in "kv")
    added = tensors.get("bias", torch.zeros((), dtype=q.dtype))
    scores = ((q @ its_k.mT) * call.factor + added).masked_fill(~visible, -math.inf)
    lowest = torch.finfo(scores.dtype).min  # the maximum of a query that sees no key; its weights are 0
    powers = (scores - scores.amax(-1, keepdim=True).clamp(min=lowest)).exp()
    weights = powers / powers.sum(-1, keepdim=True).clamp(min=tolerances.unit_roundoff(torch.float64))

    sizes = (q.abs() @ its_k.abs().mT) * call.factor + added.abs()
    moved = (tolerances.attention_score(call.depth, how.factor(call.dtype)) * sizes).masked_fill(~visible, 0.0)
    output = Exact(weights @ its_v, _output_bound(call, how, weights, moved, its_v))

    slope = grad @ its_v.mT
    lengths = (grad.square() @ its_v.square().mT).sqrt()
    total = (weights * slope).sum(-1, keepdim=True)
    row = total.abs() + (weights * lengths).sum(-1, keepdim=True)
    change, terms = weights * (slope - total), (weights * (slope.abs() + lengths + row)).square()
    spread_q = (terms @ its_k.square()).sqrt() + row * (weights @ its_k).abs()
    found = [
        (call.factor * (change @ its_k), call.factor * spread_q),
        (
            call.factor * _summed(call, change.mT @ q),
            call.factor * _summed(call, terms.mT @ q.square()).sqrt(),
        ),
        (_summed(call, weights.mT @ grad), _summed(call, weights.square().mT @ grad.square()).sqrt()),
    ]
    if call.mask in LEARNED:
        found.append((change.sum_to_size(call.mask_sizes), terms.sum_to_size(call.mask_sizes).sqrt()))
    below = _below_normal(call, tensors, slope.abs() + lengths + row, its_k)
    factor = _gradient_bound(call, how, float(moved.max()))
    result = {"output": output, "output without gradients": output}
    for title, (wanted, spread) in zip(TITLES, found):
        rounded = how.roundings * tolerances.rounding(wanted, call.dtype)
        result[title] = Exact(wanted, factor * spread + tolerances.ROUNDED * spread.max() + rounded + below[title])
    return result


def _below_normal(
    call: Call, tensors: Mapping[str, torch.Tensor], sizes: torch.Tensor, k: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return how much of each gradient may be lost to underflow. Weights and gradients of scores that are subnormal in
    their dtype may become 0, and so may the gradient of each head before the sum over heads.

    `sizes`: for each score, an upper bound of the factor of its weight in the gradient of that score.
    """
    least = tolerances.rounding(torch.zeros((), dtype=torch.float64), call.dtype)
    each, q, grad = call.heads // call.groups, tensors["q"].abs(), tensors["grad"].abs()
    if call.dtype != torch.float16:  # the other dtypes have float32's exponent range
        return dict.fromkeys(TITLES, least)
    lost = 1 + sizes
    return {
        TITLES[0]: least * (1 + call.factor * (lost @ k.abs())),
        TITLES[1]: least * (each + call.factor * _summed(call, lost.mT @ q)),
        TITLES[2]: least * (each + _summed(call, grad.sum(-2, keepdim=True))),
        TITLES[3]: least * lost.sum_to_size(call.mask_sizes) if call.mask in LEARNED else least,
    }


def _summed(call: Call, values: torch.Tensor) -> torch.Tensor:
    """Sum over the query heads that share a head of keys."""
    return values.reshape(call.batch, call.groups, -1, *values.shape[2:]).sum(2)


def _output_bound(
    call: Call, how: AttentionArithmetic, weights: torch.Tensor, moved: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Return the tolerance of the output, as in float64_reference_operations.attention. It covers the errors of the
    scores after the exponential and the sum, and three roundings before the product with v. `moved`: the largest error
    of each score."""
    powers = moved.exp()
    change = powers * (weights * powers).sum(-1, keepdim=True) - 1
    rounded = 3 * tolerances.factor_roundoff(call.dtype, how.tf32) + 2 * tolerances.gamma(
        call.keys + 4, tolerances.ACCUMULATOR
    )
    return tolerances.rounding(weights @ v, call.dtype) + (weights * (change + rounded)) @ v.abs()


def _gradient_bound(call: Call, how: AttentionArithmetic, moved: float) -> float:
    """Return the tolerance relative to a spread. It is tolerances.attention_gradient_floor for scores with errors of up
    to `moved`, plus the roundings of tolerances.attention_gradient_cap in the math path's arithmetic."""
    logit = moved / tolerances.gamma(call.depth + 2, tolerances.ACCUMULATOR)
    floor = tolerances.attention_gradient_floor(call.dtype, logit, call.depth, max(call.queries, call.keys), how.tf32)
    return floor + 7 * tolerances.LIKELY * how.factor(call.dtype)


OPERATIONS = sampled_operations(BACKENDS_CPU, AttentionArithmetic())
