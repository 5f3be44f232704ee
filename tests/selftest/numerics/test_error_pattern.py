"""Descriptions of wrong elements: faults of known kinds are inserted into right results."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import element_comparison, hashed_inputs

SHAPE = (130, 96)
EXACT = hashed_inputs.uniform(SHAPE, 5).to(torch.float64) + 1


def description(change: Callable[[torch.Tensor], object], dtype: torch.dtype = torch.float32) -> str:
    got = EXACT.to(dtype)
    change(got)
    limit = torch.full(SHAPE, 2 * float(torch.finfo(dtype).eps), dtype=torch.float64)
    return str(element_comparison.compare(got, EXACT, limit))


def shifted(got: torch.Tensor) -> None:
    got[10:14] = EXACT[11:15].to(got.dtype)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda got: got[128].zero_(), "all at 128 of 130 in dimension 0, the first of a tile of 128;"),
        (lambda got: got[128].zero_(), "all zero: not written"),
        (lambda got: got[63].zero_(), "all at 63 of 130 in dimension 0, the last of a tile of 64;"),
        (lambda got: got[:, 95].mul_(2), "all at 95 of 96 in dimension 1, the last one"),
        (lambda got: got[129].mul_(2), "in dimension 0, the last one"),
        (lambda got: got[3::32].mul_(-1), "all at 3 modulo 32 in dimension 0"),
        (lambda got: got[:, :40].mul_(0.75), "nearly all too small: part of a sum may be left out"),
        (lambda got: got.mul_(1 + 2.0**-10), "many elements a little off: sums in a narrow accumulator"),
        (lambda got: got[7, 5:30].fill_(3.0), "all the same value"),
        (shifted, "each is the right value of another element"),
    ],
)
def test_the_kind_of_fault_is_named(change: Callable[[torch.Tensor], object], words: str) -> None:
    assert words in description(change)


@pytest.mark.parametrize(("dtype", "integers"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_one_bit_is_named_with_its_element(dtype: torch.dtype, integers: torch.dtype) -> None:
    def flip(got: torch.Tensor) -> None:
        got.view(integers)[4, 9] ^= 1 << 10

    words = description(flip, dtype)
    assert words.startswith("element [4, 9] is ") and "(1 of 12480 wrong; bits " in words
    assert ", one differs" in words


def test_a_right_result_has_no_description() -> None:
    assert element_comparison.compare(EXACT.to(torch.float32), EXACT, torch.full(SHAPE, 1.0)).pattern == ""


def test_values_that_are_not_finite_and_whole_numbers_are_described_too() -> None:
    got = torch.tensor([1.0, float("nan"), float("inf")])
    assert "2 of 3 wrong" in str(element_comparison.compare(got, torch.ones(3)))
    assert "1 of 3 wrong; in dimension 0, the last one)" in str(
        element_comparison.compare(torch.tensor([1, 1, 7]), torch.ones(3))
    )
