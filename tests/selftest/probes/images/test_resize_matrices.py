"""The matrices of resizing, and the constants in their tolerance: the largest slope of a weight, and the rounding
errors of torch's weights and positions."""

from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import operation_case, pairwise_case_sampling, tolerances
from envbuild.selftest.numerics.element_comparison import compare
from envbuild.selftest.probes.images import image_interpolation_cases, image_pooling_and_resize_cases, resize_matrices
from envbuild.selftest.probes.images.resize_matrices import Side

N = 9
BUILT = {
    "linear": lambda out, is_aligned: resize_matrices.linear_side(N, out, ratio(out, is_aligned), is_aligned),
    "cubic": lambda out, is_aligned: resize_matrices.cubic_side(N, out, ratio(out, is_aligned), is_aligned),
}
TAPS = range(-1, 3)


def ratio(out: int, is_aligned: bool) -> Fraction:
    return resize_matrices.scale_of(N, out, is_aligned)


def resized(out: int, **how: Any) -> torch.Tensor:
    """torch's matrix (out, N) in float64: each column is a row of an image with one element of 1, resized."""
    image = torch.eye(N, dtype=torch.float64)[:, None, None]
    return F.interpolate(image, (1, out), **how)[:, 0, 0].t()


@pytest.mark.parametrize("out", [1, 4, 9, 13, 27])
@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize("kind", BUILT)
def test_a_matrix_is_torchs_in_float64(kind: str, is_aligned: bool, out: int) -> None:
    mode = "bilinear" if kind == "linear" else "bicubic"
    found = resized(out, mode=mode, align_corners=is_aligned)
    assert float((BUILT[kind](out, is_aligned).matrix - found).abs().max()) < 1e-13


@pytest.mark.parametrize("out", [4, 9, 13, 27])
@pytest.mark.parametrize("is_cubic", [False, True])
def test_an_antialiased_matrix_is_torchs_in_float64(is_cubic: bool, out: int) -> None:
    found = resized(out, mode="bicubic" if is_cubic else "bilinear", antialias=True)
    built = resize_matrices.antialiased_side(N, out, ratio(out, is_aligned=False), is_cubic)
    assert float((built.matrix - found).abs().max()) < 1e-13


@pytest.mark.parametrize("out", [1, 4, 9, 13, 27])
def test_copied_and_averaged_elements_are_torchs(out: int) -> None:
    scale = ratio(out, is_aligned=False)
    assert torch.equal(resize_matrices.nearest_side(N, out, scale).matrix, resized(out, mode="nearest"))
    centred = resize_matrices.nearest_side(N, out, scale, is_centred=True).matrix
    assert torch.equal(centred, resized(out, mode="nearest-exact"))
    assert float((resize_matrices.area_side(N, out).matrix - resized(out, mode="area")).abs().max()) < 1e-15


def test_weights_that_fall_on_one_element_at_a_border_have_at_most_this_slope() -> None:
    t, step = torch.linspace(0, 1, 100001, dtype=torch.float64), 1e-5
    for a in (-0.75, -0.5):
        weights = torch.stack([resize_matrices.cubic_weight((t - tap).abs(), a) for tap in TAPS])
        slopes = weights.diff(dim=1) / step
        for merged in (*([tap] for tap in range(4)), [0, 1], [0, 1, 2], [2, 3], [1, 2, 3]):
            largest = float(slopes[merged].sum(0).abs().max())
            assert 0.4 < largest < resize_matrices.SLOPE
    assert float(slopes.abs().max()) > 1.3


@pytest.mark.parametrize("a", [-0.75, -0.5])
def test_torchs_polynomials_in_float32_have_at_most_these_roundings(a: float) -> None:
    """As in aten/src/ATen/native/UpSample.h."""
    t = torch.linspace(0, 1, 1 << 20)[:-1]

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: torch.Tensor) -> torch.Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    found = torch.stack((far(t + 1), near(t), near(1 - t), far(1 - t + 1))).double()
    exact = torch.stack([resize_matrices.cubic_weight((t.double() - tap).abs(), a) for tap in TAPS])
    roundings = (found - exact).abs().amax(1) / tolerances.ROUNDED
    assert 5 < float(roundings[[0, 3]].max()) < 35
    assert 1 < float(roundings[[1, 2]].max()) < 6


