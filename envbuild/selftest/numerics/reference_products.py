"""Computes matrix products and the patches of convolutions for references, on the host and without the kernels under
test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

_AT_ONCE = 1 << 16  # number of 8-byte products computed at once, few enough to stay in a processor's cache
_WORTH_HALVING = 8  # with fewer outer products than this at once, they are added one by one


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a (..., m, k) by b (..., k, n) on the host as a sum of outer products, in the dtype of the inputs.

    No GEMM and no sum of a library is called. Dimensions before the last two are broadcast. With int16, the result is
    exact unless a sum overflows. With float64, the error is at most k 2^-53 |a| |b|.
    """
    # If m > n, the transposed product is computed, so that rows are long: operations on short rows are slow.
    return _outer_products(b.mT, a.mT).mT.contiguous() if a.shape[-2] > b.shape[-1] else _outer_products(a, b)


def _outer_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # The shapes are broadcast by an addition, because torch.broadcast_shapes would import sympy, which takes a second.
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
    """Return the sum over the first dimension: add one half of the terms to the other half until one term is left.

    Overwrites `terms`.
    """
    count = len(terms)
    while count > 1:
        half = count // 2
        terms[:half].add_(terms[count - half : count])
        count -= half
    return terms[0]


def patches(
    x: torch.Tensor, kernel: Sequence[int], strides: Sequence[int], paddings: Sequence[int], dilation: int = 1
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Gather the patches of x (batch, channels, sizes...) that a convolution multiplies by its kernel.

    They are gathered by padding and indexing only, without a kernel under test.
    Returns the patches, of shape (channels x kernel elements, batch x positions), and the number of positions in each
    spatial dimension. `kernel`, `strides` and `paddings` have one number for each spatial dimension.
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
    """Use a single thread, for code that runs thousands of short operations.

    Several threads spin while they wait for each other between operations. On shared processors, that took ten times
    the CPU time of the work itself (measured).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
