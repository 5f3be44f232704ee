"""burn: dense products of every precision fill nearly all memory of all GPUs for the requested time, and all are
checked.

Operands are random whole numbers, so small that every sum is exact in float32, in any order of summation (WIDE,
NARROW). Floating-point operands are divided by a power of two, which changes no digit. A float32 product C of A and B
is checked by Freivalds' algorithm: C r must equal A (B r) for vectors r of {-1, 1}. If a row of C has one wrong
element, it is always detected. If a row has several, each vector detects them with a probability of at least one half.
A (B r) is computed on the host, in whole numbers and without a matrix product.

The first product of every precision must equal C, rounded once to the output dtype. Every later product must equal the
first product of its precision, bit for bit. Each later product is stored in its own part of the memory, and the parts
are compared after they have been filled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from envbuild.selftest.harness.probe_context import Context, is_unsupported
from envbuild.selftest.numerics import hashed_inputs
from envbuild.selftest.numerics.reference_products import one_thread
from envbuild.selftest.nvidia.gpu_telemetry import DRAIN

SIDE, SIDE_CPU = 8192, 768
SECONDS_CPU = 1
HELD = 0.9  # share of the free memory that is used
CHUNKS_CPU = 4
WORD = 8  # bytes; a chunk of memory is a matrix of words
VECTORS = 4
ROWS, ROWS_HOST = 1024, 16  # rows converted to a wider dtype at a time; ROWS_HOST rows fit in a processor's cache
# Each row of a factor is a window of one random sequence, shifted against the previous row by this many elements. This
# is faster to generate than a whole random matrix.
SHIFTS = 3, 5
# The largest whole number in the operands, one less than a power of two. With 127, 8 standard deviations of a sum of
# products are less than 2^22; every tensor core keeps at least 23 bits below the largest exponent. With 7, they are
# less than 2^14; with fp8 operands, the tensor cores of Ada and Hopper keep 13 bits (arXiv 2511.10909).
# tests/selftest/probes/hardware/test_burn.py emulates both.
WIDE, NARROW = 127, 7


@dataclass(frozen=True)
class Precision:
    """Products of operands of `dtype` that hold whole numbers up to `most`.

    `least`: the lowest compute capability of the GPUs on which these products run; a CPU counts as (0, 0).
    """

    name: str
    dtype: torch.dtype
    least: tuple[int, int]
    most: int = WIDE
    tf32: bool = False


# Each list is empty if this torch has no products of the dtype.
_INT8 = [torch.int8] if hasattr(torch, "_int_mm") else []
_FP8 = [torch.float8_e4m3fn] if hasattr(torch, "float8_e4m3fn") and hasattr(torch, "_scaled_mm") else []
PRECISIONS = (
    Precision("fp16", torch.float16, (7, 0)),
    Precision("bf16", torch.bfloat16, (8, 0)),
    *(Precision("int8", dtype, (7, 5)) for dtype in _INT8),
    *(Precision("fp8", dtype, (8, 9), NARROW) for dtype in _FP8),
    Precision("tf32", torch.float32, (8, 0), tf32=True),
    Precision("fp32", torch.float32, (0, 0)),
    Precision("fp64", torch.float64, (0, 0)),
)
# Compute capabilities of GPUs that are fast in float64: an SM adds or multiplies 32 or 64 numbers per clock. On other
# GPUs it does 2 or 4, and float64 products would take nearly all of the time (CUDA C++ Programming Guide, throughput of
# arithmetic instructions). (0, 0) is the CPU.
FAST_FLOAT64 = ((0, 0), (6, 0), (7, 0), (8, 0), (9, 0), (10, 0))


@dataclass(frozen=True)
class BurnProblem:
    """The factors of a product and its check vectors.

    Factors are int8 (n, n) with whole numbers up to `most`. `vectors` (VECTORS, n) and `expected` (VECTORS, n) are
    float64. `expected` contains the exact A (B r) for each vector r.
    """

    most: int
    a: torch.Tensor
    b: torch.Tensor
    vectors: torch.Tensor
    expected: torch.Tensor


def problem(side: int, most: int) -> BurnProblem:
    a, b = (_windows(hashed_inputs.whole((side * (shift + 1),), shift, most), side, shift) for shift in SHIFTS)
    vectors = torch.stack([hashed_inputs.signs(side, seed=70 + index) for index in range(VECTORS)]).to(torch.float64)
    return BurnProblem(most, a, b, vectors, torch.stack([_times(a, _times(b, vector)) for vector in vectors]))


def _windows(sequence: torch.Tensor, side: int, shift: int) -> torch.Tensor:
    return sequence.to(torch.int8).as_strided((side, side), (shift, 1)).contiguous()


def _times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Multiply matrix (n, n) of int8 by vector (n) of float64, some rows at a time. The result is exact, because no sum
    reaches 2^53."""
    with one_thread():
        return torch.cat([rows.to(torch.float64).mul_(vector).sum(dim=1) for rows in _rows(matrix, ROWS_HOST)])


