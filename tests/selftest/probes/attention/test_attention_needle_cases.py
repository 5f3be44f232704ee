"""attention_needle: its references, that every key counts, and that its cases cover every pair of parameters."""

import math
from itertools import combinations

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import tolerances
from envbuild.selftest.probes.attention import attention_needle_cases
from envbuild.selftest.probes.attention.attention_needle_cases import (
    CASES,
    CASES_QUICK,
    NEAR,
    Needle,
    NeedleCase,
    lay_out_heads,
    make_needle,
    varied,
)

EVERY = [varied(index) for index in range(CASES)]
LONG = [
    NeedleCase(1, 1, 1, 365, 365, 128),
    NeedleCase(1, 1, 1, 365, 365, 128, "causal"),
    NeedleCase(1, 1, 1, 2925, 2925, 128, "causal"),
]
OTHERS = -math.log(tolerances.ROUNDED)  # a score this far below the best has no weight after rounding


def hidden(case: NeedleCase, given: Needle) -> torch.Tensor:
    """Return the float64 values that are added to the scores: the mask as torch documents it."""
    nothing = torch.zeros(case.batch, case.heads, case.queries, case.keys, dtype=torch.float64)
    if case.mask == "causal":
        return nothing.masked_fill(torch.ones(case.queries, case.keys, dtype=torch.bool).triu(1), -math.inf)
    if given.mask is None:
        return nothing
    return nothing.masked_fill(~given.mask, -math.inf) if given.mask.dtype == torch.bool else nothing + given.mask


def scores(case: NeedleCase, given: Needle, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    whole = k.repeat_interleave(case.heads // case.groups, dim=1)
    return q @ whole.mT / math.sqrt(case.depth) + hidden(case, given)


@pytest.mark.parametrize("case", EVERY + LONG[:2], ids=lambda case: case.name)
def test_the_reference_is_autograds_over_every_key(case: NeedleCase) -> None:
    given = make_needle(case)
    q, k, v = (values.double().requires_grad_() for values in (given.q, given.k, given.v))
    weights = torch.softmax(scores(case, given, q, k), dim=-1)
    output = weights @ v.repeat_interleave(case.heads // case.groups, dim=1)
    found = torch.autograd.grad(output, (q, k, v), given.grad.double())
    assert float((output.detach() - given.output).abs().max()) < 1e-10
    for got, wanted in zip(found, given.gradients, strict=True):
        assert float((got - wanted).abs().max()) <= 1e-10 * (1 + float(wanted.abs().max()))


@pytest.mark.parametrize("case", EVERY + LONG, ids=lambda case: case.name)
def test_scores_are_small_or_lost(case: NeedleCase) -> None:
    given = make_needle(case)
    found = scores(case, given, given.q.double(), given.k.double())
    near = found[found > -NEAR - 1]
    assert float(near.abs().max()) < NEAR
    others = torch.where(found > -NEAR - 1, -math.inf, found).amax(dim=-1)
    assert float((found.amax(dim=-1) - others).min()) > OTHERS + math.log(case.keys)


@pytest.mark.parametrize("case", EVERY + LONG, ids=lambda case: case.name)
def test_a_key_left_out_is_seen(case: NeedleCase) -> None:
    """If any single key is left out, the error of an output exceeds the tolerance of bfloat16; with a single query, the
    tolerance of float16."""
    given = make_needle(case)
    found = scores(case, given, given.q.double(), given.k.double())
    dtype = torch.float16 if case.queries == 1 else torch.bfloat16
    limit = tolerances.attention_floor(dtype, NEAR, case.depth, max(case.queries, case.keys))
    values = given.v.double().repeat_interleave(case.heads // case.groups, dim=1)
    most, where = torch.softmax(found, dim=-1).flatten(0, 2).max(dim=0)
    batch, row = where // (case.heads * case.queries), where % (case.heads * case.queries)
    head, query = row // case.queries, row % case.queries
    distance = (values[batch, head, torch.arange(case.keys)] - given.output[batch, head, query]).abs().amax(dim=-1)
    alone = most > 1 - 1e-9  # without it other keys would have all the weight
    counts = alone | (most / (1 - most) * distance > 1.4 * limit)
    share = int(counts.sum()) / int((found > -math.inf).flatten(0, 2).any(dim=0).sum())
    local, one = case.mask == "window", case.queries == 1
    assert share >= (0.8 if one else 0.94 if local else 1)


@pytest.mark.parametrize("case", EVERY + LONG, ids=lambda case: case.name)
def test_inputs_are_exact_in_every_dtype(case: NeedleCase) -> None:
    given = make_needle(case)
    for values in (given.q, given.k, given.v, given.grad, given.mask):
        if values is not None and values.dtype != torch.bool:
            assert all(torch.equal(values.to(dtype).float(), values) for dtype in (torch.float16, torch.bfloat16))
    assert max(float(values.abs().max()) for values in given.gradients) < torch.finfo(torch.float16).max / 8


def test_cases_meet_every_pair_and_quick_ones_everything() -> None:
    names = ("depth", "mask", "layout", "groups")
    for first, second in combinations(names, 2):
        count = len({getattr(case, first) for case in EVERY}) * len({getattr(case, second) for case in EVERY})
        assert len({(getattr(case, first), getattr(case, second)) for case in EVERY}) == count, (first, second)
    for name in names:
        assert {getattr(case, name) for case in EVERY[:CASES_QUICK]} == {getattr(case, name) for case in EVERY}


@pytest.mark.parametrize("layout", attention_needle_cases.LAYOUTS)
def test_a_layout_changes_strides_and_nothing_else(layout: str) -> None:
    values = torch.arange(2 * 3 * 5 * 8.0).view(2, 3, 5, 8)
    found = lay_out_heads(values, layout)
    assert torch.equal(found, values)
    assert found.is_contiguous() == (layout == attention_needle_cases.LAYOUTS[0])
    assert len({lay_out_heads(values, other).stride() for other in attention_needle_cases.LAYOUTS}) == len(
        attention_needle_cases.LAYOUTS
    )
