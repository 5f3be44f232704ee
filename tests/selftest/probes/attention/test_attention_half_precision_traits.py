"""Traits of half precision, for attention in plain operations: right, scaled late, and summed in half precision."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics.reference_products import one_thread
from envbuild.selftest.probes.attention import attention_half_precision_traits

HALVES = (torch.float16, torch.bfloat16)
BLOCKS = (8, 16)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


class Attention:
    """Attention in separate float32 operations. `scores`, `output`: the dtypes in which their sums are kept; `range`:
    the dtype to which scores are rounded; `late`: scores are scaled after the product, not q before it; `block`: terms
    per addition; `backward`: the terms are added from the last to the first."""

    def __init__(
        self,
        scores: torch.dtype | None = None,
        output: torch.dtype | None = None,
        range: torch.dtype | None = None,
        late: bool = True,
        block: int = 16,
        backward: bool = False,
    ) -> None:
        self.scores, self.output, self.range = scores, output, range
        self.late, self.block, self.backward = late, block, backward

    def product(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a @ b with its sums kept in dtype after every block."""
        if dtype is None:
            return a @ b
        starts = range(0, a.shape[-1], self.block)
        total = torch.zeros(())
        for i in reversed(starts) if self.backward else starts:
            total = (total + a[..., i : i + self.block] @ b[..., i : i + self.block, :]).to(dtype).float()
        return total

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        wide = [values.to(torch.float32) for values in (q, k, v)]
        is_half = q.dtype != torch.float32
        scale = q.shape[-1] ** -0.5
        if not self.late:
            wide[0] = wide[0] * scale
        logits = self.product(wide[0], wide[1].transpose(-1, -2), self.scores if is_half else None)
        if self.range and is_half:
            logits = logits.to(self.range).float()
        weights = torch.softmax(logits * scale if self.late else logits, dim=-1)
        return self.product(weights, wide[2], self.output if is_half else None).to(q.dtype)


def reported_traits(attention: Attention) -> dict[str, object]:
    context = Context(JobDocument(nonce="0" * 32))
    attention_half_precision_traits.report_traits(context, attention, attention)
    assert context.faults == []
    return context.traits


NOTHING = {"fp16": [], "bf16": []}


@pytest.mark.parametrize("late", [False, True])
def test_right_attention_has_no_traits(late: bool) -> None:
    found = reported_traits(Attention(late=late))
    assert found["accumulates_in_half"] == NOTHING
    assert "needs_upcast" not in found
    assert found["right_beyond_fp16"] == {name: {"unscaled": True, "scaled": True} for name in ("fp16", "bf16")}


@pytest.mark.parametrize(("late", "unscaled"), [(True, False), (False, True)])
def test_scores_that_are_kept_in_float16_need_an_upcast(late: bool, unscaled: bool) -> None:
    """The math path before torch 2.5 kept scores in float16. That path scaled q and k first, so only large scores
    overflowed."""
    found = reported_traits(Attention(range=torch.float16, late=late))
    assert found["right_beyond_fp16"] == {key: {"unscaled": unscaled, "scaled": False} for key in ("fp16", "bf16")}
    assert found["needs_upcast"] == ["fp16", "bf16"]
    assert found["accumulates_in_half"] == NOTHING


def test_scores_that_are_rounded_to_half_once_are_not_added_up_in_it() -> None:
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        assert reported_traits(Attention(range=dtype))["accumulates_in_half"][name] == []  # type: ignore[index]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("backward", [False, True])
def test_outputs_summed_in_half_precision_are_detected_in_any_order(
    dtype: torch.dtype, block: int, backward: bool
) -> None:
    found = reported_traits(Attention(output=dtype, block=block, backward=backward))
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    assert "output" in found["accumulates_in_half"][name]  # type: ignore[index]
    assert name in found["needs_upcast"]  # type: ignore[operator]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("backward", [False, True])
def test_scores_summed_in_half_precision_are_detected_in_any_order(
    dtype: torch.dtype, block: int, backward: bool
) -> None:
    """ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_SCORE_ACCUMULATION_MAX_M allows such sums."""
    found = reported_traits(Attention(scores=dtype, block=block, backward=backward))
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    assert found["accumulates_in_half"][name] == ["scores"]  # type: ignore[index]


def test_inputs_that_no_kernel_supports_are_left_out() -> None:
    context = Context(JobDocument(nonce="0" * 32))
    attention_half_precision_traits.report_traits(context, lambda q, k, v: None, Attention())
    assert context.traits == {"right_beyond_fp16": {}, "accumulates_in_half": {}}


def test_an_upcast_that_does_not_help_is_not_noted() -> None:
    context = Context(JobDocument(nonce="0" * 32))
    nan = torch.full(
        (
            len(attention_half_precision_traits.PROBLEMS),
            1,
            attention_half_precision_traits.QUERIES,
            attention_half_precision_traits.DEPTH,
        ),
        float("nan"),
    )
    attention_half_precision_traits.report_traits(context, lambda q, k, v: nan, lambda q, k, v: nan)
    assert "needs_upcast" not in context.traits
    assert context.traits["accumulates_in_half"] == {key: ["output", "scores"] for key in ("fp16", "bf16")}
