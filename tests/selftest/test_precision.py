"""tf32.mode where TF32 is allowed, which no CPU can show: the judgement alone."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.context import Context
from envbuild.selftest.job import Job
from envbuild.selftest.outcome import Skip
from envbuild.selftest.probes import precision

FULL, CUT = 1 + precision.STEP, 1.0


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.delenv(precision.OVERRIDE, raising=False)
    return Context(Job("0" * 32, settings={"allow_tf32": True}))


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
    precision.judge_tf32(context, case, torch.tensor(values), allowed, 0.0)
    assert [fault.reason for fault in context.faults] == ([reason] if reason else [])
    assert context.figures[0].within == (reason is None)


def test_the_override_is_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(precision.OVERRIDE, "0")
    precision.judge_tf32(context, "mm", torch.tensor([FULL]), True, 0.0)
    assert context.faults[0].reason == "TF32 is allowed, and not used: mm (NVIDIA_TF32_OVERRIDE=0 is set)"


def test_a_device_without_tf32_skips_where_it_is_allowed(context: Context) -> None:
    with pytest.raises(Skip):
        precision.tf32(context)
