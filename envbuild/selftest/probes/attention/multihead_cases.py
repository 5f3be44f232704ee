"""nn.MultiheadAttention, a part of attention.cases: its projections, masks and weights, in training and evaluation
mode.

In evaluation mode without gradients, torch may use a fast path, which fuses the projections and attention into one
operation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact, probabilities
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

COUNTS = {"quick": 4, "standard": 24, "full": 200}
SPACE: Mapping[str, Sequence[Any]] = {
    "mode": ("training", "evaluation"),
    "batch first": (True, False),
    "mask": ("none", "causal", "boolean", "added"),
    "padding": (False, True),
    "bias": (True, False),
    "heads": (1, 2, 3, 4),
    "head size": (4, 8, 20, 32),
    "batch": (1, 2, 3),
    "queries": (5, 7, 16, 17, 33, 65),
    "keys": ("its own", "its own", 9, 31, 64),
    "weights": ("none", "averaged", "by head"),
}
KEY_BIAS = 0.5


def operation(tf32: bool) -> Operation:
    return Operation("MultiheadAttention", SPACE, functools.partial(case, tf32=tf32), COUNTS, _possible)


def _possible(point: Point) -> bool:
    return bool(point["keys"] == "its own" or point["mask"] != "causal")


def case(point: Point, seed: int, tf32: bool) -> Case:
    """Build the case for one combination of parameter values (`point`). Queries and keys are integers, biases are
    multiples of 1/4, and added masks are multiples of 1/2. The weights are +-1 times a power of two that keeps the
    projections near 1."""
    width, batch, queries, keys = _sizes(point)
    own = point["keys"] == "its own"
    scale = 2.0 ** -round(math.log2(1.6 * math.sqrt(width)))
    given = [
        hashed_inputs.whole((batch, queries, width), 8 * seed, 2),
        *([] if own else [hashed_inputs.whole((batch, keys, width), 8 * seed + 1, 2)]),
        scale * hashed_inputs.whole((3 * width, width), 8 * seed + 2, 1),
        scale * hashed_inputs.whole((width, width), 8 * seed + 3, 1),
        *([hashed_inputs.whole((3, width), 8 * seed + 4, 2) / 4] if point["bias"] else []),
        *([hashed_inputs.whole((queries, keys), 8 * seed + 5, 2) / 2] if point["mask"] == "added" else []),
    ]
    # With padding, self-attention, several samples and no causal mask, the first key is hidden in every second sample.
    # It still affects the results, as a query.
    hidden = torch.zeros(batch, keys, dtype=torch.bool)
    if point["padding"] and own and batch > 1 and point["mask"] != "causal":
        hidden[::2, 0] = True
    mask = None
    if point["mask"] == "causal":
        mask = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    elif point["mask"] == "boolean":
        mask = (hashed_inputs.hashes(queries * keys, 8 * seed + 6) % 4 == 0).view(queries, keys)
        mask[torch.arange(queries), torch.arange(queries) % (keys - 1) + 1] = False
        mask &= ~mask.all(0)
    memory = "" if own else f" on {batch}x{keys}"
    how = f"{point['mode']}, {'batch' if point['batch first'] else 'length'} first, mask {point['mask']}"
    how += f"{', padding' if bool(hidden.any()) else ''}{', bias' if point['bias'] else ''}, weights {point['weights']}"
    name = f"MultiheadAttention of {batch}x{queries}x{width}{memory} in {point['heads']} heads, {how}"
    run = functools.partial(_run, point=point, mask=mask, hidden=hidden)
    exact = functools.partial(_exact, point=point, mask=mask, hidden=hidden, tf32=tf32)
    return Case(name, torch.float32, tuple(given), run, exact)


def _sizes(point: Point) -> tuple[int, int, int, int]:
    queries = point["queries"]
    return (
        point["heads"] * point["head size"],
        point["batch"],
        queries,
        (queries if point["keys"] == "its own" else point["keys"]),
    )


def _named(given: Sequence[torch.Tensor], point: Point) -> dict[str, torch.Tensor]:
    names = ["query", *([] if point["keys"] == "its own" else ["memory"]), "projections", "out"]
    names += [*(["bias"] if point["bias"] else []), *(["added"] if point["mask"] == "added" else [])]
    found = dict(zip(names, given))
    if point["bias"]:  # the keys' bias shifts all scores of a query equally, so no result depends on it
        of_query, of_value, of_output = found["bias"]
        found["bias"] = torch.stack((of_query, torch.full_like(of_query, KEY_BIAS), of_value, of_output))
    return {"memory": found["query"], **found}


def _run(
    *given: torch.Tensor, point: Point, mask: torch.Tensor | None, hidden: torch.Tensor
) -> dict[str, torch.Tensor]:
    tensors = _named(given, point)
    query, memory = tensors["query"], tensors["memory"]
    options = {"bias": point["bias"], "batch_first": point["batch first"], "device": query.device, "dtype": query.dtype}
    module = torch.nn.MultiheadAttention(query.shape[-1], point["heads"], **options)
    assert module.in_proj_weight is not None
    parameters = [(module.in_proj_weight, tensors["projections"]), (module.out_proj.weight, tensors["out"])]
    if point["bias"]:
        parameters += [(module.in_proj_bias, tensors["bias"][:3].flatten()), (module.out_proj.bias, tensors["bias"][3])]
    with torch.no_grad():
        for parameter, values in parameters:
            parameter.copy_(values)
    module.train(point["mode"] == "training")
    if not point["batch first"]:
        own = memory is query
        query = query.transpose(0, 1)
        memory = query if own else memory.transpose(0, 1)
    shown: dict[str, Any] = {"attn_mask": tensors.get("added") if mask is None else mask.to(query.device)}
    if bool(hidden.any()):
        padding = hidden.to(query.device)
        added = "added" in tensors  # torch deprecates passing masks of two different types
        shown["key_padding_mask"] = query.new_zeros(hidden.shape).masked_fill(padding, -math.inf) if added else padding
    with torch.set_grad_enabled(point["mode"] == "training"):
        output, weights = module(
            query,
            memory,
            memory,
            need_weights=point["weights"] != "none",
            average_attn_weights=point["weights"] == "averaged",
            is_causal=point["mask"] == "causal",
            **shown,
        )
    output = output.detach() if point["batch first"] else output.detach().transpose(0, 1)
    return {"output": output, **({} if weights is None else {"weights": weights.detach()})}


def _exact(
    *given: torch.Tensor, point: Point, mask: torch.Tensor | None, hidden: torch.Tensor, tf32: bool
) -> dict[str, Exact]:
    """Return the exact results. Projections of integers by powers of two are exact, also in TF32. Scores and weights
    are treated as in attention_sampled_cases. The roundings of the output projection are treated as independent (Higham
    and Mary, 2019, as in tolerances.attention_gradient_floor)."""
    tensors = _named(given, point)
    width = _sizes(point)[0]
    bias = tensors.get("bias", torch.zeros(4, width, dtype=torch.float64))
    parts = tensors["projections"].chunk(3)
    q, k, v = (
        _by_head(tensors["memory" if n else "query"] @ part.t() + bias[n], point["heads"])
        for n, part in enumerate(parts)
    )
    scale = 1 / math.sqrt(point["head size"])
    added = tensors.get("added", torch.zeros((), dtype=q.dtype))
    left = hidden[:, None, None] if mask is None else hidden[:, None, None] | mask
    weights = probabilities((q @ k.mT * scale + added).masked_fill(left, -math.inf))

    u = tolerances.factor_roundoff(torch.float32, tf32)
    moved = tolerances.attention_score(point["head size"], u) * (q.abs() @ k.abs().mT * scale + added.abs())
    powers = moved.masked_fill(left, 0.0).exp()
    change = powers * (weights * powers).sum(-1, keepdim=True) - 1
    change = change + 3 * u + 2 * tolerances.gamma(k.shape[2] + 4, tolerances.ACCUMULATOR)
    value, error = _joined(weights @ v), _joined((weights * change) @ v.abs())
    output = value @ tensors["out"].t() + bias[3]
    on_way = tolerances.LIKELY * math.sqrt(width + 4) * tolerances.ROUNDED + (2 * tolerances.TF32 if tf32 else 0.0)
    limit = (error + on_way * value.abs()) @ tensors["out"].abs().t() + tolerances.rounding(output, torch.float32)
    result = {"output": Exact(output, limit + tolerances.ROUNDED * bias[3].abs())}
    if point["weights"] != "none":
        limit = weights * change + tolerances.rounding(weights, torch.float32)
        by_head = point["weights"] == "by head"
        result["weights"] = Exact(weights, limit) if by_head else Exact(weights.mean(1), 2 * limit.mean(1))
    return result


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)
