"""conv: convolutions as image, video and audio models have them, on integers and on values in [0, 1).

The reference gathers the patches by indexing and sums their products on the host, so no convolution has a part in it.
An element is a sum of k = channels x kernel products, and the bound is that of a product with this inner length. cuDNN
may compute by Winograd's or Fourier's transform, which mixes neighbours and is not exact on integers: so the largest
|A||B| of the output counts for each of its elements, and integers are held to the bound too. It stays below 1/2 for
them, so one wrong product is caught all the same; which results were not exact is told.

In float16 cuDNN may keep parts of a sum in half precision (split-K, Winograd): there the wider bounds.half_sums is the
limit, and what leaves the other is told as a trait. One wrong product is caught in the other dtypes, then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from envbuild.selftest import bounds, inputs
from envbuild.selftest.context import Context, is_unsupported, short_name
from envbuild.selftest.outcome import Skip
from envbuild.selftest.reference import compare, patches, product

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHECKED = 96  # output channels that are all compared with the reference; of more of them about 16


@dataclass(frozen=True)
class Convolution:
    """An input (batch, channels, sizes...) and `out` filters of (channels / groups, kernel...)."""

    shape: tuple[int, ...]
    out: int
    kernel: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int = 1
    groups: int = 1

    @property
    def dimensions(self) -> int:
        return len(self.kernel)

    @property
    def filters(self) -> tuple[int, ...]:
        return (self.out, self.shape[1] // self.groups, *self.kernel)

    @property
    def products(self) -> int:
        """k: how many are summed to one element of the output."""
        return int(torch.Size(self.filters[1:]).numel())

    @property
    def channels(self) -> list[int]:
        """Those output channels that are compared: all, or some from the first to the last."""
        if self.out <= CHECKED:
            return list(range(self.out))
        return sorted({*range(0, self.out, self.out // 16), self.out - 1})

    def each(self, value: int | tuple[int, ...]) -> tuple[int, ...]:
        """A number for each dimension."""
        return value if isinstance(value, tuple) else (value,) * self.dimensions

    @property
    def name(self) -> str:
        return "{}d {} filters {}".format(self.dimensions, *("x".join(map(str, s)) for s in (self.shape, self.filters)))


# Few sizes are multiples of 16, so that the kernels' edges are met.
SMALL = (
    Convolution((2, 45, 211), 51, (7,), padding=9, dilation=3),  # a vocoder's, dilated
    Convolution((2, 64, 33, 31), 48, (3, 3), padding=1),
    Convolution((1, 32, 35, 37), 64, (3, 3), stride=2, padding=1),
    Convolution((2, 67, 17, 19), 65, (1, 1)),
    Convolution((1, 3, 56, 42), 96, (14, 14), stride=14),  # an image cut into patches
    Convolution((1, 48, 25, 27), 48, (7, 7), padding=3, groups=48),  # depthwise
    Convolution((1, 32, 5, 18, 20), 48, (3, 3, 3), padding=1),  # a video autoencoder's
    Convolution((1, 40, 7, 13, 15), 56, (3, 1, 1), padding=(1, 0, 0)),  # along time only
    Convolution((1, 4, 4, 32, 34), 96, (1, 2, 2), stride=(1, 2, 2)),  # a video cut into patches
)
# As wide as models have them, since the size decides which algorithm is taken; too slow for a CPU.
WIDE = (
    Convolution((1, 320, 64, 64), 320, (3, 3), padding=1),
    Convolution((1, 128, 5, 30, 52), 128, (3, 3, 3), padding=1),
)


def conv(context: Context) -> None:
    """conv: image, video and audio convolutions stay within the bound of a sum of as many products."""
    version = None if context.on_cpu else torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    context.traits.update(torch=str(torch.__version__), cudnn=version)
    for case in SMALL if context.on_cpu else SMALL + WIDE:
        context.step(f"reference of conv{case.name}")
        x, w = inputs.ternary(case.shape, seed=61), inputs.ternary(case.filters, seed=62)
        exact, magnitude = reference(case, x, w), reference(case, x.abs(), w.abs())
        for dtype in DTYPES:
            _compare(context, case, "integer", x.to(dtype), w.to(dtype), exact, magnitude)
        x, w = inputs.uniform(case.shape, seed=63), inputs.uniform(case.filters, seed=64)
        for dtype in DTYPES:
            exact = reference(case, x.to(dtype), w.to(dtype))
            _compare(context, case, "uniform", x.to(dtype), w.to(dtype), exact, exact)  # none of them is negative
    if not context.figures:
        raise Skip("this torch has no convolution on this device")


def reference(case: Convolution, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The compared channels in float64, (channels, batch x positions)."""
    wide, chosen = w.to(torch.float64).flatten(1), case.channels
    per_group, size = case.out // case.groups, case.shape[1] // case.groups
    rows = []
    for group in sorted({channel // per_group for channel in chosen}):
        part = x[:, group * size : (group + 1) * size].to(torch.float64)
        matrix, _ = patches(part, case.kernel, case.each(case.stride), case.each(case.padding), case.dilation)
        rows.append(product(wide[[c for c in chosen if c // per_group == group]], matrix))
    return torch.cat(rows)


def _compare(
    context: Context,
    case: Convolution,
    kind: str,
    x: torch.Tensor,
    w: torch.Tensor,
    exact: torch.Tensor,
    magnitude: torch.Tensor,
) -> None:
    name = f"conv{case.name} {kind}"
    convolve = (F.conv1d, F.conv2d, F.conv3d)[case.dimensions - 1]
    rest = (case.stride, case.padding, case.dilation, case.groups)
    with context.step(f"{short_name(x.dtype)} {name}", is_unsupported) as step:
        got = convolve(x.to(context.device), w.to(context.device), None, *rest)
    if step.refused:
        return
    compared = got[:, case.channels].transpose(0, 1).flatten(1)
    tf32 = context.job.allow_tf32
    tight = bounds.gemm(exact, magnitude.max(), case.products, x.dtype, tf32)
    may_be_half = x.dtype == torch.float16 and not context.on_cpu
    limit = bounds.half_sums(exact, magnitude.max(), case.products, x.dtype) if may_be_half else tight
    worst = compare(compared, exact, limit)
    context.figure(name, got.dtype, got.shape, worst.error, worst.bound, step.seconds)
    if worst.wrong:
        context.fail(worst.kind, f"{short_name(x.dtype)} {name}: {worst}")
        return
    if may_be_half and compare(compared, exact, tight).wrong:
        context.traits.setdefault("accumulates_in_half", []).append(name)
    if kind == "integer" and worst.error:
        context.traits.setdefault("not exact on integers", []).append(f"{short_name(x.dtype)} {name}")
