"""conv: its reference is a convolution, and its bound catches one wrong product."""

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.probes.convolution import conv
from envbuild.selftest.probes.convolution.conv import (
    CHECKED,
    NEAREST,
    SMALL,
    TRAINED,
    WIDE,
    Convolution,
    Trained,
    channel_rows,
    gradients_of,
    integer_inputs,
    reference,
)
from selftest.played import Card
from selftest.seeds.convolutions import half_convolution
from selftest.seeds.making import Kernel, tf32

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
EVERY = SMALL + WIDE


@pytest.mark.parametrize("case", SMALL + TRAINED, ids=lambda case: case.name)
def test_the_reference_is_torchs_own_in_float64(case: Convolution) -> None:
    shapes = (case.shape, case.filters, (case.shape[0], case.out, *case.places))
    x, w, grad = (hashed_inputs.signed(shape, seed).double() for seed, shape in enumerate(shapes))
    leaves = (x.requires_grad_(), w.requires_grad_())
    whole = case.convolve(x, w)
    got = reference(case, x, w, range(case.out))
    assert whole.shape[2:] == case.places
    assert float((got - channel_rows(whole)).detach().abs().max()) < 1e-12
    assert torch.equal(reference(case, x, w, case.channels), got[case.channels])
    if case in TRAINED:
        expected = torch.autograd.grad(whole, leaves, grad)
        for found, wanted in zip(torch.autograd.grad(got, leaves, channel_rows(grad)), expected, strict=True):
            assert float((found - wanted).abs().max()) < 1e-11


