"""Fourier transforms of sampled sizes, layouts and arguments.

The expected results are products with matrices of sines and cosines in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.complex_parts import real_pairs
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import with_large_gaps
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

DTYPES = (torch.float32, torch.float32, torch.float64)
LENGTHS = (2, 3, 5, 7, 8, 9, 15, 16, 17, 21, 30, 34, 49, 53, 64, 97, 100, 127, 128, 129, 243, 255, 256, 257, 360, 509)
LAYOUTS = ("contiguous", "transposed", "rows apart", "shifted", "elements apart")
PADS = (-3, -1, 0, 1, 4)  # added to the length of the signal: its end is then cut off, or zeros are appended
NORMS = ("backward", "ortho", "forward")
TRANSFORMS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2")


FROM_HALF = ("irfft", "hfft", "irfft2")


def _size(point: Point) -> int:
    """Return the length of the transform. If the input is half of a spectrum, this is the length of the whole
    signal."""
    n = 2 * (point["length"] - 1) if point["kind"] in FROM_HALF else point["length"]
    return int(n + point["pad"])


def transform(point: Point, seed: int) -> Case:
    """Build a case that transforms rows or columns of numbers, or a plane for two-dimensional transforms."""
    kind, rows, n, dtype = point["kind"], point["rows"], point["length"], point["dtype"]
    is_complex = kind not in ("rfft", "ihfft", "rfft2")
    x = hashed_inputs.signed((2 if is_complex else 1, rows, n), seed)
    what = f"{'cut' if point['pad'] < 0 else 'filled'} to {_size(point)}"
    name = f"{kind} {rows}x{n} {what}, {point['norm']}, {point['over']}, {point['layout']}"
    run = functools.partial(_transform, point=point)
    return Case(name, dtype, (x.to(dtype),), run, functools.partial(_transform_exactly, point=point))


def _transform(x: torch.Tensor, point: Point) -> Results:
    kind, over = point["kind"], point["over"]
    parts = [with_large_gaps(part.t() if over == "columns" else part, point["layout"]) for part in x]
    z = parts[0] if len(parts) == 1 else torch.complex(*parts)
    # torch.complex returns a dense tensor, so the gaps are made here
    if len(parts) == 2 and point["layout"] == "elements apart":
        z = torch.stack((z, z.flip(0)), -1)[..., 0]
    size = _size(point)
    if kind.endswith("2"):
        found = getattr(torch.fft, kind)(
            z, (point["rows"], size), (1, 0) if over == "columns" else (0, 1), point["norm"]
        )
    else:
        found = getattr(torch.fft, kind)(z, size, 0 if over == "columns" else 1, point["norm"])
    return {"output": real_pairs(found.t() if over == "columns" else found)}


def _transform_exactly(x: torch.Tensor, point: Point) -> Expected:
    """Return the expected results: sums over a period of `size`. Half of a spectrum is completed to the whole one
    before the inverse transform."""
    kind, rows, size = point["kind"], point["rows"], _size(point)
    re, im = x[0], x[1] if len(x) == 2 else torch.zeros_like(x[0])
    from_half = kind in FROM_HALF
    back = kind in ("ifft", "irfft", "ihfft", "ifft2", "irfft2")
    count = size * (rows if kind.endswith("2") else 1)
    power = {"backward": 1.0 if back else 0.0, "ortho": 0.5, "forward": 0.0 if back else 1.0}[point["norm"]]
    sign = 1 if back else -1
    if kind.endswith("2"):  # transform the other dimension first
        re, im = (part.t() for part in _sums(re.t(), im.t(), sign))
    if from_half:
        re, im = _fit(re, size // 2 + 1), _fit(im, size // 2 + 1)
        im = im.clone()
        im[:, 0] = 0
        if size % 2 == 0:
            im[:, -1] = 0
        last = size - (size // 2 + 1)
        re = torch.cat((re, re[:, 1 : 1 + last].flip(1)), 1)
        im = torch.cat((im, -im[:, 1 : 1 + last].flip(1)), 1)
    else:
        re, im = _fit(re, size), _fit(im, size)
    re, im = _sums(re, im, sign)
    scale = float(count) ** -power
    if kind in ("rfft", "ihfft", "rfft2"):
        re, im = re[:, : size // 2 + 1], im[:, : size // 2 + 1]
    value = re if from_half else torch.stack((re, im), -1)
    of_row = value.square().sum() if kind.endswith("2") else value.reshape(rows, -1).square().sum(1)
    # At least the root mean square of the whole spectrum. `value` may be only half of the spectrum: that half has at
    # least half of the sum of squares.
    root = (2 * of_row / (count if kind.endswith("2") else size)).sqrt() + 2.0**-20
    limit = 2 * tolerances.fourier(max(2, count), point["dtype"]) * root
    limit = limit if kind.endswith("2") else limit.reshape(-1, *[1] * (value.dim() - 1))
    return {"output": Exact(value * scale, limit * scale)}


def _fit(x: torch.Tensor, size: int) -> torch.Tensor:
    filled = torch.zeros(len(x), max(0, size - x.shape[1]), dtype=x.dtype)
    return torch.cat((x[:, :size], filled), 1)


def _sums(re: torch.Tensor, im: torch.Tensor, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = re.shape[1]
    numbers = torch.arange(n)
    angles = (numbers[:, None] * numbers % n).to(torch.float64) * (2 * math.pi / n)
    cosines, sines = torch.cos(angles), torch.sin(angles) * sign
    return re @ cosines - im @ sines, re @ sines + im @ cosines


def _is_transform(point: Point) -> bool:
    fits = point["rows"] * point["length"] <= 3000 and _size(point) <= 514
    return bool(fits and _size(point) > 1)


OPERATIONS: tuple[Any, ...] = (
    Operation(
        "fft",
        {
            "kind": TRANSFORMS,
            "dtype": DTYPES,
            "rows": (1, 2, 3, 5, 17, 33),
            "length": LENGTHS,
            "pad": PADS,
            "norm": NORMS,
            "over": ("rows", "columns"),
            "layout": LAYOUTS,
        },
        transform,
        {"standard": 160, "full": 1500},
        _is_transform,
    ),
)