@pytest.mark.parametrize("n", [2, 8, 33, 65])
def test_a_position_in_float32_has_at_most_these_roundings(n: int) -> None:
    for out in range(2, 200):
        number = torch.arange(out)
        scale = torch.tensor(n, dtype=torch.float32) / out
        found = (scale * (number + 0.5) - 0.5).double()
        exact = (number.double() + 0.5) * n / out - 0.5
        assert float((found - exact).abs().max()) <= resize_matrices.POSITION * n * tolerances.ROUNDED


def test_a_sum_of_one_element_is_exact_and_a_scale_of_1_copies() -> None:
    x = torch.arange(1.0, 1 + 2 * N, dtype=torch.float64).view(1, 1, 2, N)
    same = (
        resize_matrices.linear_side(2, 2, Fraction(1), is_aligned=False),
        resize_matrices.antialiased_side(N, N, Fraction(1), is_cubic=True),
    )
    found = resize_matrices.weighted(x, same, torch.float32)
    assert torch.equal(found.value, x) and not found.bound.any()


def test_an_element_just_beyond_the_taps_is_within_the_tolerance_and_one_further_away_is_not() -> None:
    side = resize_matrices.linear_side(N, 2 * N - 1, ratio(2 * N - 1, is_aligned=True), is_aligned=True)
    x = torch.full((1, 1, N), 5.0, dtype=torch.float64)
    x[..., 4] = -5.0
    exact = resize_matrices.weighted(x, [side], torch.float32)
    crossed = exact.value.clone()
    crossed[..., 10] += side.error * (x[..., 4] - x[..., 5]).squeeze()  # the output at element 5 also reads element 4
    assert not compare(crossed, exact.value, exact.bound).wrong
    crossed[..., 10] += 20 * side.error * 10
    assert compare(crossed, exact.value, exact.bound).wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_weights_that_are_rounded_to_the_dtype_are_within_the_tolerance(dtype: torch.dtype) -> None:
    """The large elements have the small weights, so that the error is larger than the rounding errors of the terms."""
    out = 178
    side = resize_matrices.linear_side(65, out, resize_matrices.scale_of(65, out, is_aligned=True), is_aligned=True)
    x = torch.where(torch.arange(65) % 2 == 0, 9.0, 1.0).to(torch.float64).view(1, 1, -1)
    exact = resize_matrices.weighted(x, [side], dtype)
    got = F.interpolate(x.to(dtype), out, mode="linear", align_corners=True)
    rounded = side.matrix.clone()
    for row in rounded:
        places = row.nonzero().flatten()
        if len(places) == 2:
            row[places[1]] = row[places[1]].to(dtype).double()
            row[places[0]] = 1 - row[places[1]]
    assert not compare(got, exact.value, exact.bound).wrong
    assert not compare((x @ rounded.t()).to(dtype), exact.value, exact.bound).wrong
    terms_alone = resize_matrices.weighted(x, [Side(side.matrix, side.error)], dtype)
    assert float(((x @ rounded.t() - exact.value).abs() / terms_alone.bound).max()) > 0.5


@pytest.mark.parametrize(
    ("module", "operation", "modes"),
    [
        (image_interpolation_cases, "interpolation", ("linear", "bicubic", "linear aligned")),
        (image_pooling_and_resize_cases, "resized images", ("bilinear", "bilinear aligned")),
    ],
    ids=["interpolation", "resized images"],
)
def test_positions_off_by_a_thousandth_of_an_element_are_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, operation: str, modes: tuple[str, ...]
) -> None:
    right = F.interpolate

    def wrong(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """The last dimension is resized from positions that lie 1/1000 too far."""
        output = right(x, *arguments, **options)
        neighbour = torch.cat((output[..., 1:], output[..., -1:]), -1)
        return output + 0.001 * (neighbour - output)

    found = next(one for one in module.OPERATIONS if one.name == operation)
    points = pairwise_case_sampling.sample(found, 80, seed=3).points
    kept = [point for point in points if (point.get("mode") or point["function"]) in modes]
    cases = [found.make(point, number) for number, point in enumerate(kept) if point["dtype"] == torch.float32]
    monkeypatch.setattr(F, "interpolate", wrong)
    seen = [
        any(part.wrong for part in operation_case.worst(case.run(*case.given), case.expected()).values())
        for case in cases
    ]
    assert len(seen) > 4 and all(seen)
