"""Operations with exactly one right result: products, embeddings and sums of integers, casts, copies and extremes.

Sums of integers are exact in every dtype and in every order, as long as the dtype represents every partial sum: for
bfloat16, up to 2^8. Expected results come from outer products (reference_products.product), from Python's lists and
integers, or from arithmetic on bit patterns. They use no tested operation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import short_name
from envbuild.selftest.numerics import backward_pass, hashed_inputs
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.reference_products import product

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = ((67, 131, 41), (129, 65, 33), (15, 257, 17))  # m, k, n: just above or just below multiples of tiles
FACTORS = ((2.0, -1.0), (0.5, 3.0))  # (alpha, beta), with which products of integers stay exact
BATCH = 5
# of an embedding: rows, columns, indices, and how many of the first indices are equal
KEYS, WIDTH, LOOKUPS, FREQUENT = 97, 33, 601, 300
PADDING = 0
LENGTHS = (1, 33, 1025)  # of cumulative sums: one element, more than a warp, more than a block
PRIME = 257

# (exponent bits, fraction bits). float8_e4m3fn has no infinity: its largest exponent is used for numbers, except for
# one NaN.
FORMATS = {torch.float16: (5, 10), torch.bfloat16: (8, 7), torch.float32: (8, 23)}
_EIGHT_BITS = {"float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}  # since torch 2.1
FORMATS.update({getattr(torch, name): bits for name, bits in _EIGHT_BITS.items() if hasattr(torch, name)})


def cases() -> Iterator[Case]:
    """Yield every case, with inputs on the host."""
    for dtype in FLOATS:
        yield from exact_products(dtype)
        yield exact_embedding(dtype)
        yield from cumulative_sums(dtype)
        yield extremes(dtype)
    yield from cumulative_sums(torch.int64)
    yield extremes(torch.int32)
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64):
        yield layouts(dtype)
    yield from casts()


def exact_products(dtype: torch.dtype) -> Iterator[Case]:
    """Yield addmm, baddbmm and bmm of +-1: contiguous, transposed, and with gaps of NaN between the elements."""
    for (m, k, n), (alpha, beta) in itertools.product(SHAPES, FACTORS):
        c, a, b = (
            hashed_inputs.whole((m, n), 301, 3),
            hashed_inputs.whole((m, k), 302, 1),
            hashed_inputs.whole((k, n), 303, 1),
        )
        weights = functools.partial(_weighted, alpha=alpha, beta=beta)
        for layout, (left, right) in itertools.product(("nn", "tt"), ((c, a), (c[0], a))):
            added = "row" if left.dim() == 1 else "matrix"
            name = f"addmm {layout} {m}x{k}x{n} {beta:g} {added} + {alpha:g} product"
            run = functools.partial(_addmm, alpha=alpha, beta=beta, transposed=layout == "tt")
            yield Case(name, dtype, (left.to(dtype), right.to(dtype), b.to(dtype)), run, weights)
    m, k, n = SHAPES[0]
    a, b = hashed_inputs.whole((BATCH, m, k), 304, 1).to(dtype), hashed_inputs.whole((BATCH, k, n), 305, 1).to(dtype)
    yield Case(f"addmm {m}x{k}x{n} 0 NaN + product", dtype, (a[0], b[0]), _addmm_over_nan, _weighted_nothing)
    c = hashed_inputs.whole((1, m, n), 306, 3).to(dtype)
    alpha, beta = FACTORS[0]
    weights = functools.partial(_weighted, alpha=alpha, beta=beta)
    run = functools.partial(_baddbmm, alpha=alpha, beta=beta)
    yield Case(f"baddbmm {BATCH}x{m}x{k}x{n} expanded", dtype, (c, a, b), run, weights)
    yield Case(f"bmm {BATCH}x{m}x{k}x{n} with gaps", dtype, (a, b), _bmm_with_gaps, _weighted_nothing)


def _addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float, transposed: bool) -> Results:
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    return {"output": torch.addmm(c, a, b, alpha=alpha, beta=beta)}


def _addmm_over_nan(a: torch.Tensor, b: torch.Tensor) -> Results:
    """Call addmm with beta = 0. The added tensor is NaN, because torch must not read it (torch.addmm's documentation:
    NaN and infinity do not propagate)."""
    return {"output": torch.addmm(a.new_full((a.shape[0], b.shape[1]), math.nan), a, b, beta=0)}


def _baddbmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float) -> Results:
    return {"output": torch.baddbmm(c.expand(len(a), -1, -1), a, b, alpha=alpha, beta=beta)}


def _bmm_with_gaps(a: torch.Tensor, b: torch.Tensor) -> Results:
    """Multiply batches with gaps between rows, columns and matrices, once also with the last two dimensions swapped in
    memory."""
    swapped = _spread(b.transpose(1, 2), (1, 1, 1)).transpose(1, 2)
    return {
        "rows apart": torch.bmm(_spread(a, (2, 1, 1)), _spread(b, (1, 1, 1))),
        "columns apart": torch.bmm(_spread(a, (1, 2, 2)), swapped),
    }


def _spread(x: torch.Tensor, steps: tuple[int, ...]) -> torch.Tensor:
    """Return the same values as a view with NaN between them. `steps`: for each dimension, the distance from one
    element to the next."""
    buffer = x.new_full([n * step + 1 for n, step in zip(x.shape, steps)], math.nan)
    return buffer[tuple(slice(1, 1 + n * step, step) for n, step in zip(x.shape, steps))].copy_(x)


def _weighted(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float) -> Expected:
    return {"output": without_rounding(beta * c + alpha * _product(a, b))}


def _weighted_nothing(a: torch.Tensor, b: torch.Tensor) -> Expected:
    exact = without_rounding(_product(a, b))
    return {"output": exact} if a.dim() == 2 else {"rows apart": exact, "columns apart": exact}


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a, b) if a.dim() == 2 else torch.stack([product(*pair) for pair in zip(a, b)])


def exact_embedding(dtype: torch.dtype) -> Case:
    """Build a case that looks up rows by index, one of them over 300 times, and sums the gradients of each row. The
    padding row's gradient is 0."""
    indices = 1 + hashed_inputs.hashes(LOOKUPS, 311) % (KEYS - 1)
    indices[:FREQUENT] = 5
    indices[FREQUENT : FREQUENT + KEYS - 1] = torch.arange(1, KEYS)
    table, grad = hashed_inputs.whole((KEYS, WIDTH), 312, 100), hashed_inputs.whole((LOOKUPS, WIDTH), 313, 1)
    name = f"embedding {LOOKUPS} of {KEYS}x{WIDTH}"
    return Case(name, dtype, (indices, table.to(dtype), grad.to(dtype)), _embedding, _looked_up)


