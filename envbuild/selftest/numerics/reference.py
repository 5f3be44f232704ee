"""References that the tested kernels have no part in, and comparison with them, element by element."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from envbuild.selftest.numerics import tolerances
from envbuild.selftest.numerics.error_pattern import describe

_AT_ONCE = 1 << 16  # products, of 8 bytes: they stay in a processor's cache
_WORTH_HALVING = 8  # outer products: fewer are added one by one


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (..., m, k) times b (..., k, n) on the host as a sum of outer products, in the inputs' own dtype: no GEMM is
    called, and no sum of a library. Dimensions before the last two are broadcast.

    With int16 it is exact while no sum leaves int16; with float64 its relative error is below k 2^-53.
    """
    # The longer rows of the two are those of the result, as short ones are slow.
    return _outer_products(b.mT, a.mT).mT.contiguous() if a.shape[-2] > b.shape[-1] else _outer_products(a, b)


def _outer_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # torch.broadcast_shapes would import sympy, which takes a second.
    batch = (a.new_zeros((*a.shape[:-2], 1)) + b.new_zeros((*b.shape[:-2], 1))).shape[:-1]
    total = torch.zeros((*batch, a.shape[-2], b.shape[-1]), dtype=a.dtype)
    columns, rows = a.movedim(-1, 0).unsqueeze(-1), b.movedim(-2, 0).unsqueeze(-2)
    at_once = max(1, _AT_ONCE // max(1, total.numel()))
    with one_thread():
        for column, row in zip(torch.split(columns, at_once), torch.split(rows, at_once)):
            if len(column) < _WORTH_HALVING:
                for one, other in zip(column.unbind(), row.unbind()):
                    total.addcmul_(one, other)
            else:
                total += _halved(column * row)
    return total


def _halved(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, which is overwritten: one half is added to the other until one term is left."""
    count = len(terms)
    while count > 1:
        half = count // 2
        terms[:half].add_(terms[count - half : count])
        count -= half
    return terms[0]


def patches(
    x: torch.Tensor, kernel: Sequence[int], strides: Sequence[int], paddings: Sequence[int], dilation: int = 1
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What each element of a convolution of x (batch, channels, sizes...) sums over, by indexing alone: (channels x
    kernel, batch x places), and how many places there are in each dimension. A number for each dimension of the rest.
    """
    view = torch.nn.functional.pad(x, [width for padding in reversed(paddings) for width in (padding, padding)])
    for dimension, (length, stride) in enumerate(zip(kernel, strides), start=2):
        view = view.unfold(dimension, (length - 1) * dilation + 1, stride)[..., ::dilation]
    n = len(kernel)
    places, taps = range(2, 2 + n), range(2 + n, 2 + 2 * n)
    gathered = view.permute(1, *taps, 0, *places).reshape(x.shape[1] * torch.Size(kernel).numel(), -1)
    return gathered, tuple(view.shape[2 : 2 + n])


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For thousands of short operations: threads that wait for each other between them spin, and where processors are
    shared with others that costs ten times the work (tried).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def digest(values: torch.Tensor) -> str:
    """sha256 of integer values as int16 in C order, whatever dtype and device hold them."""
    return raw_digest(values.detach().to("cpu", torch.int16))


def raw_digest(*tensors: torch.Tensor) -> str:
    """sha256 of the tensors' bytes in C order (little-endian, as every platform of torch is)."""
    whole = hashlib.sha256()
    for values in tensors:
        flat = values.detach().to("cpu").contiguous()
        if flat.numel():
            whole.update((ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr()))
    return whole.hexdigest()


@dataclass(frozen=True)
class Worst:
    """The element furthest from its reference: `where` its index, `wrong` how many leave the bound.

    `beyond_rounding`: the largest share that any element's error takes of its tolerance, the rounding of the exact
    result left out of both; above 1 where an element is wrong. `pattern`: what the wrong elements have in common.
    """

    error: float
    bound: float
    beyond_rounding: float
    where: tuple[int, ...]
    got: float
    expected: float
    wrong: int
    count: int
    pattern: str = ""

    @property
    def kind(self) -> str:
        """What is wrong, in probe_outcome.FAILURES' words."""
        return "bound" if math.isfinite(self.got) else "nonfinite"

    def __str__(self) -> str:
        # 9 digits tell every float32 from its neighbours.
        what = f"element {list(self.where)} is {self.got:.9g}, should be {self.expected:.9g} within {self.bound:g}"
        return f"{what} ({self.wrong} of {self.count} wrong{'; ' * bool(self.pattern)}{self.pattern})"


_SURELY_RIGHT = 0.999  # share of the tolerance; rounding of the quotient never brings one above 1 below this
_LEAST = 2.0**-1074  # without a tolerance the least error is wrong
_SMALLEST = 2.0**-1022  # so that nothing is divided by 0


def compare(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None = None) -> Worst:
    """The worst element by error over bound; without a bound, by error alone, and any difference is wrong.

    A NaN or an infinity that is not expected is the worst there is, since its error is NaN or infinite.
    """
    expected = expected.to(torch.float64)
    values = got.detach().to("cpu").to(torch.float64)
    if values.shape != expected.shape:
        raise ValueError(f"shape {tuple(values.shape)} instead of {tuple(expected.shape)}")
    if torch.equal(values, expected):
        return _exact(expected, bound)
    error = (values - expected).abs_()
    severity = error if bound is None else error / bound
    flat = int(severity.argmax())  # a NaN, where there is one
    wrong, pattern = 0, ""
    if not float(severity.reshape(-1)[flat]) < (_SURELY_RIGHT if bound is not None else _LEAST):
        error.masked_fill_(values == expected, 0.0)  # also where both are infinite
        limit = torch.zeros_like(error) if bound is None else bound.expand_as(error)
        beyond = ~(error <= limit)  # so that NaN is wrong
        severity = error if bound is None else error / limit
        severity = torch.where(torch.isnan(severity), torch.where(beyond, torch.inf, 0.0), severity)
        flat, wrong = int(severity.argmax()), int(beyond.sum())
        pattern = describe(got.detach().to("cpu"), expected, beyond, flat) if wrong else ""
    largest = float(error.reshape(-1)[flat])
    if largest == 0 or bound is None:
        share = 0.0 if largest == 0 else math.inf
    else:
        once = tolerances.rounding(expected, got.dtype) if got.is_floating_point() else torch.zeros_like(error)
        share = _beyond_rounding(error, bound, once)
    return Worst(
        error=largest,
        bound=0.0 if bound is None else float(bound.expand_as(error)[_index(flat, tuple(error.shape))]),
        beyond_rounding=share,
        where=_index(flat, tuple(error.shape)),
        got=float(values.reshape(-1)[flat]),
        expected=float(expected.reshape(-1)[flat]),
        wrong=wrong,
        count=error.numel(),
        pattern=pattern,
    )


def _exact(expected: torch.Tensor, bound: torch.Tensor | None) -> Worst:
    """Each element is as expected: the first one stands for all of them."""
    first = (0,) * expected.dim()
    value = float(expected[first])
    return Worst(
        error=0.0,
        bound=0.0 if bound is None else float(bound.expand_as(expected)[first]),
        beyond_rounding=0.0,
        where=first,
        got=value,
        expected=value,
        wrong=0,
        count=expected.numel(),
    )


def _beyond_rounding(error: torch.Tensor, bound: torch.Tensor, once: torch.Tensor) -> float:
    """The largest (error - once) / (bound - once), 0 where `once` explains the error; overwrites `error`. Infinite for
    NaN, and where an error is above a bound that leaves nothing beyond `once`."""
    left = (bound - once).clamp_(min=_SMALLEST)
    share = float(error.sub_(once).div_(left).max())
    return max(0.0, share) if share < 1e30 else math.inf


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    where = []
    for length in reversed(shape):
        flat, position = divmod(flat, length)
        where.append(position)
    return tuple(reversed(where))
