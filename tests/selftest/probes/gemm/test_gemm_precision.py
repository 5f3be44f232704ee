"""Checks that no CPU can run: tf32.mode where TF32 is allowed, and gemm.fp8 on emulated tensor cores."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.probes.gemm import gemm_precision
from selftest import tensor_cores

needs_fp8 = pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="this torch has no fp8")
FULL, CUT = 1 + gemm_precision.STEP, 1.0


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.delenv(gemm_precision.OVERRIDE, raising=False)
    return Context(JobDocument("0" * 32, settings={"allow_tf32": True}))


@pytest.mark.parametrize(
    ("case", "values", "allowed", "reason"),
    [
        ("mm", [FULL, FULL], False, None),
        ("mm", [CUT, CUT], True, None),
        ("conv2d", [CUT, CUT], True, None),
        ("conv2d", [FULL, FULL], True, None),
        ("mm", [CUT, CUT], False, "TF32 is used, and not allowed: mm"),
        ("conv2d", [CUT], False, "TF32 is used, and not allowed: conv2d"),
        ("mm", [FULL, FULL], True, "TF32 is allowed, and not used: mm"),
        ("mm", [FULL, CUT], False, "1 + 2^-12 comes out as [1.0, 1.000244140625]: mm"),
        ("mm", [2.0], True, "1 + 2^-12 comes out as [2.0]: mm"),
        ("mm", [float("nan")], False, "1 + 2^-12 comes out as [nan]: mm"),
        ("mm", [FULL, float("nan")], False, "1 + 2^-12 comes out as [nan, 1.000244140625]: mm"),
    ],
)
def test_the_mode_must_be_the_declared_one(
    context: Context, case: str, values: list[float], allowed: bool, reason: "str | None"
) -> None:
    gemm_precision.judge_tf32(context, case, torch.tensor(values), allowed, 0.0)
    assert [fault.reason for fault in context.faults] == ([reason] if reason else [])
    assert context.figures[0].within == (reason is None)


def test_the_override_is_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gemm_precision.OVERRIDE, "0")
    gemm_precision.judge_tf32(context, "mm", torch.tensor([FULL]), True, 0.0)
    assert context.faults[0].reason == "TF32 is allowed, and not used: mm (NVIDIA_TF32_OVERRIDE=0 is set)"


def test_a_device_without_tf32_skips_where_it_is_allowed(context: Context) -> None:
    with pytest.raises(Skip):
        gemm_precision.tf32_mode(context)


def scaled_mm(core: tensor_cores.Core) -> Callable[..., torch.Tensor]:
    """Compute torch._scaled_mm as on a GPU whose tensor cores add in this way."""

    def multiply(
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:
        total = tensor_cores.multiply(a, b, core, promoted_every=None if use_fast_accum else 128)
        return (total * scale_a * scale_b).float().to(out_dtype)

    return multiply


@needs_fp8
@pytest.mark.parametrize("name", tensor_cores.FP8_CORES)
def test_fp8_passes_on_healthy_tensor_cores(name: str, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm(tensor_cores.FP8_CORES[name]))
    gemm_precision.gemm_fp8(context)
    assert [fault.reason for fault in context.faults] == []
    assert len(context.figures) == 6


@needs_fp8
def test_fp8_fails_where_sums_are_kept_in_half_precision(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm(tensor_cores.HALF_ACCUMULATOR))
    gemm_precision.gemm_fp8(context)
    cases = {fault.reason.partition(" fp8:")[0] for fault in context.faults}
    assert {"large integer fast accumulation", "uniform fast accumulation"} <= cases