def _embedding(indices: torch.Tensor, table: torch.Tensor, grad: torch.Tensor) -> Results:
    padded = torch.cat((torch.full_like(indices[:3], PADDING), indices))
    weights = table.detach().requires_grad_()
    rows = F.embedding(padded, weights, padding_idx=PADDING)
    backward_pass.accumulate(rows, torch.cat((torch.full_like(grad[:3], 64.0), grad)))
    assert weights.grad is not None
    return {"output": rows.detach(), "gradient": weights.grad}


def _looked_up(indices: torch.Tensor, table: torch.Tensor, grad: torch.Tensor) -> Expected:
    rows, given, order = table.tolist(), grad.tolist(), [PADDING] * 3 + indices.tolist()
    sums = [[0.0] * table.shape[1] for _ in rows]
    for row, values in zip(order[3:], given):
        sums[row] = [total + value for total, value in zip(sums[row], values)]
    return {"output": _exactly([rows[index] for index in order]), "gradient": _exactly(sums)}


def cumulative_sums(dtype: torch.dtype) -> Iterator[Case]:
    """Yield cumulative sums along rows and along columns."""
    most = 1 if dtype.is_floating_point else 1 << 20
    for length in LENGTHS:
        x = hashed_inputs.whole((3, length), 321 + length, most).to(dtype)
        yield Case(f"cumsum 3x{length}", dtype, (x,), _cumulative_sum, _accumulated)


def _cumulative_sum(x: torch.Tensor) -> Results:
    return {"rows": torch.cumsum(x, dim=1), "columns": torch.cumsum(x.t().contiguous(), dim=0)}


def _accumulated(x: torch.Tensor) -> Expected:
    rows = [list(itertools.accumulate(row)) for row in x.tolist()]
    return {"rows": _exactly(rows), "columns": _exactly(list(zip(*rows)))}


