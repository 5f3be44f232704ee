"""Computes the integer results of gemm.exact with Python's own integers, without torch and without code of the
self-test.

Run it to print the hashes that `envbuild/selftest/probes/gemm/gemm_exact_and_accuracy.py` contains.
"""

import hashlib

ROWS, INNER, COLUMNS = 509, 521, 503
BATCH, BATCH_M, BATCH_K, BATCH_N = 3, 67, 131, 53
FIELD = 16  # bits for each column in a packed row
HALF = 1 << (FIELD - 1)

Matrix = list[list[int]]


def lowbias32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def ternary(rows: int, columns: int, seed: int, first: int = 0) -> Matrix:
    def entry(index: int) -> int:
        bits = lowbias32((index + seed * 0x9E3779B9) % 2**32)
        return (-1 if bits & 1 else 1) if (bits >> 1) % 4 == 0 else 0

    return [[entry(first + row * columns + column) for column in range(columns)] for row in range(rows)]


def transpose(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


def product(a: Matrix, b: Matrix) -> Matrix:
    """Multiply integer matrices. Rows of b are packed into one big integer each, so that a row of the product is a few
    sums of these integers."""
    columns = len(b[0])
    bias = sum(HALF << (FIELD * j) for j in range(columns))
    packed = [sum(value << (FIELD * j) for j, value in enumerate(row)) for row in b]
    sums = [sum(value * row for value, row in zip(line, packed, strict=True) if value) + bias for line in a]
    mask = (1 << FIELD) - 1
    return [[((total >> (FIELD * j)) & mask) - HALF for j in range(columns)] for total in sums]


def digest(*matrices: Matrix) -> str:
    values = (value for matrix in matrices for row in matrix for value in row)
    return hashlib.sha256(b"".join(value.to_bytes(2, "little", signed=True) for value in values)).hexdigest()


def golden() -> dict[str, str]:
    x, w = ternary(ROWS, INNER, 1), ternary(COLUMNS, INNER, 2)
    bias, grad = ternary(1, COLUMNS, 3)[0], ternary(ROWS, COLUMNS, 4)
    forward = product(x, transpose(w))
    left = [ternary(BATCH_M, BATCH_K, 5, first=i * BATCH_M * BATCH_K) for i in range(BATCH)]
    right = [ternary(BATCH_K, BATCH_N, 6, first=i * BATCH_K * BATCH_N) for i in range(BATCH)]
    return {
        "Linear forward": digest([[value + b for value, b in zip(row, bias, strict=True)] for row in forward]),
        "Linear grad input": digest(product(grad, w)),
        "Linear grad weight": digest(product(transpose(grad), x)),
        "Linear grad bias": digest([[sum(column)] for column in transpose(grad)]),
        "bmm": digest(*(product(a, b) for a, b in zip(left, right, strict=True))),
    }


if __name__ == "__main__":
    for case, found in golden().items():
        print(f'    "{case}": "{found}",')
