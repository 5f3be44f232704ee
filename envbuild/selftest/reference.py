"""References that the tested kernels have no part in, and comparison with them, element by element."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (m, k) times b (k, n) on the host as a sum of outer products, in the inputs' own dtype: no GEMM is called.

    With int16 it is exact while no sum leaves int16; with float64 its relative error is below k 2^-53.
    """
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=a.dtype)
    with one_thread():
        for k in range(a.shape[1]):
            total.addcmul_(a[:, k : k + 1], b[k : k + 1])
    return total


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
    """The element furthest from its reference: `where` its index, `wrong` how many leave the bound."""

    error: float
    bound: float
    where: tuple[int, ...]
    got: float
    expected: float
    wrong: int
    count: int

    @property
    def kind(self) -> str:
        """What is wrong, in outcome.FAILURES' words."""
        return "bound" if math.isfinite(self.got) else "nonfinite"

    def __str__(self) -> str:
        # 9 digits tell every float32 from its neighbours.
        what = f"element {list(self.where)} is {self.got:.9g}, should be {self.expected:.9g} within {self.bound:g}"
        return f"{what} ({self.wrong} of {self.count} wrong)"


def compare(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None = None) -> Worst:
    """The worst element by error over bound; without a bound, by error alone, and any difference is wrong.

    A NaN or an infinity that is not expected is the worst there is, since its error is NaN or infinite.
    """
    expected = expected.to(torch.float64)
    values = got.detach().to("cpu").to(torch.float64)
    if values.shape != expected.shape:
        raise ValueError(f"shape {tuple(values.shape)} instead of {tuple(expected.shape)}")
    error = (values - expected).abs().masked_fill(values == expected, 0.0)  # also where both are infinite
    limit = torch.zeros_like(error) if bound is None else bound.expand_as(error)
    wrong = ~(error <= limit)  # so that NaN is wrong
    severity = error if bound is None else error / limit
    severity = torch.where(torch.isnan(severity), torch.where(wrong, torch.inf, 0.0), severity)
    flat = int(severity.argmax())
    return Worst(
        error=float(error.reshape(-1)[flat]),
        bound=float(limit.reshape(-1)[flat]),
        where=_index(flat, tuple(error.shape)),
        got=float(values.reshape(-1)[flat]),
        expected=float(expected.reshape(-1)[flat]),
        wrong=int(wrong.sum()),
        count=error.numel(),
    )


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    where = []
    for length in reversed(shape):
        flat, position = divmod(flat, length)
        where.append(position)
    return tuple(reversed(where))
