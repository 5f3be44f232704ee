"""norm.torch's reference and bounds: right arithmetic passes, half precision fails, and refusals are reported."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import tolerances
from envbuild.selftest.numerics.reference_products import one_thread
from envbuild.selftest.probes.normalization import norm_torch
from envbuild.selftest.probes.normalization.norm_fixed_cases import (
    EPSILON,
    ROWS,
    WIDTHS,
    Norm,
    NormCase,
    exact_norm,
    norm_case_groups,
    norm_inputs,
    torch_norms,
)
from selftest.played import Card


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


HALF, SINGLE = torch.float16, torch.float32
WORDS = "expected scalar type Float but found Half"
LAYER, RMS, GROUP = torch_norms()


def case(kind: Norm, width: int = 256, x: torch.dtype = SINGLE, weight: torch.dtype = SINGLE) -> NormCase:
    return NormCase(kind, x, weight, ROWS, width, autocast=False, number=3)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), EPSILON).to(x.dtype)


def mixed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Require equal dtypes of input and weight, as apex's FusedRMSNorm and FusedLayerNorm do."""
    if x.dtype != weight.dtype:
        raise RuntimeError(WORDS)
    return layer(x, weight, bias)


def ran(*norms: Norm) -> Context:
    context = Context(JobDocument(nonce="0" * 32, level="standard"))
    norm_torch.check_norms(context, norms)
    return context


@pytest.mark.parametrize("kind", [LAYER, RMS, GROUP], ids=lambda kind: kind.name)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_reference_is_autograds(kind: Norm, width: int) -> None:
    given = norm_inputs(case(kind, width)).to(torch.float64)
    x, weight, bias = (values.requires_grad_() for values in (given.x, given.weight, given.bias))
    y = kind.call(x, weight, bias)
    y.backward(given.grad)
    results, magnitudes = exact_norm(kind, given)
    wanted = {"y": y, "x": x.grad, "weight": weight.grad, "bias": bias.grad if kind.centred else None}
    for name, values in wanted.items():
        if values is not None:
            assert torch.allclose(getattr(results, name), values, rtol=1e-9, atol=1e-9), name
            assert bool((getattr(magnitudes, name) >= getattr(results, name).abs() * 0.999).all()), name


def rounded(given: torch.Tensor, half: bool) -> torch.Tensor:
    return given.to(HALF).to(torch.float64) if half else given


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", [LAYER, RMS], ids=lambda kind: kind.name)
def test_float32_is_far_within_the_bound_and_half_statistics_are_not(kind: Norm, width: int, half: bool) -> None:
    """The published measurement: for float32, the error is at most 0.05 of the bound; for half precision, more than 1.9
    times the bound."""
    given = norm_inputs(dataclasses.replace(case(kind, width), extreme=False))
    results, magnitudes = exact_norm(kind, given)
    x = given.x.double()
    mean = rounded(x.mean(-1, keepdim=True), half) if kind.centred else 0.0
    sigma = rounded((x - mean).pow(2).mean(-1, keepdim=True).add(EPSILON).sqrt(), half)
    unit = rounded((x - mean) / sigma, half)
    got = unit * given.weight + (given.bias if kind.centred else 0.0) if half else kind.call(*_first(given))
    limit = tolerances.rounding(results.y, SINGLE) + tolerances.norm(magnitudes.y, width, 1, SINGLE, 0)
    ratio = float(((got.double() - results.y).abs() / limit).max())
    assert ratio > 1.9 if half else ratio < 0.05, ratio


