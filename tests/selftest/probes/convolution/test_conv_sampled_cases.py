"""conv.cases: its reference is a convolution, sampled cases see each changed element, and wrong kernels are found."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import hashed_inputs, pairwise_case_sampling
from envbuild.selftest.numerics.operation_case import Case, worst
from envbuild.selftest.numerics.pairwise_case_sampling import Operation
from envbuild.selftest.probes.convolution import conv_sampled_cases
from envbuild.selftest.probes.convolution.conv_argument_space import MOST_PRODUCTS, point_of_layer, shape, with_usual
from selftest.numerics.test_operation_case import (
    test_a_right_kernel_is_within_tolerance_and_each_element_of_its_inputs_matters as sensitive,
)

pytestmark = pytest.mark.slow

OPERATION, OF_LAYERS = conv_sampled_cases.OPERATIONS
SEEDS = (3, 19)
FEW = 12


def few(operation: Operation, seed: int) -> list[Case]:
    count = FEW if operation is OPERATION else FEW // 2
    return list(
        pairwise_case_sampling.cases(operation, pairwise_case_sampling.sample(operation, count, seed).points, seed)
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("operation", [OPERATION, OF_LAYERS], ids=lambda operation: operation.name)
def test_sampled_cases_see_each_changed_element(operation: Operation, seed: int) -> None:
    for case in few(operation, seed):
        sensitive(case)


@pytest.mark.parametrize(
    "point",
    [
        *pairwise_case_sampling.sample(OPERATION, 20, 5).points,
        *map(point_of_layer, pairwise_case_sampling.sample(OF_LAYERS, 20, 5).points),
    ],
    ids=lambda point: str(shape(with_usual(point))),
)
def test_the_reference_is_torchs_own_in_float64(point: pairwise_case_sampling.Point) -> None:
    what = shape(with_usual(point))
    (read, sizes), (written, places) = what.read, what.written
    shapes = (what.images, read, *sizes), what.weights, (what.images, written, *places)
    x, w, grad = (hashed_inputs.signed(each, seed).double() for seed, each in enumerate(shapes))
    leaves = x.requires_grad_(), w.requires_grad_()
    output = conv_sampled_cases.convolve(what, *leaves)
    dx, dw = torch.autograd.grad(output, leaves, grad)
    gathered, spread = conv_sampled_cases.sum_windows, conv_sampled_cases.spread_windows
    forth, back = (spread, gathered) if what.transposed else (gathered, spread)
    small, large = (x, grad) if what.transposed else (grad, x)
    for got, exact in (
        (forth(what, x, w), output),
        (back(what, grad, w), dx),
        (conv_sampled_cases.paired(what, small, large), dw),
    ):
        assert float((got - exact).detach().abs().max()) < 1e-11


def test_every_point_has_a_shape_of_bounded_work() -> None:
    for seed in range(20):
        layers = map(point_of_layer, pairwise_case_sampling.sample(OF_LAYERS, 10, seed).points)
        for point in (*pairwise_case_sampling.sample(OPERATION, 40, seed).points, *layers):
            what = shape(with_usual(point))
            assert min(*what.large, *what.small, *what.weights, what.images, what.groups) >= 1
            products = what.images * math.prod(what.weights) * math.prod(what.small)
            assert products <= 8 * MOST_PRODUCTS, f"{what}: sizes grow for wide kernels, by so much at most"


def test_every_tap_of_every_point_reaches_an_element() -> None:
    for seed in range(20):
        for point in pairwise_case_sampling.sample(OPERATION, 200, seed).points:
            what = shape(with_usual(point))
            dimensions = zip(what.kernel, what.stride, what.dilation, what.padding, what.small, what.large, strict=True)
            for kernel, stride, dilation, (before, _), small, large in dimensions:
                for tap in range(kernel):
                    places = (place * stride + tap * dilation - before for place in range(small))
                    assert any(0 <= place < large for place in places), what


Kernel = Callable[..., torch.Tensor]


def lost_tap(kernel: Kernel) -> Kernel:
    """Ignore the last tap of the kernel in the last group."""

    def wrong(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
        keep = torch.ones_like(w)
        keep[-1, -1, ..., -1] = 0
        return kernel(x, w * keep, *rest)

    return wrong


def cut(kernel: Kernel) -> Kernel:
    """Round float32 to bfloat16."""
    return lambda x, *rest: kernel(x.bfloat16().to(x.dtype), *rest)


def packed(kernel: Kernel) -> Kernel:
    """Read an input that does not begin at the start of its buffer as if it began there and were contiguous."""
    return lambda x, *rest: kernel(
        x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), 0) if x.storage_offset() else x, *rest
    )


def short_kernel(kernel: Kernel) -> Kernel:
    """Ignore the taps after the eighth of each row of the kernel."""

    def wrong(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
        return kernel(x, torch.cat((w[..., :8], 0 * w[..., 8:]), -1), *rest)

    return wrong


def only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the cases of one function of torch alone, of all that are sampled: the others pass as without a fault."""
    sampled = pairwise_case_sampling.cases
    monkeypatch.setattr(
        pairwise_case_sampling,
        "cases",
        lambda operation, points, seed: (case for case in sampled(operation, points, seed) if name in case.name),
    )


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose1d"])
def test_a_wrong_kernel_of_a_layer_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(F, name, short_kernel(getattr(F, name)))
    only(monkeypatch, name)
    context = Context(JobDocument("0" * 32, level="full", seed=3))
    few_layers = dataclasses.replace(OF_LAYERS, counts={"full": 100})
    pairwise_case_sampling.check(context, [few_layers])
    assert context.faults and all(name in fault.reason for fault in context.faults)


@pytest.mark.parametrize("wrong", [lost_tap, cut, packed])
@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    monkeypatch.setattr(F, name, wrong(getattr(F, name)))
    only(monkeypatch, name)
    context = Context(JobDocument("0" * 32, level="standard", seed=3))
    conv_sampled_cases.conv_cases(context)
    assert context.faults and all(name in fault.reason for fault in context.faults)


DILATED = {
    **{name: values[0] for name, values in conv_sampled_cases.SPACE.items()},
    "usual": "any", "rank": 2, "images": 67, "channels": 1, "filters": 4, "stride": (1, 1, 1), "dilation": (2, 2, 2),
    "gradient": "expanded", "mode": "gradients", "turn": 0,
}  # fmt: skip


def test_a_bias_gradient_that_is_rounded_after_each_image_passes_and_one_without_an_image_does_not() -> None:
    """torch's own CPU kernel for dilated convolutions rounds after each image where oneDNN has no kernel for the
    dtype."""
    case = conv_sampled_cases.case(DILATED, seed=50, device=torch.device("cpu"), tf32=False)
    grad = case.given[-1]
    name, expected = next((key, exact) for key, exact in case.expected().items() if "bf16 gradient of the bias" in key)
    rounded = torch.zeros(grad.shape[1], dtype=torch.bfloat16)
    for _ in range(67):
        rounded = rounded + grad.sum(dim=(0, 2, 3)).bfloat16()
    assert not worst({name: rounded}, {name: expected})[name].wrong
    lost = (66 * grad.sum(dim=(0, 2, 3))).bfloat16()
    assert worst({name: lost}, {name: expected})[name].wrong
