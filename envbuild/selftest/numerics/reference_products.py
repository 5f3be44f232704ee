"""Products and patches for references, computed on the host without the kernels under test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

_AT_ONCE = 1 << 16  # products of 8 bytes, so that they stay in a processor's cache
_WORTH_HALVING = 8  # outer products; fewer are added one by one


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a (..., m, k) by b (..., k, n) on the host as a sum of outer products, in the inputs' dtype.

    No GEMM and no library sum is called. Dimensions before the last two are broadcast. With int16 the result is exact
    unless a sum overflows; with float64 its relative error is below k 2^-53.
    """
    # The longer rows become the rows of the result, because short ones are slow.
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
    """The sum over the first dimension. Overwrites `terms`: one half is added to the other until one term is left."""
    count = len(terms)
    while count > 1:
        half = count // 2
        terms[:half].add_(terms[count - half : count])
        count -= half
    return terms[0]


def patches(
    x: torch.Tensor, kernel: Sequence[int], strides: Sequence[int], paddings: Sequence[int], dilation: int = 1
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The input patches that a convolution of x (batch, channels, sizes...) sums over, gathered by indexing alone.

    Returns the patches (channels x kernel, batch x positions) and the number of positions in each spatial dimension.
    `kernel`, `strides` and `paddings` have one number for each spatial dimension.
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
    """Use one thread, for thousands of short operations.

    Threads that wait for each other between operations spin, which costs ten times the work where processors are shared
    (measured).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
