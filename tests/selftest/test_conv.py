"""conv: its reference is a convolution, and its bound catches one wrong product."""

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest import bounds, inputs
from envbuild.selftest.probes.conv import CHECKED, SMALL, WIDE, Convolution, reference

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
EVERY = SMALL + WIDE


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_reference_is_torchs_own_in_float64(case: Convolution) -> None:
    x, w = (inputs.signed(shape, seed).double() for shape, seed in ((case.shape, 1), (case.filters, 2)))
    rest = (case.stride, case.padding, case.dilation, case.groups)
    whole = CONVOLVE[case.dimensions](x, w, None, *rest)
    got = reference(case, x, w)
    assert float((got - whole[:, case.channels].transpose(0, 1).flatten(1)).abs().max()) < 1e-12


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_one_wrong_product_leaves_the_bound_on_integers(case: Convolution) -> None:
    x, w = inputs.ternary(case.shape, 61), inputs.ternary(case.filters, 62)
    exact, magnitude = reference(case, x, w), reference(case, x.abs(), w.abs())
    assert float(exact.abs().max()) <= 256  # an integer of bfloat16
    assert float(bounds.gemm(exact, magnitude.max(), case.products, torch.bfloat16).max()) < 0.5


def test_of_many_channels_some_are_compared() -> None:
    wide = WIDE[0].channels
    assert WIDE[0].out > CHECKED and 16 <= len(wide) <= 18 and {0, WIDE[0].out - 1} <= set(wide)
    assert all(case.channels == list(range(case.out)) for case in SMALL)
