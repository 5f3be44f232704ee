"""The convolutions that conv_sampled_cases.py samples: the space of arguments and sizes, and the shape for each
combination of values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.selftest.numerics.pairwise_case_sampling import Point

Sizes = tuple[int, ...]

# A value that is listed several times is drawn more often. Many sizes are odd, or just above multiples of a vector or
# tile size.
SPACE: Mapping[str, Sequence[Any]] = {
    "usual": ("any", "dense", "3x3", "long", "depthwise", "grouped", "volume", "transposed"),
    "values": (*["whole"] * 5, "fractions"),
    "rank": (1, *[2] * 4, 3),
    "way": (*["plain"] * 3, "transposed"),
    "images": (1, 2, 3, 5, 7, 67),
    "channels": (1, 2, 3, 4, 8, 9, 13, 17, 24, 33, 40),  # channels per group; "filters" is per group, too
    "filters": (1, 2, 3, 4, 5, 7, 8, 12, 17, 33),
    "groups": (*["one"] * 3, "two", "three", "depthwise", "depthwise twice"),
    "wide": ("nothing", "nothing", "images", "channels", "filters", "length"),
    # The number or length that `wide` names is `multiple` + `past`, or less if there would be too many products. The
    # large length of a one-dimensional tensor is LONG[`multiple`] + `past` instead.
    "multiple": (16, 32, 64, 128),
    "past": (-7, -3, -1, 0, 1, 2, 5, 8),
    "length": (4, 5, 7, 8, 9, 12, 15, 16, 17),
    "width": (3, 4, 5, 6, 7, 9),
    "kernel": (*[(3, 3, 3)] * 3, *[(1, 1, 1)] * 2, (2, 2, 2), (5, 3, 1), (1, 3, 3), (3, 1, 2), (4, 4, 1), (7, 5, 1)),
    "stride": (*[(1, 1, 1)] * 3, *[(2, 2, 2)] * 3, (3, 3, 2), (2, 1, 1), (1, 2, 3)),
    "dilation": (*[(1, 1, 1)] * 4, (2, 2, 2), (1, 2, 1), (3, 1, 2)),
    "padding": ("none", "one", "one", "half", "uneven", "full", "same"),
    "extra": (0, 1, 2),  # output padding of a transposed convolution; reduced where stride and dilation require it
    "bias": (True, True, False),
    "input": ("channels last", "rows apart", "images apart", "turned", "offset", "channels last apart"),
    "weights": ("contiguous", "channels last", "turned", "offset"),
    "gradient": ("contiguous", "channels last", "expanded", "turned", "rows apart"),
    "turn": (0, 1, 2),  # shifts which dtype gets which layout
    "mode": (*["gradients"] * 3, "second call", "inference", "one image without a batch"),
}
_UNSTRIDED = {"stride": (1, 1, 1), "dilation": (1, 1, 1)}
_DENSE = {"way": "plain", "groups": "one"}
# Values that models use most, but that random combinations would seldom have. They replace the drawn values.
USUAL: Mapping[str, Mapping[str, Any]] = {
    "any": {},
    "dense": {**_DENSE, "rank": 2, "wide": "nothing"},
    "3x3": {**_DENSE, **_UNSTRIDED, "rank": 2, "wide": "nothing", "kernel": (3, 3, 3)},
    "long": {**_DENSE, **_UNSTRIDED, "rank": 1, "wide": "length", "kernel": (5, 3, 1)},
    "depthwise": {"way": "plain", "groups": "depthwise", "rank": 2, "kernel": (3, 3, 3), "wide": "nothing"},
    "grouped": {"way": "plain", "groups": "two", "rank": 2, "wide": "nothing"},
    "volume": {"way": "plain", "rank": 3, "wide": "nothing"},
    "transposed": {"way": "transposed"},
}
_LAYER = {"usual": "any", "rank": 2, "way": "plain", "groups": "one", "wide": "nothing", "extra": 0}
_LAYER.update(length=9, width=6, channels=8, filters=8, multiple=128, **_UNSTRIDED, padding="half")


def _strided(kernel: int, stride: int, padding: int) -> dict[str, Any]:
    return {"kernel": (kernel,) * 3, "stride": (stride,) * 3, "padding": padding}


# Layers of models. Most have kernels, strides, dilations or groups outside SPACE. Two-dimensional layers (images) come
# first, then one-dimensional (sound, text) and three-dimensional ones. The values replace those of _LAYER. Depthwise
# kernels are at most 27 wide. From width 31 on, with channels last and bfloat16, oneDNN (torch 2.13) does not return on
# a processor with AVX512_BF16.
LAYERS: Mapping[str, Mapping[str, Any]] = {
    "patches of 16": {**_strided(16, 16, 0), "channels": 3, "filters": 24, "length": 53},
    "patches of 14": {**_strided(14, 14, 0), "channels": 3, "filters": 40, "length": 43},
    "patches of 4": {**_strided(4, 4, 0), "channels": 3, "filters": 33, "length": 14},
    "downsampling by 2": {**_strided(2, 2, 0), "channels": 24, "filters": 48},
    "stem of 7": {**_strided(7, 2, 3), "channels": 3, "filters": 64, "length": 20},
    "stem of 11": {**_strided(11, 4, 2), "channels": 3, "filters": 32, "length": 31},
    "depthwise of 5, stride 2": {**_strided(5, 2, 2), "groups": "depthwise", "channels": 40, "length": 17},
    "depthwise of 7": {"kernel": (7, 7, 7), "groups": "depthwise", "channels": 33},
    "depthwise of 13": {"kernel": (13, 13, 1), "groups": "depthwise", "channels": 16},
    "depthwise of 27": {"kernel": (27, 27, 1), "groups": "depthwise", "channels": 4},
    "depthwise of 1x11": {"kernel": (1, 11, 1), "groups": "depthwise", "channels": 17},
    "depthwise of 21x1": {"kernel": (21, 1, 1), "groups": "depthwise", "channels": 24},
    "row of 7": {"kernel": (1, 7, 1), "channels": 24, "filters": 33},
    "column of 9": {"kernel": (9, 1, 1), "channels": 24, "filters": 32},
    "square of 9": {"kernel": (9, 9, 1), "channels": 3, "filters": 16},
    "32 groups": {"kernel": (3, 3, 3), "groups": "thirty-two", "channels": 4, "filters": 4},
    "16 wide groups, stride 2": {**_strided(3, 2, 1), "groups": "sixteen", "channels": 8, "filters": 8},
    "dilated by 6": {"kernel": (3, 3, 3), "dilation": (6, 6, 6), "channels": 16, "filters": 24, "length": 17},
    "dilated by 18": {"kernel": (3, 3, 3), "dilation": (18, 18, 18), "padding": 18, "channels": 9, "filters": 8},
    "upsampling by 4x4": {**_strided(4, 2, 1), "way": "transposed", "channels": 16, "filters": 24},
    "upsampling by 2x2": {**_strided(2, 2, 0), "way": "transposed", "channels": 24, "filters": 33},
    "depthwise upsampling": {**_strided(4, 2, 1), "way": "transposed", "groups": "depthwise", "channels": 21},
    "line of 10, stride 5": {**_strided(10, 5, 0), "rank": 1, "channels": 1, "filters": 32},
    "line of 41, groups": {**_strided(41, 4, 20), "rank": 1, "groups": "sixteen", "channels": 4, "filters": 4},
    "line of 128, groups": {**_strided(128, 1, 64), "rank": 1, "groups": "sixteen", "channels": 4, "filters": 4},
    "frames of 400": {**_strided(400, 160, 0), "rank": 1, "channels": 1, "filters": 21, "multiple": 32},
    "causal line of 4": {**_strided(4, 1, 3), "rank": 1, "groups": "depthwise", "channels": 40},
    "depthwise line of 27": {"kernel": (27, 1, 1), "rank": 1, "groups": "depthwise", "channels": 24},
    "line dilated by 64": {"kernel": (3, 3, 3), "rank": 1, "dilation": (64, 1, 1), "channels": 16, "filters": 24},
    "pointwise line": {**_strided(1, 1, 0), "rank": 1, "channels": 40, "filters": 80},
    "upsampled line by 8": {**_strided(16, 8, 4), "rank": 1, "way": "transposed", "channels": 8, "filters": 16},
    "tubes of 2x8x8": {"rank": 3, "kernel": (2, 8, 8), "stride": (2, 8, 8), "padding": 0, "channels": 3, "filters": 5},
    "frames of a volume": {"rank": 3, "kernel": (3, 1, 1), "channels": 5, "filters": 4},
    "images of a volume": {"rank": 3, "kernel": (1, 7, 7), "channels": 3, "filters": 5},
}
LAYER_SPACE: Mapping[str, Sequence[Any]] = {
    "layer": tuple(LAYERS),
    "more": (0, 0, 1, 3),  # this number is added to the channels and to the filters of a group
    "past": (-7, -3, 0, 1, 5),
    "images": (1, 2, 3, 5),
    **{name: SPACE[name] for name in ("values", "bias", "input", "weights", "gradient", "turn", "mode")},
}
# Maps `multiple` to the length of a one-dimensional tensor.
LONG = {16: 1040, 32: 1088, 64: 2048, 128: 256}
GROUPS = {"one": 1, "two": 2, "three": 3, "sixteen": 16, "thirty-two": 32}
MOST_VOLUME_GROUPS = 12  # maximum in three dimensions, where torch's CPU kernels take milliseconds per group
# maximum number of products of a case; above this limit, images, channels or filters are reduced
MOST_PRODUCTS = 1 << 22
FEW_IMAGES = 5


@dataclass(frozen=True)
class ConvShape:
    """The shape of a convolution.

    `large` and `small`: the sizes of the tensor with more positions and of the tensor with fewer positions. In a plain
    convolution `large` is the input and `small` the output; in a transposed convolution it is the other way round.
    `channels`: the number of channels per group of the large tensor. `filters`: the number of channels per group of the
    small tensor. `padding`: the padding before and after each dimension.
    """

    images: int
    groups: int
    channels: int
    filters: int
    large: Sizes
    small: Sizes
    kernel: Sizes
    stride: Sizes
    padding: tuple[tuple[int, int], ...]
    dilation: Sizes
    transposed: bool
    extra: Sizes
    same: bool  # the padding argument of the call is the string "same"

    @property
    def weights(self) -> Sizes:
        return (self.groups * self.filters, self.channels, *self.kernel)

    @property
    def read(self) -> tuple[int, Sizes]:
        """The number of channels and the sizes of the input."""
        return (
            (self.groups * self.filters, self.small) if self.transposed else (self.groups * self.channels, self.large)
        )

    @property
    def written(self) -> tuple[int, Sizes]:
        """The number of channels and the sizes of the output."""
        return (
            (self.groups * self.channels, self.large) if self.transposed else (self.groups * self.filters, self.small)
        )

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def function(self) -> str:
        """The name of the function in torch.nn.functional."""
        return f"conv{'_transpose' if self.transposed else ''}{self.rank}d"

    @property
    def products(self) -> tuple[int, int]:
        """The largest number of products summed to an element of the small tensor, and to an element of the large
        tensor."""
        return self.channels * math.prod(self.kernel), self.filters * math.prod(self.kernel)

    @property
    def covered(self) -> list[list[int]]:
        """For each dimension, the positions of the input that at least one window reads."""
        if self.transposed:
            return [list(range(n)) for n in self.small]
        return [
            sorted({p * s + t * d - before for p in range(places) for t in range(k)} & set(range(n)))
            for n, places, k, s, d, (before, _) in zip(
                self.large, self.small, self.kernel, self.stride, self.dilation, self.padding
            )
        ]

    def __str__(self) -> str:
        def by(sizes: Sequence[int]) -> str:
            return "x".join(map(str, sizes))

        channels, sizes = self.read
        padding = "same" if self.same else by([before for before, _ in self.padding])
        extra = f" output_padding {by(self.extra)}" if any(self.extra) else ""
        return (
            f"{self.function} {by((self.images, channels, *sizes))} weights {by(self.weights)} "
            f"stride {by(self.stride)} padding {padding}{extra} dilation {by(self.dilation)} groups {self.groups}"
        )


def point_of_layer(point: Point) -> Point:
    """Convert a combination of values of LAYER_SPACE to a combination of values of SPACE."""
    found = {**_LAYER, **point, **LAYERS[point["layer"]]}
    more = 0 if found["channels"] == 1 or found["rank"] == 3 else point["more"]
    return {**found, "channels": found["channels"] + more, "filters": found["filters"] + more}


def with_usual(point: Point) -> Point:
    return {**point, **USUAL[point["usual"]]}


def output_padding(point: Point) -> Sizes:
    """Return the output padding of a transposed convolution. torch requires it to be less than the stride or less than
    the dilation."""
    return tuple(min(point["extra"], max(s, d) - 1) for s, d in zip(point["stride"], point["dilation"]))[
        : point["rank"]
    ]


def shape(point: Point) -> ConvShape:
    """Return the shape for one combination of parameter values (`point`). Sizes that are too small for the kernel are
    increased, and padding that is too wide is reduced."""
    rank, transposed = point["rank"], point["way"] == "transposed"
    kernel, stride, dilation = (point[name][:rank] for name in ("kernel", "stride", "dilation"))
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]
    same = point["padding"] == "same" and not transposed and set(stride) == {1}
    padding = tuple(_padding(point["padding"], *each, same) for each in enumerate(extents))
    images, groups, channels, filters = _counts(point)
    sizes = _sizes(point)
    if transposed:
        extra = output_padding(point)
        # Two more than the padding removes, so that the output is not empty.
        small = tuple(max(2 + before // s, n // s) for n, s, (before, _) in zip(sizes, stride, padding))
        small = tuple(map(_reached_by_every_tap, small, kernel, stride, dilation, padding))
        reached = ((n - 1) * s + extent for n, s, extent in zip(small, stride, extents))
        large = tuple(n - 2 * before + more for n, (before, _), more in zip(reached, padding, extra))
    else:
        extra = (0,) * rank
        # Every tap must read an element, and strided windows must have at least two positions. With one position,
        # oneDNN 3.12 (torch 2.13) computes wrong bfloat16 results on processors with AMX, in two dimensions without
        # padding.
        least = (extent if s == 1 else extent + s for extent, s in zip(extents, stride))
        large = tuple(max(n, needed) for n, needed in zip(sizes, least))
        wide = (n + before + after for n, (before, after) in zip(large, padding))
        small = tuple((n - extent) // s + 1 for n, extent, s in zip(wide, extents, stride))
    numbers = images, groups, channels, filters
    return ConvShape(*numbers, large, small, kernel, stride, padding, dilation, transposed, extra, same)


def _reached_by_every_tap(small: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int]) -> int:
    """Return the size of a dimension of the small tensor: `small`, or the next size for which every tap of a transposed
    convolution reaches the output. The gradient of any other tap is 0, and oneDNN 3.12 (torch 2.13) does not write it
    in bfloat16, on processors with AVX-512 and without AMX."""

    def reaches(tap: int) -> bool:
        places = (p * stride + tap * dilation - padding[0] for p in range(small))
        large = (small - 1) * stride + dilation * (kernel - 1) + 1 - sum(padding)
        return any(0 <= place < large for place in places)

    while not all(map(reaches, range(kernel))):
        small += 1
    return small


def has_bias(point: Point) -> bool:
    """Return whether the convolution has a bias. A transposed convolution always has one, because some of its output
    elements may depend on nothing else: without a bias their gradient would have no effect."""
    return bool(point["bias"]) or point["way"] == "transposed"


def _padding(kind: str | int, dimension: int, extent: int, same: bool) -> tuple[int, int]:
    """Return the padding before and after a dimension. It is so narrow that no window lies entirely in the padding."""
    if same:
        return (extent - 1) // 2, extent - 1 - (extent - 1) // 2
    width = (
        kind
        if isinstance(kind, int)
        else {"none": 0, "one": 1, "uneven": (2, 0, 1)[dimension], "full": extent - 1}.get(kind, extent // 2)
    )
    return min(width, extent - 1), min(width, extent - 1)


def _wide(point: Point) -> int:
    return max(1, int(point["multiple"] + point["past"]))


def _counts(point: Point) -> tuple[int, int, int, int]:
    """Return the numbers of images and groups, and of channels and filters per group. If channels, filters or the
    length are the large size (`wide`), or in three dimensions, the other numbers except groups are at most 5. All but
    groups are reduced further if there would be more than MOST_PRODUCTS products."""
    images, channels, filters, wide = point["images"], point["channels"], point["filters"], point["wide"]
    few = 5 if wide not in ("nothing", "images") or point["rank"] == 3 else max(channels, filters)
    channels, filters = (_wide(point) if wide == name else min(point[name], few) for name in ("channels", "filters"))
    if wide == "images":
        images = _wide(point)
    elif wide != "nothing" or point["rank"] == 3:
        images = min(images, FEW_IMAGES)
    if point["mode"] == "one image without a batch":
        images = 1
    if point["groups"].startswith("depthwise"):
        groups = max(channels, filters) if wide in ("channels", "filters") else point["channels"]
        if point["rank"] == 3:
            groups = min(groups, MOST_VOLUME_GROUPS)
        each = 2 if point["groups"] == "depthwise twice" else 1
        channels, filters = (each, 1) if point["way"] == "transposed" else (1, each)
    else:
        groups = GROUPS[point["groups"]]
    places = groups * math.prod(_sizes(point)) * math.prod(point["kernel"][: point["rank"]])
    while images * channels * filters * places > MOST_PRODUCTS:
        if images > FEW_IMAGES and images >= max(channels, filters):
            images = images // 2 + 1
        elif max(channels, filters) == 1:
            break
        elif channels > filters:
            channels //= 2
        else:
            filters //= 2
    return images, groups, channels, filters


def _sizes(point: Point) -> list[int]:
    """Return the approximate sizes of the large tensor."""
    long = LONG[point["multiple"]] + point["past"] if point["rank"] == 1 else _wide(point)
    sizes = [point["length"], *(min(point["width"] + n, 6 + n) for n in range(point["rank"] - 1))]
    if point["wide"] == "length" or (point["wide"] == "nothing" and point["rank"] == 1):
        return [long, *sizes[1:]]
    return sizes if point["wide"] == "nothing" else [min(n, 5) for n in sizes]