def extremes(dtype: torch.dtype) -> Case:
    """Build a case of the largest and smallest elements. Each column contains the largest element of one row and the
    smallest of a different row."""
    rows, columns = torch.arange(1, PRIME)[:, None], torch.arange(7, PRIME)[None, :]
    x = (rows * columns % PRIME - PRIME // 2).to(dtype)
    return Case(f"max and min {len(x)}x{x.shape[1]}", dtype, (x,), _extremes, _found_by_hand)


def _extremes(x: torch.Tensor) -> Results:
    found = {"max of all": x.max(), "min of all": x.min()}
    for dim, name in ((1, "rows"), (0, "columns")):
        found[f"max of {name}"], found[f"argmax of {name}"] = torch.max(x, dim=dim)
        found[f"min of {name}"], found[f"argmin of {name}"] = torch.min(x, dim=dim)
    if x.is_floating_point():
        one_nan = x.clone()
        one_nan[:, -1] = math.nan
        found["max with NaN is NaN"] = torch.isnan(one_nan.amax(dim=1))
        found["min with NaN is NaN"] = torch.isnan(one_nan.amin(dim=1))
    return found


def _found_by_hand(x: torch.Tensor) -> Expected:
    lists = {"rows": x.tolist(), "columns": list(zip(*x.tolist()))}
    found = {"max of all": max(map(max, lists["rows"])), "min of all": min(map(min, lists["rows"]))}
    for name, lines in lists.items():
        for word, pick in (("max", max), ("min", min)):
            extreme = [pick(line) for line in lines]
            found[f"{word} of {name}"] = extreme
            found[f"arg{word} of {name}"] = [line.index(value) for line, value in zip(lines, extreme)]
    if x.is_floating_point():
        found["max with NaN is NaN"] = found["min with NaN is NaN"] = [True] * len(x)
    return {name: _exactly(values) for name, values in found.items()}


def layouts(dtype: torch.dtype) -> Case:
    """Build a case of copies that change the order of elements, at odd offsets and with gaps, of a matrix and of a
    batch of images."""
    shapes = (129, 67), (3, 20, 9, 11)
    given = tuple((hashed_inputs.hashes(math.prod(shape), 331).reshape(shape) % 251).to(dtype) for shape in shapes)
    return Case(f"copies of {short_name(dtype)} between layouts", dtype, given, _copies, _moved)


def _copies(matrix: torch.Tensor, images: torch.Tensor) -> Results:
    rows, columns = matrix.shape
    turned = matrix.new_zeros(columns, rows)
    turned.t().copy_(matrix)
    apart = matrix.new_zeros(2 * rows, 2 * columns)
    apart[1::2, ::2].copy_(matrix)
    shifted = matrix.new_zeros(matrix.numel() + 2)
    shifted[1:-1].copy_(matrix.flatten())
    return {
        "transposed": matrix.t().contiguous(),
        "into columns": turned,
        "apart": apart,
        "shifted by one": shifted,
        "from the second": matrix.flatten()[1:].clone(),
        "joined": torch.cat((matrix, matrix.flip(1)), dim=1),
        "first column repeated": matrix[:, :1].expand(-1, 35).contiguous(),
        "channels last": images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).flatten(),
        "permuted": images.permute(3, 1, 0, 2).contiguous(),
    }


def _moved(matrix: torch.Tensor, images: torch.Tensor) -> Expected:
    rows, whole = matrix.tolist(), images.tolist()
    flat = list(itertools.chain(*rows))
    zeros = [0.0] * 2 * matrix.shape[1]
    turned = list(zip(*rows))
    batch, channels, high, wide = map(range, images.shape)
    moved: dict[str, Any] = {
        "transposed": turned,
        "into columns": turned,
        "apart": [line for row in rows for line in (zeros, [value for each in row for value in (each, 0.0)])],
        "shifted by one": [0.0, *flat, 0.0],
        "from the second": flat[1:],
        "joined": [row + row[::-1] for row in rows],
        "first column repeated": [row[:1] * 35 for row in rows],
        "channels last": [whole[b][c][h][w] for b in batch for h in high for w in wide for c in channels],
        "permuted": [[[[whole[b][c][h][w] for h in high] for b in batch] for c in channels] for w in wide],
    }
    return {name: _exactly(values) for name, values in moved.items()}


def casts() -> Iterator[Case]:
    """Yield casts between dtypes.

    Every finite number of each small dtype is cast to float32 and float64. float32 numbers are cast to the small
    dtypes: numbers that these represent, numbers halfway between two, and numbers just below and above halfway.
    Selected numbers are cast to and from integers.
    """
    for small in FORMATS:
        if small != torch.float32:
            yield widening(small)
            yield narrowing(small)
    around = torch.arange(-40, 40)
    for target, centres in {
        torch.float32: (1 << 24, 3 << 28, 1 << 40),
        torch.float16: (2048, 40000),
        torch.bfloat16: (256, 1 << 15),
        torch.float64: (1 << 53, 1 << 62),
    }.items():
        values = torch.cat([sign * centre + around for centre in centres for sign in (1, -1)])
        sources = (torch.int64, torch.int32) if max(centres) < 1 << 31 else (torch.int64,)
        for source in sources:
            name = f"{short_name(source)} to {short_name(target)}"
            run = functools.partial(_cast, target=target)
            yield Case(name, target, (values.to(source),), run, functools.partial(_nearest_to_integers, target=target))
    for target in (torch.int8, torch.uint8, torch.int32, torch.int64):
        values = torch.arange(500) / 4
        signed = values if target == torch.uint8 else torch.cat((values, -values))
        for dtype in FLOATS:
            if dtype != torch.bfloat16:  # bfloat16 does not represent multiples of 1/4 above 64
                name = f"{short_name(dtype)} to {short_name(target)}"
                yield Case(name, dtype, (signed.to(dtype),), functools.partial(_cast, target=target), _truncated)


