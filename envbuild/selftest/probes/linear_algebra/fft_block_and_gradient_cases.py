"""Fourier transforms over chosen dimensions of a block, of long signals and of frames, and their gradients.

The expected results are products with matrices of sines and cosines in float64. For a long signal of composite length,
two such products replace one, with matrices of the sizes of two factors of the length (Cooley and Tukey, 1965).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.complex_parts import real_pairs
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import BATCHES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Dims = tuple[int, ...]

DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64)
NORMS = ("backward", "ortho", "forward")
KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
OF_REAL = ("rfft", "ihfft")
FROM_HALF = ("irfft", "hfft")
BACK = ("ifft", "irfft", "ihfft")  # transforms that the norm "backward" divides by the number of elements
POSITIVE = ("ifft", "irfft", "ihfft")  # transforms with a positive sign in the exponent
OVER: dict[str, Dims] = {
    "first": (0,),
    "middle": (1,),
    "last": (2,),
    "first two": (0, 1),
    "last two": (1, 2),
    "outer two": (0, 2),
    "last two exchanged": (2, 1),
    "all": (0, 1, 2),
    "all in turns": (1, 2, 0),
}
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 34, 64, 67, 128, 130)
MOST = 5000  # maximum number of elements of a block
LONG = (1009, 1021, 1024, 1031, 1500, 2017, 2039, 2048, 2049, 2187, 3125, 4096, 4098, 8192, 16384)
PADS = (-2, -1, 0, 0, 1, 3)  # added to the length of the signal in each dimension


def _numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return numbers between 1/2 and 1 in magnitude, so that each element matters."""
    return hashed_inputs.signs(math.prod(shape), seed).reshape(shape) * (1 + hashed_inputs.uniform(shape, seed + 7)) / 2


def _joined(x: torch.Tensor) -> torch.Tensor:
    """Return a real or complex tensor, given its real and imaginary parts."""
    return x[0] if len(x) == 1 else torch.complex(x[0], x[1])


def _sizes(point: Point) -> tuple[int, int, int]:
    return point["first"], point["middle"], point["last"]


def _lengths(point: Point) -> tuple[int, ...]:
    """Return the lengths of the transform, in the order of its dimensions. If the input is half of a spectrum, the last
    length is that of the whole signal."""
    sizes, dims = _sizes(point), OVER[point["over"]]
    lengths = [sizes[dim] for dim in dims]
    if point["kind"] in FROM_HALF:
        lengths[-1] = 2 * (lengths[-1] - 1) + int(point["odd"])
    return tuple(length + point["pad"] for length in lengths)


def block(point: Point, seed: int) -> Case:
    """Build a case with a block of three dimensions, and for some points a gradient of its transform."""
    kind, dtype, sizes = point["kind"], point["dtype"], _sizes(point)
    x = _numbers((1 if kind in OF_REAL else 2, *sizes), seed)
    lengths = _lengths(point)
    size, to = ("x".join(map(str, some)) for some in (sizes, lengths))
    what = f"{'cut' if point['pad'] < 0 else 'filled'} to {to}"
    name = f"{kind} of {size} over {point['over']}, {what}, {point['norm']}, {point['layout']}"
    run = functools.partial(_transform, point=point)
    given = [x.to(dtype)]
    if point["gradient"]:
        name += ", gradient"
        given.append(_numbers((1 if kind in FROM_HALF else 2, *_shape(point)), seed + 1).to(dtype))
    return Case(name, dtype, tuple(given), run, functools.partial(_transform_exactly, point=point))


def _shape(point: Point) -> tuple[int, ...]:
    shape, dims, lengths = list(_sizes(point)), OVER[point["over"]], _lengths(point)
    for dim, length in zip(dims, lengths):
        shape[dim] = length
    if point["kind"] in OF_REAL:
        shape[dims[-1]] = lengths[-1] // 2 + 1
    return tuple(shape)


def _called(z: torch.Tensor, point: Point) -> torch.Tensor:
    kind, dims, lengths, norm = point["kind"], OVER[point["over"]], _lengths(point), point["norm"]
    if len(dims) == 1:
        found: torch.Tensor = getattr(torch.fft, kind)(z, lengths[0], dims[0], norm)
        return found
    found = getattr(torch.fft, kind + ("2" if len(dims) == 2 and point["odd"] else "n"))(z, lengths, dims, norm)
    return found


def _transform(x: torch.Tensor, gradient: torch.Tensor | None = None, *, point: Point) -> Results:
    z = _joined(x)
    output = _called(with_large_gaps(z, point["layout"]), point)
    if gradient is None:
        return {"output": real_pairs(output)}
    leaf = z.detach().clone().requires_grad_()
    pairs = real_pairs(_called(leaf, point))
    given = real_pairs(with_large_gaps(_joined(gradient), point["layout"]))
    (found,) = backward_pass.gradients(pairs, (leaf,), given)
    return {"output": real_pairs(output), "gradient": real_pairs(found)}