def allowed(exact: torch.Tensor, magnitude: torch.Tensor, k: int) -> float:
    """Return the largest error allowed for algorithms that compute with fractions, also in half precision."""
    assert float(exact.abs().max()) <= 256  # integers up to here are exact in bfloat16
    return float(tolerances.half_sums(exact, magnitude.max(), k, torch.float16).max())


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_one_wrong_product_leaves_what_is_allowed_on_integers(case: Convolution) -> None:
    x, w = integer_inputs(case)
    exact, magnitude = (reference(case, *given, range(case.out)) for given in ((x, w), (x.abs(), w.abs())))
    assert allowed(exact, magnitude, case.products) < NEAREST


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_one_wrong_product_of_a_gradient_does_too(case: Convolution) -> None:
    given = Trained.of(case)
    x, w, bias = (values.abs().requires_grad_() for values in (given.x, given.w, given.bias))
    output = reference(case, x, w, range(case.out)) + bias[:, None]
    magnitudes = gradients_of(output, (x, w, bias), channel_rows(given.full).abs(), channel_rows(given.few).abs())
    taps = int(torch.Size(case.kernel).numel())
    lengths = (case.out // case.groups * taps, *2 * [given.few[:, 0].numel()])
    assert allowed(given.output, output.detach(), case.products + 1) < NEAREST
    for exact, magnitude, k in zip(given.gradients, magnitudes, lengths, strict=True):
        assert allowed(exact, magnitude, k) < NEAREST


@pytest.mark.parametrize("case", EVERY + TRAINED, ids=lambda case: case.name)
def test_filters_together_use_every_weight(case: Convolution) -> None:
    x, w = integer_inputs(case)
    assert bool((x != 0).all())
    used = (w != 0).any(dim=0).double()
    assert used.mean() == 1 or (case in (SMALL[6], WIDE[1]) and used.flatten(1).mean(dim=1).min() > 0.5)


def test_some_of_many_channels_are_compared() -> None:
    wide = WIDE[0].channels
    assert WIDE[0].out > CHECKED and 16 <= len(wide) <= 18 and {0, WIDE[0].out - 1} <= set(wide)
    assert all(case.channels == list(range(case.out)) for case in SMALL)


# Winograd's transforms as Lavin and Gray have them ("Fast algorithms for convolutional neural networks", 2016).
TRANSFORMS = {
    2: (
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
        [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
        [[1, 1, 1, 0], [0, 1, -1, -1]],
    ),
    4: (
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ],
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
    ),
}
PLAIN = SMALL[1]  # 3x3 with a stride of 1


def winograd(tile: int) -> Kernel:
    """Compute right 3x3 convolutions, padded by 1, with transforms in half precision: each is rounded once."""
    back, of_filters, forth = (torch.tensor(matrix, dtype=torch.float32) for matrix in TRANSFORMS[tile])

    def convolve(x: torch.Tensor, w: torch.Tensor, *rest: object) -> torch.Tensor:
        height, width = x.shape[2:]
        image = F.pad(x.float(), (1, 1 + -width % tile, 1, 1 + -height % tile))
        tiles = image.unfold(2, tile + 2, tile).unfold(3, tile + 2, tile)
        images, filters = (back @ tiles @ back.t()).half(), (of_filters @ w.float() @ of_filters.t()).half()
        sums = torch.einsum("ocij,bcxyij->boxyij", filters.float(), images.float()).half()
        found = (forth @ sums.float() @ forth.t()).permute(0, 1, 2, 4, 3, 5)
        return found.flatten(4, 5).flatten(2, 3)[:, :, :height, :width].half()

    return convolve


def split(slices: int) -> Kernel:
    """Compute right split-K convolutions: the sum of each slice is rounded to half precision, and the slices are added
    in half precision."""

    def convolve(x: torch.Tensor, w: torch.Tensor, bias: None, *rest: int) -> torch.Tensor:
        parts = zip(x.float().chunk(slices, 1), w.float().chunk(slices, 1), strict=True)
        total, *others = (CONVOLVE[2](part, filters, None, *rest).half() for part, filters in parts)
        for other in others:
            total = (total.float() + other.float()).half()
        return total

    return convolve


def on_a_card(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, dtype: torch.dtype = torch.float16) -> Card:
    """Run the probe for one plain convolution, with this kernel."""
    monkeypatch.setattr(conv, "SMALL", (PLAIN,))
    monkeypatch.setattr(conv, "WIDE", ())
    monkeypatch.setattr(conv, "TRAINED", ())
    monkeypatch.setattr(conv, "DTYPES", (dtype,))
    monkeypatch.setattr(F, "conv2d", kernel)
    context = Card(JobDocument("0" * 32, level="standard"))
    conv.conv(context)
    return context


LEGITIMATE = {
    "winograd 2x2": winograd(2),
    "winograd 4x4": winograd(4),
    "split-K 8": split(8),
    "split-K 16": split(16),
    "half": half_convolution(F.conv2d),
}


@pytest.mark.parametrize("kernel", LEGITIMATE.values(), ids=LEGITIMATE)
def test_sums_in_half_on_a_gpu_are_reported_and_not_a_fault(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    found = on_a_card(monkeypatch, kernel)
    assert found.faults == []
    assert f"conv{PLAIN.name} uniform" in found.traits["accumulates_in_half"]
    assert all(figure.ratio < 0.5 for figure in found.figures)


def test_a_kernel_that_adds_up_in_float32_has_no_such_trait(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_a_card(monkeypatch, F.conv2d)
    assert (found.faults, "accumulates_in_half" in found.traits) == ([], False)


WRONG = {
    "row": lambda x, w, b, stride, padding, *rest: CONVOLVE[2](x.roll(1, 2), w, b, stride, padding, *rest),
    "slice": lambda x, w, b, *rest: CONVOLVE[2](x[:, :60], w[:, :60], b, *rest),
    "nan": lambda *args: CONVOLVE[2](*args).index_fill(3, torch.tensor(30), float("nan")),
    "channel": lambda x, w, *rest: CONVOLVE[2](x, w.index_fill(1, torch.tensor(63), 0), *rest),
    "tap": lambda x, w, *rest: CONVOLVE[2](x, w * (torch.arange(w.numel()) != 0).view(w.shape), *rest),
    "winograd without a channel": lambda x, w, *rest: winograd(4)(x[:, 1:], w[:, 1:], *rest),
}


@pytest.mark.parametrize("kernel", WRONG.values(), ids=WRONG)
def test_wrong_results_are_found_in_half_precision_too(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    assert on_a_card(monkeypatch, kernel).faults


def test_on_integers_every_output_channel_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    many = Convolution((1, 4, 5, 5), 2 * CHECKED, (3, 3))
    spoiled = next(channel for channel in range(many.out) if channel not in many.channels)
    monkeypatch.setattr("selftest.probes.convolution.test_conv.PLAIN", many)
    found = on_a_card(monkeypatch, lambda *args: CONVOLVE[2](*args).index_fill(1, torch.tensor(spoiled), 0))
    assert [fault.reason.split(":")[0] for fault in found.faults] == [f"fp16 conv{many.name} integer"]


def test_the_other_dtypes_are_held_to_the_tighter_bound_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_a_card(monkeypatch, tf32(F.conv2d), torch.float32).faults
