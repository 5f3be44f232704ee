"""conv: convolutions of image, video and audio models, on integers and on values in [0, 1).

The reference gathers the patches by indexing and multiplies matrices on the host: it uses no convolution. Its gradients
come from autograd through the indexing and that product.

With integers there is exactly one correct result. All inputs are 1 or -1. A filter has 8 to 15 weights of 1 or -1, and
its other weights are 0. Together the filters use every tap of every channel, except in two 3x3x3 convolutions and in
the depthwise ones, where they use some of the taps. Every sum is a small integer, and so is every partial sum: float16
and bfloat16 represent them in any order of summation. The result must therefore be equal. Only Winograd and Fourier
transforms compute with fractions and may leave fractions behind. Then the results must be so close that rounding to the
nearest integer gives the correct one; such inexact results are reported as a trait. A product or channel that is lost
or added twice changes a result by at least 1, so it is detected in every dtype and with every algorithm.

With values in [0, 1), an output element is a sum of k = channels x kernel products. The tolerance is that of a matrix
product with inner length k. Transforms mix neighbouring elements, so the largest |A||B| of the output determines the
tolerance of all its elements. In float16 cuDNN may keep parts of a sum in half precision (split-K, Winograd). The limit
is then the wider tolerances.half_sums, and results outside the narrower tolerance are reported as a trait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context, is_unsupported, short_name
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.element_comparison import compare
from envbuild.selftest.numerics.reference_products import patches

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# with values in [0, 1): compare all output channels up to this number; of more channels, compare only about 16
CHECKED = 96
NEAREST = 0.49  # the largest error of an integer result if fractions appear: less than 1/2
FEWEST, MOST = 8, 15  # nonzero weights of an integer filter; MOST keeps tolerances.half_sums below NEAREST
STEP = 1009  # distance between a filter's nonzero weights; a prime


@dataclass(frozen=True)
class Convolution:
    """An input (batch, channels, sizes...) and `out` filters of (channels / groups, kernel...).

    `transposed`: use torch's transposed convolution, whose weights are (channels, out / groups, kernel...). `extra`:
    its output padding. `last`: the input has the channels-last memory layout.
    """

    shape: tuple[int, ...]
    out: int
    kernel: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    extra: int = 0
    last: bool = False

    @property
    def dimensions(self) -> int:
        return len(self.kernel)

    @property
    def filters(self) -> tuple[int, ...]:
        first, second = (self.shape[1], self.out) if self.transposed else (self.out, self.shape[1])
        return (first, second // self.groups, *self.kernel)

    @property
    def products(self) -> int:
        """k: an upper limit of the number of products summed to one element of the output. A transposed convolution
        with a stride sums fewer, and so do elements at a border."""
        return self.shape[1] // self.groups * int(torch.Size(self.kernel).numel())

    @property
    def places(self) -> tuple[int, ...]:
        """The spatial sizes of the output."""
        sizes, kernels = self.shape[2:], (self.dilation * (n - 1) + 1 for n in self.kernel)
        each = zip(sizes, kernels, self.each(self.stride), self.each(self.padding))
        if self.transposed:
            return tuple((n - 1) * stride + k - 2 * padding + self.extra for n, k, stride, padding in each)
        return tuple((n - k + 2 * padding) // stride + 1 for n, k, stride, padding in each)

    @property
    def channels(self) -> list[int]:
        """The output channels that are compared with values in [0, 1): all of them, or an evenly spaced selection."""
        if self.out <= CHECKED:
            return list(range(self.out))
        return sorted({*range(0, self.out, self.out // 16), self.out - 1})

    def each(self, value: int | tuple[int, ...]) -> tuple[int, ...]:
        """Return the value for each dimension; a single number applies to all dimensions."""
        return value if isinstance(value, tuple) else (value,) * self.dimensions

    @property
    def name(self) -> str:
        shape, filters = ("x".join(map(str, sizes)) for sizes in (self.shape, self.filters))
        how = (" transposed" if self.transposed else "") + (" channels last" if self.last else "")
        return f"{self.dimensions}d {shape} filters {filters}{how}"

    def convolve(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.transposed:
            back = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.dimensions - 1]
            return back(x, w, bias, self.stride, self.padding, self.extra, self.groups, self.dilation)
        forth = (F.conv1d, F.conv2d, F.conv3d)[self.dimensions - 1]
        return forth(x, w, bias, self.stride, self.padding, self.dilation, self.groups)


# Most sizes are not multiples of 16, so that the kernels' edges are tested.
SMALL = (
    Convolution((2, 45, 211), 51, (7,), padding=9, dilation=3),  # a dilated convolution of a vocoder
    Convolution((2, 64, 33, 31), 48, (3, 3), padding=1),
    Convolution((1, 32, 35, 37), 64, (3, 3), stride=2, padding=1),
    Convolution((2, 67, 17, 19), 65, (1, 1)),
    Convolution((1, 3, 56, 42), 96, (14, 14), stride=14),  # an image cut into patches
    Convolution((1, 48, 25, 27), 48, (7, 7), padding=3, groups=48),  # depthwise convolution
    Convolution((1, 32, 5, 18, 20), 48, (3, 3, 3), padding=1),  # from a video autoencoder
    Convolution((1, 40, 7, 13, 15), 56, (3, 1, 1), padding=(1, 0, 0)),  # along time only
    Convolution((1, 4, 4, 32, 34), 96, (1, 2, 2), stride=(1, 2, 2)),  # a video cut into patches
)
# With as many channels as in models, because the algorithm depends on the size; too slow for a CPU.
WIDE = (
    Convolution((1, 320, 64, 64), 320, (3, 3), padding=1),
    Convolution((1, 128, 5, 30, 52), 128, (3, 3, 3), padding=1),
)
# Tested with a bias and all gradients, on several images.
TRAINED = (
    Convolution((3, 64, 17, 15), 72, (3, 3), padding=1),
    Convolution((3, 24, 9, 11), 32, (3, 3), padding=1, last=True),
    Convolution((2, 16, 13, 15), 24, (3, 3), stride=2, padding=1),
    Convolution((2, 12, 15, 17), 20, (5, 3), stride=(2, 3), padding=(4, 2), dilation=2),
    Convolution((2, 24, 11, 9), 36, (3, 3), padding=1, groups=4),
    Convolution((2, 20, 10, 13), 40, (5, 5), stride=2, padding=2, groups=20, last=True),  # depthwise
    Convolution((2, 33, 9, 7), 30, (1, 1), stride=2),
    Convolution((3, 19, 61), 23, (5,), stride=3, padding=2),
    Convolution((2, 10, 5, 7, 9), 18, (3, 3, 3), stride=(1, 2, 2), padding=1, last=True),
    Convolution((2, 18, 7, 9), 14, (4, 4), stride=2, padding=1, transposed=True),
    Convolution((2, 12, 23), 18, (5,), stride=3, padding=2, dilation=2, groups=2, transposed=True, extra=1),
    Convolution((2, 12, 3, 5, 4), 10, (2, 3, 3), stride=2, padding=1, transposed=True, last=True),
)


def conv(context: Context) -> None:
    """conv: image, video and audio convolutions and gradients are exact on integers, and close on other values."""
    version = None if context.on_cpu else torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    context.traits.update(torch=str(torch.__version__), cudnn=version)
    for case in SMALL if context.on_cpu else SMALL + WIDE:
        context.step(f"reference of conv{case.name}")
        x, w = integer_inputs(case)
        exact = reference(case, x, w, range(case.out))
        for dtype in DTYPES:
            _try(context, case, "integer", x.to(dtype), w.to(dtype), exact)
        x, w = hashed_inputs.uniform(case.shape, seed=63), hashed_inputs.uniform(case.filters, seed=64)
        for dtype in DTYPES:
            given = x.to(dtype), w.to(dtype)
            exact = reference(case, given[0].double(), given[1].double(), case.channels)
            _try(context, case, "uniform", *given, exact)
    for case in TRAINED:
        context.step(f"reference of conv{case.name} gradients")
        trained = Trained.of(case)
        for dtype in DTYPES:
            _train(context, case, trained, dtype)
    if not context.figures:
        raise Skip("this torch has no convolution on this device")


def sparse(rows: int, size: int, seed: int) -> torch.Tensor:
    """Return float32 (rows, size) of {-1, 0, 1}. Each row has FEWEST to MOST nonzero elements: within these limits, as
    many as are needed for a nonzero element in every column."""
    count = min(max(FEWEST, -(-size // rows)), MOST, size)
    places = torch.arange(rows * count).view(rows, count) * STEP % size
    return torch.zeros(rows, size).scatter(1, places, hashed_inputs.signs(rows * count, seed).view(rows, count))


def integer_inputs(case: Convolution) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and weights for which all sums are small integers."""
    rows, size = case.filters[0], int(torch.Size(case.filters[1:]).numel())
    x = hashed_inputs.signs(int(torch.Size(case.shape).numel()), 61).view(case.shape)
    return x, sparse(rows, size, 62).view(case.filters)


