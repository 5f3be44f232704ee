"""Inputs and references are the same everywhere; they are compared with Python's own integers."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import element_comparison, hashed_inputs, reference_products, tolerances
from envbuild.selftest.probes.gemm import gemm_crash, gemm_exact_and_accuracy
from selftest import golden


def test_the_golden_hashes_are_those_of_python_integers() -> None:
    assert golden.golden() == gemm_exact_and_accuracy.GOLDEN


def test_the_probe_and_the_golden_results_mean_the_same_sizes() -> None:
    assert (gemm_exact_and_accuracy.ROWS, gemm_exact_and_accuracy.INNER, gemm_exact_and_accuracy.COLUMNS) == (
        golden.ROWS,
        golden.INNER,
        golden.COLUMNS,
    )
    assert gemm_exact_and_accuracy.BATCH == (golden.BATCH, golden.BATCH_M, golden.BATCH_K, golden.BATCH_N)
    assert all(
        size > 500 and size % 16
        for size in (gemm_exact_and_accuracy.ROWS, gemm_exact_and_accuracy.INNER, gemm_exact_and_accuracy.COLUMNS)
    )


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40])
def test_hashes_are_lowbias32(seed: int) -> None:
    expected = [golden.lowbias32((index + seed * 0x9E3779B9) % 2**32) for index in range(1000)]
    assert hashed_inputs.hashes(1000, seed).tolist() == expected


def test_ternary_has_the_density_asked_for() -> None:
    values = hashed_inputs.ternary((400, 250), 7)
    assert set(values.reshape(-1).tolist()) == {-1.0, 0.0, 1.0}
    assert 0.24 < float(values.abs().mean()) < 0.26
    assert abs(float(values.mean())) < 0.01


def test_uniform_and_signed_are_dyadic_and_in_range() -> None:
    for values, low in ((hashed_inputs.uniform((100, 1000), 1), 0.0), (hashed_inputs.signed((100, 1000), 1), -1.0)):
        assert low <= float(values.min()) < low + 0.001 and 0.999 < float(values.max()) < 1
        assert bool((values.double() * 2**24 == (values.double() * 2**24).round()).all())
    assert 0.495 < float(hashed_inputs.uniform((100, 1000), 1).mean()) < 0.505


@pytest.mark.parametrize("most", [1, 3, 2**24])
def test_whole_numbers_have_both_signs_reach_the_largest_and_are_never_0(most: int) -> None:
    values = hashed_inputs.whole((100, 1000), 1, most).double()
    assert bool((values == values.round()).all()) and float(values.abs().min()) >= 1
    assert 0.999 * most < float(values.max()) <= most and -most <= float(values.min()) < -0.999 * most


def test_an_infinity_is_right_where_it_is_expected_and_wrong_elsewhere() -> None:
    expected = torch.tensor([torch.inf, -torch.inf, 1.0])
    assert element_comparison.compare(expected, expected).wrong == 0
    for got in ([torch.inf, torch.inf, 1.0], [torch.inf, 3e38, 1.0], [torch.inf, -torch.inf, torch.inf]):
        assert element_comparison.compare(torch.tensor(got), expected).wrong == 1


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 5.0])
def test_compare_finds_the_one_wrong_element(wrong: float) -> None:
    expected = torch.zeros(3, 4, 5)
    got = expected.clone()
    got[1, 2, 3] = wrong
    got[0, 0, 0] = 0.25
    worst = element_comparison.compare(got, expected, torch.full((3, 4, 5), 0.5, dtype=torch.float64))
    assert (worst.where, worst.wrong, worst.count) == ((1, 2, 3), 1, 60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_left_out_of_error_and_tolerance(dtype: torch.dtype) -> None:
    """At the midpoint between two numbers, the error of one correct rounding is the largest error that rounding
    allows."""
    unit = 1.0 + 2 * tolerances.unit_roundoff(dtype)  # the number after 1
    halfway = torch.tensor([1.0 + tolerances.unit_roundoff(dtype)] * 2, dtype=torch.float64)
    once = tolerances.rounding(halfway, dtype)
    rounded, away = torch.tensor([1.0, unit], dtype=dtype), torch.tensor([1.0, 2 * unit - 1], dtype=dtype)
    assert element_comparison.compare(rounded, halfway, once).beyond_rounding == 0
    assert element_comparison.compare(rounded, halfway, 3 * once).beyond_rounding == 0
    assert element_comparison.compare(away, halfway, 9 * once).beyond_rounding == pytest.approx(0.25, rel=0.02)
    assert element_comparison.compare(away, halfway, once).beyond_rounding == float("inf")
    assert element_comparison.compare(away, halfway, 2 * once).beyond_rounding == pytest.approx(2, rel=0.02)


def test_an_error_that_is_not_a_number_is_infinitely_beyond_rounding() -> None:
    got, expected = torch.tensor([float("nan"), 1.0]), torch.ones(2)
    assert element_comparison.compare(got, expected, torch.ones(2)).beyond_rounding == float("inf")
    assert element_comparison.compare(torch.tensor([3, 4]), torch.tensor([3, 5])).beyond_rounding == float("inf")
    assert element_comparison.compare(torch.tensor([3, 5]), torch.tensor([3, 5])).beyond_rounding == 0


def test_compare_refuses_another_shape() -> None:
    with pytest.raises(ValueError):
        element_comparison.compare(torch.zeros(2, 3), torch.zeros(3, 2))


def test_product_calls_no_gemm_and_keeps_the_thread_count() -> None:
    torch.set_num_threads(2)
    a, b = hashed_inputs.ternary((7, 9), 1).to(torch.int16), hashed_inputs.ternary((9, 5), 2).to(torch.int16)
    assert reference_products.product(a, b).tolist() == golden.product(a.tolist(), b.tolist())
    assert torch.get_num_threads() == 2


def test_the_published_shapes_are_first_and_in_order() -> None:
    shapes = [(gemm.m, gemm.k, gemm.n, gemm.dtype, gemm.linear) for gemm in gemm_crash.PUBLISHED[:3]]
    assert shapes == [
        (2, 1024, 18432, torch.bfloat16, True),
        (64, 14688, 1536, torch.float16, False),
        (8, 1024, 4096, torch.bfloat16, False),
    ]
    assert len(list(gemm_crash.sweep_shapes())) == 375
    assert len({gemm.name for gemm in gemm_crash.sweep_shapes()}) == 375