def _cast(x: torch.Tensor, target: torch.dtype) -> Results:
    return {"output": x.to(target)}


def _nearest_to_integers(x: torch.Tensor, target: torch.dtype) -> Expected:
    wide = torch.tensor([float(value) for value in x.tolist()], dtype=torch.float64)
    return {"output": without_rounding(wide if target == torch.float64 else nearest(wide, target))}


def _truncated(x: torch.Tensor) -> Expected:
    return {"output": _exactly([int(value) for value in x.tolist()])}


def widening(small: torch.dtype) -> Case:
    """Build a case that casts every finite number of an 8-bit or 16-bit dtype, given as its bit pattern."""
    patterns = finite_patterns(small)
    exponent, fraction = FORMATS[small]
    bits = torch.uint8 if exponent + fraction == 7 else torch.int16
    wrapped = torch.where(patterns < 1 << 15, patterns, patterns - (1 << 16)) if bits == torch.int16 else patterns

    def run(x: torch.Tensor) -> Results:
        return {short_name(wide): x.view(small).to(wide) for wide in (torch.float32, torch.float64)}

    def exact(x: torch.Tensor) -> Expected:
        found = without_rounding(decode(x.to(torch.int64), small))
        return {short_name(wide): found for wide in (torch.float32, torch.float64)}

    return Case(f"all of {short_name(small)} to wider dtypes", small, (wrapped.to(bits),), run, exact)


def narrowing(small: torch.dtype) -> Case:
    """Build a case that casts float32 numbers to the smaller dtype `small`.

    The inputs are the finite numbers of `small`, the midpoint between each two neighbours, and the float32 numbers just
    below and just above each midpoint. The right result is the nearest number of `small`, and for a midpoint the
    neighbour with an even last digit. For 16-bit dtypes, there are also inputs that round to infinity."""
    numbers = decode(finite_patterns(small), small)
    numbers = numbers[~torch.signbit(numbers)]
    halfway = (numbers[1:] + numbers[:-1]) / 2
    if small in (torch.float16, torch.bfloat16):  # for 8-bit dtypes, the conversion of larger numbers differs
        halfway = torch.cat((halfway, numbers[-1:] + (numbers[-1:] - numbers[-2:-1]) / 2))
    ties = halfway.to(torch.float32)
    below, above = (torch.nextafter(ties, torch.full_like(ties, end)) for end in (0.0, math.inf))
    x = torch.cat((numbers.to(torch.float32), ties, below, above))
    x = x * hashed_inputs.signs(len(x), 341)

    def run(values: torch.Tensor) -> Results:
        return {"output": values.to(small).to(torch.float32)}

    def exact(values: torch.Tensor) -> Expected:
        return {"output": without_rounding(nearest(values, small))}

    return Case(f"fp32 to {short_name(small)}", torch.float32, (x,), run, exact)


def finite_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return the bit patterns (int64) of all finite numbers of an 8-bit or 16-bit dtype. The patterns without the sign
    bit come first, in rising order."""
    exponent, fraction = FORMATS[dtype]
    first_nonfinite = 127 if str(dtype) == "torch.float8_e4m3fn" else ((1 << exponent) - 1) << fraction
    positive = torch.arange(first_nonfinite)
    return torch.cat((positive, positive + (1 << exponent + fraction)))


def decode(patterns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers (float64) that bit patterns (int64) represent, by IEEE 754's formula."""
    exponent, fraction = FORMATS[dtype]
    bias = (1 << exponent - 1) - 1
    power = patterns >> fraction & (1 << exponent) - 1
    digits = patterns & (1 << fraction) - 1
    digits = torch.where(power > 0, digits + (1 << fraction), digits)
    sign = torch.where((patterns >> exponent + fraction & 1).bool(), -1.0, 1.0).to(torch.float64)
    return sign * digits * _power_of_two(power.clamp(min=1) - bias - fraction)


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 to the nearest number of a smaller dtype, including subnormal numbers; ties go to even."""
    exponent, fraction = FORMATS[dtype]
    power = torch.frexp(x)[1].to(torch.int64) - 1
    spacing = _power_of_two(power.clamp(min=2 - (1 << exponent - 1)) - fraction)
    rounded = torch.round(x / spacing) * spacing
    return torch.where(rounded.abs() > torch.finfo(dtype).max, torch.sign(x) * math.inf, rounded)


def _power_of_two(n: torch.Tensor) -> torch.Tensor:
    """Return 2^n in float64 for int64 n of -1022 to 1023, constructed from its bits."""
    return (n + 1023 << 52).view(torch.float64)


def _exactly(values: Any) -> Exact:
    return without_rounding(torch.tensor(values, dtype=torch.float64))
