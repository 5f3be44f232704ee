"""burn: its sums on the host are those of the product, and its numbers stay where float16 and float32 are exact."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.probes import burn


def test_the_sums_are_the_products() -> None:
    given = burn.problem(256)
    product = given.a.long() @ given.b.long()
    assert torch.equal(product @ given.vectors.long().t(), given.expected.long().t())


def test_the_factors_are_spread_and_no_row_is_another() -> None:
    given = burn.problem(1024)
    for factor in (given.a, given.b):
        assert set(factor.unique().tolist()) == {-1, 0, 1}
        assert 0.2 < float((factor != 0).double().mean()) < 0.3
        assert len(torch.unique(factor, dim=0)) == 1024


def test_every_number_is_exact() -> None:
    """At the size that GPUs take; a part of the product tells how large its elements are."""
    given = burn.problem(burn.SIDE)
    product = given.a[:256].float() @ given.b[:, :2048].float()
    assert float(product.abs().max()) < 512 < 2048
    assert burn.SIDE * 512 < 2**24 and int(given.expected.abs().max()) < 2**24


@pytest.mark.parametrize("row", [0, 300, 1023])
def test_a_wrong_element_is_seen_with_every_vector(row: int) -> None:
    given = burn.problem(512 * 2)
    floats = [part.float() for part in (given.a, given.b, given.vectors, given.expected)]
    stove = burn.Stove(torch.device("cpu"), *floats)
    assert all(not bool(stove.burn(turn).any()) for turn in range(burn.VECTORS))
    stove.a[row, 5] += 1
    for turn in range(burn.VECTORS):
        residue = stove.burn(turn)
        assert residue.nonzero().flatten().tolist() in ([row], [])  # a whole row of B, which may cancel
    assert any(bool(stove.burn(turn).any()) for turn in range(burn.VECTORS))