def _rows(matrix: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    for start in range(0, matrix.shape[0], count):
        yield matrix[start : start + count]


class Stove:
    """The state of one device: for each precision its operands and first product, and the memory for later products."""

    def __init__(self, device: torch.device, side: int) -> None:
        self.device = device
        self.operands: dict[Precision, tuple[torch.Tensor, torch.Tensor]] = {}
        self.first: dict[Precision, torch.Tensor] = {}
        self._side = side
        self._free = 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        self._chunks: list[torch.Tensor] = []

    def take_memory(self) -> int:
        """Allocate memory until the share HELD of the initially free memory is in use; on the CPU, allocate CHUNKS_CPU
        chunks. Return the number of chunks."""
        count = CHUNKS_CPU
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            count = chunks_to_hold(self._free, torch.cuda.mem_get_info(self.device)[0], self._side)
        self._chunks = [torch.empty(self._side**2, dtype=torch.int64, device=self.device) for _ in range(count)]
        return count

    def fill(self, precision: Precision, chunk: int) -> int:
        """Fill a chunk with products and return the number of products. Does not wait for the device."""
        places = self._chunks[chunk].view(self.first[precision].dtype).view(-1, self._side, self._side)
        for place in places:
            place.copy_(multiply(precision, *self.operands[precision]))
        return len(places)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wrong(self, precision: Precision, chunks: Sequence[int]) -> tuple[int, str]:
        """Count the 64-bit words of these chunks that differ from the first product, and describe the first
        difference."""
        expected = self.first[precision].view(-1).view(torch.int64)
        counts = [torch.count_nonzero(self._parts(chunk, expected) != expected) for chunk in chunks]
        total = int(torch.stack(counts).sum())
        if not total:
            return 0, ""
        chunk = next(chunk for chunk, count in zip(chunks, counts) if int(count))
        part = next(part for part in self._parts(chunk, expected) if not torch.equal(part, expected))
        word = int((part != expected).to(torch.uint8).argmax())
        got, right = (words[word : word + 1].cpu().view(self.first[precision].dtype) for words in (part, expected))
        index = word * len(got) + _first_difference(int(part[word]), int(expected[word])) // (64 // len(got))
        where = list(divmod(index, self._side))
        value, other = got[index % len(got)].item(), right[index % len(got)].item()
        return total, f"element {where} is {value:.17g}, the first product's {other:.17g}"

    def _parts(self, chunk: int, words: torch.Tensor) -> torch.Tensor:
        return self._chunks[chunk].view(-1, len(words))


def chunks_to_hold(before: int, free: int, side: int) -> int:
    """Return the number of chunks to allocate from `free` bytes so that the share 1 - HELD of the initially free
    `before` bytes stays free."""
    return max(1, (free - int((1 - HELD) * before)) // (side**2 * WORD))


def _first_difference(a: int, b: int) -> int:
    """Return the position of the lowest bit in which the two numbers differ."""
    return ((a ^ b) & -(a ^ b)).bit_length() - 1


def burn(context: Context) -> None:
    """burn: exact products in 90% of all GPUs' memory, every one checked, for as many seconds as the profile sets."""
    side = SIDE_CPU if context.on_cpu else SIDE
    found = precisions(
        min((0, 0) if context.on_cpu else torch.cuda.get_device_capability(device) for device in devices(context))
    )
    context.step(f"factors {side}x{side} and their sums on the host")
    given = {most: problem(side, most) for most in {precision.most for precision in found}}
    stoves = [Stove(device, side) for device in devices(context)]
    for stove in stoves:
        _first_products(context, stove, found, given)
    if not context.faults:
        _keep_burning(context, stoves, [one for one in found if all(one in stove.first for stove in stoves)], side)


def precisions(capability: tuple[int, int]) -> list[Precision]:
    """Return the precisions to run on a device of this compute capability; float64 only where it is fast."""
    found = [precision for precision in PRECISIONS if capability >= precision.least]
    return [one for one in found if one.dtype != torch.float64 or capability in FAST_FLOAT64]


def operands(precision: Precision, given: BurnProblem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors on a device.

    Floating-point factors are divided by most + 1, because float16 would overflow otherwise. B is stored by columns,
    because int8 and fp8 products require it.
    """
    a, b = given.a.to(device), given.b.t().contiguous().to(device)
    if precision.dtype.is_floating_point:
        a, b = ((part.to(torch.float32) / (given.most + 1)).to(precision.dtype) for part in (a, b))
    return a, b.t()


def multiply(precision: Precision, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two factors; the result is (n, n), in the output dtype of this precision."""
    library: Any = torch
    if precision.dtype == torch.int8:
        got = library._int_mm(a, b)
    elif precision.most == NARROW:
        one = torch.ones((), device=a.device)
        got = library._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32)
        # until torch 2.4, _scaled_mm returned a tuple of the result and its largest value
        got = got[0] if isinstance(got, tuple) else got
    else:
        torch.backends.cuda.matmul.allow_tf32 = precision.tf32
        got = torch.mm(a, b)
    product: torch.Tensor = got
    return product


def _first_products(
    context: Context, stove: Stove, found: Sequence[Precision], given: Mapping[int, BurnProblem]
) -> None:
    """Compare the first product of each precision with the exact product. Precisions that torch does not support are
    skipped."""
    exact = {most: _exact(context, stove.device, one) for most, one in given.items()}
    for precision in found:
        pair = operands(precision, given[precision.most], stove.device)
        with context.step(f"first {precision.name} product on {stove.device}", _has_none) as step:
            got = multiply(precision, *pair)
        if step.refused:
            continue
        stove.operands[precision], stove.first[precision] = pair, got
        expected = exact[precision.most]
        expected = (expected if got.is_floating_point() else expected * (precision.most + 1) ** 2).to(got.dtype)
        wrong = got != expected  # NaN counts as wrong, because it differs from everything
        count = int(torch.count_nonzero(wrong))
        case = f"wrong elements of the first {precision.name} product on {stove.device}"
        context.figure(case, precision.dtype, (len(got),) * 3, count, 0.0, step.seconds)
        if count:
            row, column = divmod(int(wrong.view(-1).to(torch.uint8).argmax()), len(got))
            value, right = (values[row, column].item() for values in (got, expected))
            context.fail(
                "mismatch",
                f"{stove.device}: first {precision.name} product: element {[row, column]} is {value:.17g}, should be "
                f"{right:.17g} ({count} wrong): {DRAIN}",
            )


def _exact(context: Context, device: torch.device, given: BurnProblem) -> torch.Tensor:
    """Compute the exact product in float32, and check it against the sums from the host."""
    single, side = Precision("fp32", torch.float32, (0, 0)), len(given.a)
    with context.step(f"exact product {side}x{side}x{side} of numbers up to {given.most} on {device}") as step:
        product = multiply(single, *operands(single, given, device))
    wrong = torch.zeros(side, dtype=torch.bool, device=device)
    for vector, expected in zip(given.vectors.to(device), given.expected.to(device)):
        sums = torch.cat([(rows.to(torch.float64) * vector).sum(dim=1) for rows in _rows(product, ROWS)])
        wrong |= ~(sums * (given.most + 1) ** 2 == expected)  # NaN counts as wrong
    rows_at_fault = wrong.nonzero().flatten().tolist()
    case = f"wrong rows of the exact product of numbers up to {given.most} on {device}"
    context.figure(case, torch.float32, (side,) * 3, len(rows_at_fault), 0.0, step.seconds)
    if rows_at_fault:
        context.fail(
            "mismatch",
            f"{device}: the exact product has {len(rows_at_fault)} wrong rows of {side}, the first is "
            f"{rows_at_fault[0]}: {DRAIN}",
        )
    return product


def _keep_burning(context: Context, stoves: Sequence[Stove], found: Sequence[Precision], side: int) -> None:
    """Fill the memory with products, one precision after another, on all devices at once, and check them."""
    seconds = SECONDS_CPU if context.on_cpu else context.job.burn_seconds
    count = min(stove.take_memory() for stove in stoves)
    size = count * side**2 * WORD
    products, spent, wrong = (dict.fromkeys(found, 0.0) for _ in range(3))
    begin, filled = time.perf_counter(), 0
    while not context.faults and time.perf_counter() - begin < seconds:
        for precision in found:
            context.step(f"{precision.name} products {side}x{side}x{side} in {size >> 20} MiB")
            chunks: list[int] = []
            start = time.perf_counter()
            stop = min(begin + seconds, start + seconds / len(found))
            while len(chunks) < count and (not chunks or time.perf_counter() < stop):
                chunks.append((filled + len(chunks)) % count)
                products[precision] += sum(stove.fill(precision, chunks[-1]) for stove in stoves)
                for stove in stoves:
                    stove.wait()
            filled += len(chunks)
            spent[precision] += time.perf_counter() - start
            for stove in stoves:
                words, what = stove.wrong(precision, chunks)
                wrong[precision] += words
                if words:
                    differs = f"{stove.device}: later {precision.name} products differ in {words} words"
                    context.fail("mismatch", f"{differs}: {what}: {DRAIN}")
    for precision in found:
        case = f"words of later {precision.name} products that are not the first's"
        context.figure(case, precision.dtype, (side,) * 3, wrong[precision], 0.0, spent[precision])
    context.traits.update(
        bytes=size,
        passes=round(filled / count, 2),  # how often all chunks were filled
        products={precision.name: int(products[precision]) for precision in found},
        tflops={one.name: 2 * side**3 * products[one] / spent[one] / 1e12 for one in found if spent[one]},
    )


def _has_none(error: Exception) -> bool:
    """Return whether the error means that torch or cuBLAS lacks such a product."""
    return isinstance(error, TypeError) or is_unsupported(error) or "CUBLAS_STATUS_NOT_SUPPORTED" in str(error)


def devices(context: Context) -> Sequence[torch.device]:
    """All visible devices."""
    if context.on_cpu:
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