def _first(given: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return given.x, given.weight, given.bias  # type: ignore[attr-defined]


def test_no_two_cases_have_the_same_values() -> None:
    """Otherwise the result of the previous call could be accepted."""
    numbers = [item.number for widths in norm_case_groups(torch_norms()) for item in widths]
    assert len(set(numbers)) == len(numbers)
    first, second = norm_inputs(case(LAYER)), norm_inputs(dataclasses.replace(case(LAYER), number=4))
    assert not torch.equal(first.x, second.x)


def test_every_pair_of_dtypes_is_reported_with_and_without_autocast() -> None:
    reported = ran(Norm("mixed", mixed)).traits["pairs"]["mixed"]
    assert len(reported) == 18
    assert {pair for pair, answer in reported.items() if answer == "supported"} == {
        f"{name} x {name}{autocast}" for name in ("fp32", "fp16", "bf16") for autocast in ("", " autocast")
    }
    assert set(reported.values()) == {"supported", WORDS}


def test_a_refusal_is_a_fault_only_where_the_pair_is_declared() -> None:
    assert ran(Norm("mixed", mixed)).faults == []
    context = ran(Norm("mixed", mixed, declared=frozenset({(SINGLE, SINGLE), (SINGLE, HALF)})))
    assert [fault.kind for fault in context.faults] == ["exception", "exception"]  # without autocast and with it
    assert context.faults[0].reason == f"mixed fp32 x fp16 is refused: {WORDS}"
    assert context.traits["refusal"] == WORDS


def only_single(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if x.dtype != SINGLE or weight.dtype != SINGLE:
        raise RuntimeError(WORDS)
    return layer(x, weight, bias)


def single(on_cpu: bool) -> list[Norm]:
    """Return one of torch's norms, changed to accept only float32."""
    return [dataclasses.replace(torch_norms(on_cpu)[0], name="single", call=only_single)]


def test_on_a_gpu_both_of_a_half_type_must_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_torch, "_autocast", lambda context: contextlib.nullcontext())  # the CPU's has no float16
    context = Card(JobDocument(nonce="0" * 32, level="standard"))
    norm_torch.check_norms(context, single(context.on_cpu))
    refused = ("fp16 x fp16", "fp16 x fp16 autocast", "bf16 x bf16", "bf16 x bf16 autocast")
    assert [fault.reason for fault in context.faults] == [f"single {pair} is refused: {WORDS}" for pair in refused]


def test_the_cpu_need_not_take_half_types() -> None:
    assert ran(*single(on_cpu=True)).faults == []


def test_a_norm_that_refuses_all_does_not_pass_and_fails_if_required() -> None:
    def never(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(WORDS)

    with pytest.raises(Skip, match="no norm supports any of these pairs"):
        ran(Norm("never", never, declared=frozenset()))
    assert [fault.kind for fault in ran(Norm("never", never)).faults] == ["exception", "exception"]


def test_another_error_is_not_taken_for_a_refusal() -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        ran(Norm("broken", broken))


def test_a_refusal_of_one_length_is_not_a_refusal_of_the_pair() -> None:
    def picky(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] == 4096:
            raise RuntimeError(WORDS)
        return layer(x, weight, bias)

    with pytest.raises(RuntimeError, match="expected scalar type"):
        ran(Norm("picky", picky))


def squares(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute RMSNorm by single operations in the input's dtype, as torch 2.4 and 2.5 do."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def test_a_norm_that_needs_an_upcast_is_reported() -> None:
    context = ran(dataclasses.replace(RMS, name="squares", call=squares))
    assert context.faults == []
    assert {label.partition(" x ")[0] for label in context.traits["needs_upcast"]} == {"squares fp16"}


def test_a_norm_that_must_upcast_fails_without_and_the_remedy_is_reported() -> None:
    context = ran(dataclasses.replace(RMS, name="squares", call=squares, upcasts=True))
    assert {fault.kind for fault in context.faults} == {"bound", "nonfinite"}
    assert "squares fp16 x fp16" in context.traits["needs_upcast"]
    assert "squares fp32 x fp32" not in context.traits["needs_upcast"]


class HalfSums(torch.autograd.Function):
    """A layer norm whose bias gradient is summed row by row in the input's dtype."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype  # type: ignore[attr-defined]
        return bias.expand(x.shape).clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:  # type: ignore[override]
        total = torch.zeros_like(grad[0])
        for row in grad:
            total = (total + row).to(ctx.dtype).to(grad.dtype)  # type: ignore[attr-defined]
        return None, None, total


def half_sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    right = layer(x.float(), weight, torch.zeros_like(bias))
    return (right + HalfSums.apply(x, weight, bias.float())).to(x.dtype)  # type: ignore[no-untyped-call]


def test_gradients_summed_in_half_precision_are_reported() -> None:
    context = ran(Norm("half_sums", half_sums))
    assert context.faults == []
    labels = context.traits["accumulates_in_half"]
    assert "half_sums fp16 x fp16 grad bias" in labels
    assert "half_sums bf16 x fp32 grad bias" in labels
    assert not [label for label in labels if "grad weight" in label or "fp32 x" in label]
