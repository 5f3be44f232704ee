"""attention.math over TF32 products, and with a fault in a query that is not among the sampled ones."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import tolerances
from envbuild.selftest.probes.attention import (
    attention_backend_probes,
    attention_sampled_cases,
    forced_attention_backend,
)

Attend = Callable[..., torch.Tensor]
REAL: Attend = F.scaled_dot_product_attention
LENGTH = 365


def cut(values: torch.Tensor) -> torch.Tensor:
    """Truncate to TF32's 10 fraction bits."""
    return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def with_tf32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute as the math path does on a GPU with TF32."""
    if q.dtype != torch.float32 or k.dtype != torch.float32 or not options.keys() <= {"is_causal"}:
        return REAL(q, k, v, **options)
    logits = cut(q * q.shape[-1] ** -0.5) @ cut(k.transpose(-1, -2))
    if options.get("is_causal"):
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
    return cut(torch.softmax(logits, dim=-1)) @ cut(v)


def faults(monkeypatch: pytest.MonkeyPatch, attend: Attend, **settings: bool) -> list[str]:
    context = Context(JobDocument(nonce="0" * 32, settings=settings))
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    attention_backend_probes.attention_math(context)
    return [fault.reason for fault in context.faults]


def test_tf32_is_right_where_it_is_allowed_and_wrong_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(monkeypatch, with_tf32, allow_tf32=True) == []
    assert faults(monkeypatch, with_tf32, allow_tf32=False)


def test_tf32_excuses_float32_alone() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert tolerances.factor_roundoff(dtype, tf32=True) == tolerances.unit_roundoff(dtype)
    assert tolerances.factor_roundoff(torch.float32, tf32=True) == tolerances.TF32


@pytest.mark.parametrize("length", [1, 128, LENGTH, 2925])
def test_the_sampled_queries_hold_the_ends_and_are_few(length: int) -> None:
    places = attention_backend_probes.sampled_queries(length).tolist()
    assert places == sorted(set(places))
    assert (places[0], places[-1]) == (0, length - 1)
    assert len(places) == length if length <= attention_backend_probes.SHORT else len(places) < 100


def test_values_that_are_not_finite_are_found_in_every_query(monkeypatch: pytest.MonkeyPatch) -> None:
    place = next(i for i in range(LENGTH) if i not in attention_backend_probes.sampled_queries(LENGTH).tolist())

    def spoiled(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        result = REAL(q, *rest, **options)
        if q.shape[-2] == LENGTH and q.dtype == torch.float32:
            result[0, 0, place, 7] = float("nan")
        return result

    found = faults(monkeypatch, spoiled)
    assert any(f"element [0, {place}, 7] is nan" in reason for reason in found)


@pytest.mark.parametrize(("value", "tested"), [("1", False), ("0", True), (None, True)])
def test_cudnn_is_tested_unless_the_environment_keeps_torch_from_choosing_it(
    value: str | None, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv(forced_attention_backend.DEPRIORITIZED, raising=False)
    else:
        monkeypatch.setenv(forced_attention_backend.DEPRIORITIZED, value)
    context = Context(JobDocument(nonce="0" * 32, device="cuda"))
    seen: list[str] = []
    monkeypatch.setattr(attention_backend_probes, "check_backend", lambda _, backend: seen.append(backend))
    monkeypatch.setattr(
        attention_sampled_cases.pairwise_case_sampling, "check", lambda _, found: seen.extend(found[0].space["backend"])
    )
    if tested:
        attention_backend_probes.attention_cudnn(context)
        assert seen == ["cudnn"]
    else:
        with pytest.raises(Skip, match="TORCH_CUDNN_SDPA_DEPRIORITIZED=1 is set"):
            attention_backend_probes.attention_cudnn(context)
    seen.clear()
    attention_sampled_cases.attention_cases(context)
    assert ("cudnn" in seen) == tested and {attention_sampled_cases.CHOSEN, "flash", "efficient", "math"} <= set(seen)
