"""burn: the sums on the host equal those of the product, every device sums exactly, and differences are detected."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.hardware import burn
from selftest import tensor_cores
from selftest.tensor_cores import Core

MOST = [burn.WIDE, burn.NARROW]
# The tensor cores that keep the fewest bits of float16 and TF32 products: Volta and Ampere (arXiv 2511.10909).
CORES = {"Volta fp16": Core(aligned=23, block=4, kept=23), "Ampere tf32": Core(aligned=24, block=4, kept=23)}


@pytest.mark.parametrize("most", MOST)
def test_the_sums_are_the_products(most: int) -> None:
    given = burn.problem(256, most)
    product = given.a.long() @ given.b.long()
    assert torch.equal(product @ given.vectors.long().t(), given.expected.long().t())


@pytest.mark.parametrize("most", MOST)
def test_the_factors_are_dense_and_all_rows_differ(most: int) -> None:
    given = burn.problem(1024, most)
    for factor in (given.a, given.b):
        assert factor.abs().unique().tolist() == list(range(1, most + 1))
        assert abs(float(factor.double().mean())) < 0.02 * most
        assert len(torch.unique(factor, dim=0)) == 1024


@pytest.mark.parametrize(("most", "limit"), [(burn.WIDE, 2**22), (burn.NARROW, 2**14)])
def test_no_sum_reaches_what_is_added_up_exactly(most: int, limit: int) -> None:
    """For a part of the product in a GPU's size: 8 standard deviations are below the limit up to which sums are exact.
    No element of the part exceeds 6; the whole product has up to 2^26 elements."""
    given = burn.problem(burn.SIDE, most)
    product = given.a[:256].float() @ given.b[:, :2048].float()
    assert float(product.abs().max()) < 6 * float(product.std()) < 8 * float(product.std()) < limit


def emulated(most: int, dtype: torch.dtype, core: Core) -> torch.Tensor:
    """Return how far a part of the product is off when this core computes it."""
    given = burn.problem(4096, most)
    a, b = ((part / (most + 1)).to(dtype) for part in (given.a[:8].float(), given.b[:, :8].float()))
    exact = (given.a[:8].double() @ given.b[:, :8].double()) / (most + 1) ** 2
    return (tensor_cores.multiply(a, b, core) - exact).abs().max()


@pytest.mark.parametrize("core", CORES)
def test_tensor_cores_add_up_wide_numbers_exactly(core: str) -> None:
    assert emulated(burn.WIDE, torch.float16, CORES[core]) == 0


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="this torch has no fp8")
@pytest.mark.parametrize("core", tensor_cores.FP8_CORES)
def test_tensor_cores_add_up_narrow_numbers_of_fp8_exactly(core: str) -> None:
    assert emulated(burn.NARROW, torch.float8_e4m3fn, tensor_cores.FP8_CORES[core]) == 0


def test_an_accumulator_of_fewer_bits_would_be_seen() -> None:
    assert emulated(burn.WIDE, torch.float16, tensor_cores.HALF_ACCUMULATOR) > 0


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((0, 0), "fp32 fp64"),
        ((7, 0), "fp16 fp32 fp64"),
        ((7, 5), "fp16 int8 fp32"),
        ((8, 0), "fp16 bf16 int8 tf32 fp32 fp64"),
        ((8, 9), "fp16 bf16 int8 fp8 tf32 fp32"),
        ((9, 0), "fp16 bf16 int8 fp8 tf32 fp32 fp64"),
        ((12, 0), "fp16 bf16 int8 fp8 tf32 fp32"),
    ],
)
def test_the_precisions_of_a_device(capability: tuple[int, int], names: str) -> None:
    expected = [name for name in names.split() if name != "fp8" or hasattr(torch, "float8_e4m3fn")]
    assert [precision.name for precision in burn.precisions(capability)] == expected


@pytest.mark.parametrize("before", [16 << 30, 80 << 30, 141 << 30])
def test_a_tenth_of_the_memory_is_left(before: int) -> None:
    chunk, free = burn.SIDE**2 * burn.WORD, before - (5 << 30)  # operands and first products
    left = free - burn.chunks_to_hold(before, free, burn.SIDE) * chunk
    assert (1 - burn.HELD) * before <= left + 1 < (1 - burn.HELD) * before + chunk + 1


@pytest.mark.parametrize("row", [0, 300, 767])
def test_a_wrong_element_of_the_exact_product_is_found_by_its_row(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    multiply = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = multiply(a, b)
        product[row, 5] += 2.0**-14
        return product

    context, given = Context(JobDocument(nonce="0" * 32)), burn.problem(768, burn.WIDE)
    burn._exact(context, torch.device("cpu"), given)
    assert not context.faults
    monkeypatch.setattr(torch, "mm", wrong)
    burn._exact(context, torch.device("cpu"), given)
    assert context.faults[0].reason == (
        f"cpu: the exact product has 1 wrong rows of 768, the first is {row}: drain the GPU"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32])
def test_a_changed_bit_is_found_where_it_is(dtype: torch.dtype) -> None:
    """A change of any bit is found; -0.0 and 0.0 count as different, too."""
    stove = burn.Stove(torch.device("cpu"), 16)
    (precision,) = burn.precisions((0, 0))[:1]
    stove.first[precision] = torch.arange(256).reshape(16, 16).to(dtype)
    stove.take_memory()
    for chunk in stove._chunks:
        chunk.view(dtype).view(-1, 16, 16).copy_(stove.first[precision].expand(8 // dtype.itemsize, 16, 16))
    assert stove.wrong(precision, range(burn.CHUNKS_CPU)) == (0, "")
    changed = stove._chunks[2].view(torch.uint8)
    changed[(16 * 9 + 3) * dtype.itemsize + dtype.itemsize - 1] ^= 0x80  # a sign bit
    count, what = stove.wrong(precision, range(burn.CHUNKS_CPU))
    assert count == 1 and what.startswith("element [9, 3] is -") and what.endswith("the first product's 147")
    changed[(16 * 9 + 3) * dtype.itemsize + dtype.itemsize - 1] ^= 0x80
    changed[dtype.itemsize - 1] ^= 0x80
    assert stove.wrong(precision, range(burn.CHUNKS_CPU))[0] == 1