def reference(case: Convolution, x: torch.Tensor, w: torch.Tensor, channels: Sequence[int]) -> torch.Tensor:
    """Return the given output channels, (channels, images x places), in the dtype of x and w. The dtype is float64, or
    float32 for integers, whose sums are exact in float32."""
    strides, paddings = case.each(case.stride), case.each(case.padding)
    if case.transposed:
        x, w = _spread(case, x, strides), _turned(case, w)
        paddings = tuple(case.dilation * (n - 1) - p for n, p in zip(case.kernel, paddings))
        strides = case.each(1)
    per_group, size = case.out // case.groups, case.shape[1] // case.groups
    rows = []
    for group in sorted({channel // per_group for channel in channels}):
        part = x[:, group * size : (group + 1) * size]
        matrix, _ = patches(part, case.kernel, strides, paddings, case.dilation)
        rows.append(w[[c for c in channels if c // per_group == group]].flatten(1) @ matrix)
    return torch.cat(rows)


def _spread(case: Convolution, x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a transposed convolution's input with zeros between its elements, and `extra` zeros after the last one."""
    sizes = [(n - 1) * stride + 1 + case.extra for n, stride in zip(x.shape[2:], strides)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    wide[(slice(None), slice(None), *(slice(0, n - case.extra, stride) for n, stride in zip(sizes, strides)))] = x
    return wide


def _turned(case: Convolution, w: torch.Tensor) -> torch.Tensor:
    """Convert a transposed convolution's weights to those of the equivalent plain one: (out, channels / groups,
    kernel...)."""
    grouped = w.flip(*range(2, w.dim())).view(case.groups, -1, *w.shape[1:])
    return grouped.transpose(1, 2).reshape(case.out, -1, *case.kernel)


@dataclass(frozen=True)
class Trained:
    """The integers of a case in float32: inputs, output and gradients.

    `full`: an output gradient without zeros, from which the input's gradient is computed. `few`: a sparse output
    gradient, from which the gradients of weights and bias are computed. An element sums at most
    MOST products that are not 0, and the output also a bias from -4 to 4: all sums are small integers.
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor
    full: torch.Tensor
    few: torch.Tensor
    output: torch.Tensor
    gradients: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, case: Convolution) -> Trained:
        x, w = (values.requires_grad_() for values in integer_inputs(case))
        bias = (hashed_inputs.hashes(case.out, 65) % 9 - 4).to(torch.float32).requires_grad_()
        images, count = case.shape[0], case.shape[0] * int(torch.Size(case.places).numel())
        full = hashed_inputs.signs(case.out * count, 66).view(images, case.out, *case.places)
        few = sparse(case.out, count, 67).view(case.out, images, *case.places).transpose(0, 1)
        output = reference(case, x, w, range(case.out)) + bias[:, None]
        gradients = gradients_of(output, (x, w, bias), channel_rows(full), channel_rows(few))
        return cls(x.detach(), w.detach(), bias.detach(), full, few, output.detach(), gradients)


def gradients_of(
    output: torch.Tensor, leaves: tuple[torch.Tensor, ...], full: torch.Tensor, few: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradient of the input for the output gradient `full`, then the gradients of weights and bias for the
    output gradient `few`."""
    first = backward_pass.gradients(output, leaves[:1], full, retain_graph=True)
    return (*first, *backward_pass.gradients(output, leaves[1:], few))


def _train(context: Context, case: Convolution, trained: Trained, dtype: torch.dtype) -> None:
    name = f"conv{case.name}"
    x, w, bias, full, few = (
        values.to(context.device, dtype) for values in (trained.x, trained.w, trained.bias, trained.full, trained.few)
    )
    if case.last:
        x = x.contiguous(memory_format=torch.channels_last if case.dimensions == 2 else torch.channels_last_3d)
    with context.step(f"{short_name(dtype)} {name} gradients", is_unsupported) as step:
        leaves = tuple(values.requires_grad_() for values in (x, w, bias))
        output = case.convolve(*leaves)
        gradients = gradients_of(output, leaves, full, few)
    if step.refused:
        return
    expected = (trained.output, *trained.gradients)
    got = (channel_rows(output.detach()), *gradients)
    for what, values, wanted in zip(("output", "input gradient", "weight gradient", "bias gradient"), got, expected):
        _judge_integers(context, f"{name} {what}", values, wanted, step.seconds)


def _try(context: Context, case: Convolution, kind: str, x: torch.Tensor, w: torch.Tensor, exact: torch.Tensor) -> None:
    name = f"conv{case.name} {kind}"
    with context.step(f"{short_name(x.dtype)} {name}", is_unsupported) as step:
        got = case.convolve(x.to(context.device), w.to(context.device))
    if step.refused:
        return
    if kind == "integer":
        _judge_integers(context, name, channel_rows(got), exact, step.seconds)
    else:
        _judge_uniform(context, name, case.products, channel_rows(got[:, case.channels]), exact, step.seconds)


def channel_rows(values: torch.Tensor) -> torch.Tensor:
    """Reshape (images, channels, places...) to (channels, images x places)."""
    return values.transpose(0, 1).flatten(1)


def _judge_integers(context: Context, name: str, got: torch.Tensor, exact: torch.Tensor, seconds: float) -> None:
    """Check integer results. They must be equal to `exact`; if any result has a fraction, all must be within NEAREST of
    it."""
    whole = bool((got == got.round()).all())
    worst = compare(got, exact, torch.tensor(0.0 if whole else NEAREST, dtype=torch.float64))
    context.compared(name, got.dtype, got.shape, worst, seconds)
    if worst.wrong:
        context.fail(worst.kind, f"{short_name(got.dtype)} {name}: {worst}")
    elif not whole:
        context.traits.setdefault("not exact on integers", []).append(f"{short_name(got.dtype)} {name}")


def _judge_uniform(context: Context, name: str, k: int, got: torch.Tensor, exact: torch.Tensor, seconds: float) -> None:
    """Check results for values in [0, 1). No value is negative, so `exact` is also |A||B|."""
    tight = tolerances.gemm(exact, exact.max(), k, got.dtype, context.job.allow_tf32)
    may_be_half = got.dtype == torch.float16 and not context.on_cpu
    limit = tolerances.half_sums(exact, exact.max(), k, got.dtype) if may_be_half else tight
    worst = compare(got, exact, limit)
    context.compared(name, got.dtype, got.shape, worst, seconds)
    if worst.wrong:
        context.fail(worst.kind, f"{short_name(got.dtype)} {name}: {worst}")
    elif may_be_half and compare(got, exact, tight).wrong:
        context.traits.setdefault("accumulates_in_half", []).append(name)