@functools.lru_cache(maxsize=64)
def _waves(n: int, sign: int) -> torch.Tensor:
    """Return the matrix exp(sign 2 pi i j k / n), (n, n)."""
    numbers = torch.arange(n)
    angles = numbers.to(torch.float64) * (2 * math.pi / n)
    turn = torch.complex(torch.cos(angles), sign * torch.sin(angles))
    return turn[numbers[:, None] * numbers % n]


def _fit(z: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Cut off the end of a dimension, or append zeros, to reach `length`."""
    kept = z.narrow(dim, 0, min(length, z.shape[dim]))
    shape = list(z.shape)
    shape[dim] = max(0, length - z.shape[dim])
    return torch.cat((kept, kept.new_zeros(shape)), dim)


def _along(z: torch.Tensor, dim: int, sign: int) -> torch.Tensor:
    """Return the Fourier sums over one dimension."""
    return (z.movedim(dim, -1) @ _waves(z.shape[dim], sign)).movedim(-1, dim)


def _whole(z: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return the whole spectrum of a real signal along one dimension, given its first half. The imaginary part of the
    first element counts as 0; so does that of the middle element, if there is one."""
    half = _fit(z, dim, length // 2 + 1).movedim(dim, -1).clone()
    half[..., 0] = half[..., 0].real.to(half.dtype)
    if length % 2 == 0:
        half[..., -1] = half[..., -1].real.to(half.dtype)
    rest = half[..., 1 : (length + 1) // 2].flip(-1).conj()
    return torch.cat((half, rest), -1).movedim(-1, dim)


def _sums(z: torch.Tensor, point: Point) -> torch.Tensor:
    """Return the transform without its scale factor. Half of a spectrum is completed after all other dimensions are
    transformed."""
    kind, dims, lengths = point["kind"], OVER[point["over"]], _lengths(point)
    sign = 1 if kind in POSITIVE else -1
    for dim, length in zip(dims[:-1], lengths):
        z = _along(_fit(z, dim, length), dim, sign)
    dim, length = dims[-1], lengths[-1]
    if kind in FROM_HALF:
        return _along(_whole(z, dim, length), dim, sign).real
    z = _along(_fit(z, dim, length), dim, sign)
    return z.narrow(dim, 0, length // 2 + 1) if kind in OF_REAL else z


def _transform_exactly(x: torch.Tensor, gradient: torch.Tensor | None = None, *, point: Point) -> Expected:
    """Return the expected output and gradient. The transform is a linear map of pairs of numbers; the gradient is the
    product with its conjugate transpose."""
    kind, dims, lengths = point["kind"], OVER[point["over"]], _lengths(point)
    count = math.prod(lengths)
    power = {"backward": float(kind in BACK), "ortho": 0.5, "forward": float(kind not in BACK)}[point["norm"]]
    scale = float(count) ** -power
    z = _joined(x).to(torch.complex128)
    value = _sums(z, point) * scale
    found = {"output": _limited(value, z, dims, lengths, scale, point["dtype"])}
    if gradient is None:
        return found
    g = _joined(gradient).to(torch.complex128)
    of_input = _adjoint(g, point, tuple(x.shape[1:])) * scale
    of_input = of_input.real if kind in OF_REAL else of_input
    return {**found, "gradient": _limited(of_input, g, dims, lengths, scale, point["dtype"])}


def _adjoint(g: torch.Tensor, point: Point, sizes: tuple[int, ...]) -> torch.Tensor:
    """Apply the adjoints of the steps of `_sums` in reverse order, with the opposite sign in the exponent."""
    kind, dims, lengths = point["kind"], OVER[point["over"]], _lengths(point)
    sign = -1 if kind in POSITIVE else 1
    dim, length = dims[-1], lengths[-1]
    g = _along(_fit(g, dim, length), dim, sign)
    if kind in FROM_HALF:
        half = g.narrow(dim, 0, length // 2 + 1).movedim(dim, -1).clone()
        double = torch.full((half.shape[-1],), 2.0, dtype=torch.float64)
        double[0] = 1
        if length % 2 == 0:
            double[-1] = 1
        half = half * double
        half[..., 0] = half[..., 0].real.to(half.dtype)
        if length % 2 == 0:
            half[..., -1] = half[..., -1].real.to(half.dtype)
        g = half.movedim(-1, dim)
    g = _fit(g, dim, sizes[dim])
    for other, size in reversed(list(zip(dims[:-1], lengths))):
        g = _fit(_along(_fit(g, other, size), other, sign), other, sizes[other])
    return g


def _limited(
    value: torch.Tensor, given: torch.Tensor, dims: Dims, lengths: tuple[int, ...], scale: float, dtype: torch.dtype
) -> Exact:
    """Return a result with its tolerance, relative to the root mean square of the whole transform. By Parseval's
    theorem, this is the norm of `given`. The root mean square is at most twice that norm if `given` is half of a
    spectrum, or a gradient whose elements count twice because of the other half. The error of several dimensions is
    that of one transform with as many elements."""
    root = torch.linalg.vector_norm(given, dim=dims, keepdim=True) * scale
    limit = 2 * 2 * tolerances.fourier(max(2, math.prod(lengths)), dtype) * (root + 2.0**-20 * scale)
    return Exact(real_pairs(value), limit[..., None] if value.is_complex() else limit)


def _is_possible(point: Point) -> bool:
    if math.prod(_sizes(point)) > MOST:
        return False
    lengths = _lengths(point)
    if min(lengths) < 1 or max(lengths) > 270:
        return False
    return point["kind"] not in FROM_HALF or lengths[-1] > 1


def long_signal(point: Point, seed: int) -> Case:
    """Build a case with a few long signals."""
    kind, rows, n, dtype = point["kind"], point["rows"], point["length"], point["dtype"]
    size = n // 2 + 1 if kind in FROM_HALF else n
    x = _numbers((1 if kind in OF_REAL else 2, rows, size), seed).to(dtype)
    name = f"{kind} of {rows} long signals of {n} over {point['over']}"
    run = functools.partial(_long, point=point)
    return Case(name, dtype, (x,), run, functools.partial(_long_exactly, point=point))


def _long(x: torch.Tensor, point: Point) -> Results:
    dim = -1 if point["over"] == "rows" else 0
    z = _joined(x) if dim else _joined(x).t().contiguous()
    found: torch.Tensor = getattr(torch.fft, point["kind"])(z, point["length"], dim)
    return {"output": real_pairs(found if dim else found.t())}


def _long_exactly(x: torch.Tensor, point: Point) -> Expected:
    kind, n = point["kind"], point["length"]
    given = _joined(x).to(torch.complex128)
    sign, scale = 1 if kind in POSITIVE else -1, 1 / n if kind in BACK else 1.0
    z = _long_sums(_whole(given, 1, n) if kind in FROM_HALF else given, sign) * scale
    z = z.real if kind in FROM_HALF else z
    value = z.narrow(1, 0, n // 2 + 1) if kind in OF_REAL else z
    return {"output": _limited(value, given, (1,), (n,), scale, point["dtype"])}


def _long_sums(z: torch.Tensor, sign: int) -> torch.Tensor:
    """Return the Fourier sums for n = p q in two steps, with j = p n2 + n1: first sums over n2 = 0..q - 1, multiplied
    by exp(sign 2 pi i n1 k2 / n), then sums over n1."""
    rows, n = z.shape
    p = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    q = n // p
    if p == 1:
        return z @ _waves.__wrapped__(n, sign)  # bypasses the cache, because the matrix is too large to keep
    inner = _along(z.reshape(rows, q, p).transpose(1, 2), 2, sign)  # (rows, n1, k2)
    angles = (torch.arange(p)[:, None] * torch.arange(q)).to(torch.float64) * (sign * 2 * math.pi / n)
    turned = inner * torch.polar(torch.ones_like(angles), angles).to(z.dtype)
    return _along(turned, 1, sign).reshape(rows, n)  # k = q k1 + k2


FRAMES = ((16, 4), (16, 7), (15, 5), (32, 16), (64, 16), (100, 25))  # (length of a frame, step between frames)


def frames(point: Point, seed: int) -> Case:
    """Build a case of torch.stft: transforms of overlapping frames of signals."""
    (n_fft, hop), dtype = point["frame"], point["dtype"]
    length = n_fft * point["frames"] + point["past"]
    x = _numbers((point["signals"], length), seed)
    window = 0.5 + hashed_inputs.uniform((n_fft,), seed + 1) / 2
    name = (
        f"frames of {n_fft} of {point['signals']}x{length}, every {hop}, "
        f"center {point['center']}, normalized {point['normalized']}, onesided {point['onesided']}"
    )
    run = functools.partial(_frames, point=point)
    return Case(name, dtype, (x.to(dtype), window.to(dtype)), run, functools.partial(_frames_exactly, point=point))


def _frames(x: torch.Tensor, window: torch.Tensor, point: Point) -> Results:
    (n_fft, hop), center, normalized = point["frame"], point["center"], point["normalized"]
    options = {"window": window, "center": center, "normalized": normalized, "onesided": point["onesided"]}
    found = torch.stft(x, n_fft, hop, len(window), pad_mode="reflect", return_complex=True, **options)
    return {"output": torch.view_as_real(found)}


def _frames_exactly(x: torch.Tensor, window: torch.Tensor, point: Point) -> Expected:
    """Return the expected transforms. With `center`, the signal is mirrored at both ends."""
    (n_fft, hop), dtype = point["frame"], point["dtype"]
    padded = x
    if point["center"]:
        half = n_fft // 2
        padded = torch.cat((x[:, 1 : half + 1].flip(1), x, x[:, -half - 1 : -1].flip(1)), 1)
    count = (padded.shape[1] - n_fft) // hop + 1
    cut = torch.stack([padded[:, i * hop : i * hop + n_fft] for i in range(count)], 1) * window
    value = cut.to(torch.complex128) @ _waves(n_fft, -1)
    value = value[..., : n_fft // 2 + 1] if point["onesided"] else value
    scale = n_fft**-0.5 if point["normalized"] else 1.0
    limits = _limited(value * scale, cut, (2,), (n_fft,), scale, dtype)
    return {"output": Exact(limits.value.transpose(1, 2), limits.bound.transpose(1, 2))}


def shifts(point: Point, seed: int) -> Case:
    """Build a case that exchanges the halves of a block, and computes the list of frequencies."""
    x = hashed_inputs.whole(_sizes(point), seed, 100).to(point["dtype"])
    size = "x".join(map(str, _sizes(point)))
    name = f"halves exchanged of {size} over {point['over']}, {point['layout']}"
    run = functools.partial(_shifted, point=point)
    return Case(name, point["dtype"], (x,), run, functools.partial(_shifted_exactly, point=point))


def _shifted(x: torch.Tensor, point: Point) -> Results:
    given, dims, n = with_large_gaps(x, point["layout"]), OVER[point["over"]], point["middle"]
    return {
        "fftshift": torch.fft.fftshift(given, dims),
        "ifftshift": torch.fft.ifftshift(given, dims),
        "fftfreq": torch.fft.fftfreq(n, 0.5, dtype=x.dtype, device=x.device),
        "rfftfreq": torch.fft.rfftfreq(n, 0.5, dtype=x.dtype, device=x.device),
    }


def _shifted_exactly(x: torch.Tensor, point: Point) -> Expected:
    n, dims = point["middle"], OVER[point["over"]]
    forth = back = x
    for dim in dims:
        size = x.shape[dim]
        places = torch.arange(size)
        forth = forth.index_select(dim, (places - size // 2) % size)
        back = back.index_select(dim, (places + size // 2) % size)
    numbers = [k if k < (n + 1) // 2 else k - n for k in range(n)]
    frequencies = torch.tensor(numbers, dtype=torch.float64) * 2 / n
    half = torch.arange(n // 2 + 1, dtype=torch.float64) * 2 / n
    found = {"fftshift": without_rounding(forth), "ifftshift": without_rounding(back)}
    for name, value in (("fftfreq", frequencies), ("rfftfreq", half)):
        found[name] = Exact(value, 3 * tolerances.rounding(value, point["dtype"]))
    return found


_BLOCK: dict[str, tuple[Any, ...]] = {"first": SIZES, "middle": SIZES, "last": SIZES, "over": tuple(OVER)}
OPERATIONS: tuple[Any, ...] = (
    Operation(
        "fft of a block",
        {
            "kind": KINDS,
            "dtype": DTYPES,
            **_BLOCK,
            "pad": PADS,
            "odd": (False, True),
            "norm": NORMS,
            "gradient": (False, True, True),
            "layout": BATCHES,
        },
        block,
        {"standard": 80, "full": 1200},
        _is_possible,
    ),
    Operation(
        "fft of a long signal",
        {
            "kind": KINDS,
            "dtype": DTYPES,
            "rows": (1, 2, 3),
            "length": LONG,
            "over": ("rows", "columns"),
        },
        long_signal,
        {"standard": 10, "full": 120},
    ),
    Operation(
        "fft of frames",
        {
            "frame": FRAMES,
            "dtype": DTYPES,
            "signals": (1, 2, 5),
            "frames": (2, 3, 5),
            "past": (0, 1, 5),
            "center": (True, False),
            "normalized": (False, True),
            "onesided": (True, False),
        },
        frames,
        {"standard": 16, "full": 150},
    ),
    Operation(
        "halves exchanged",
        {"dtype": (torch.float32, torch.float64), **_BLOCK, "layout": BATCHES},
        shifts,
        {"standard": 8, "full": 60},
        lambda point: math.prod(_sizes(point)) <= MOST,
    ),
)
