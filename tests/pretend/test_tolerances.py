"""Every product's tolerance against emulated tensor cores: healthy ones stay well within it, wrong ones do not."""

import dataclasses

import pytest

pytest.importorskip("torch")

from selftest.tensor_cores import CORES, FP8_CORES

from pretend import sweep

pytestmark = pytest.mark.slow

LENGTHS = (64, 1040, 4096)  # `make pretend` uses more
CASES = list(sweep.cases())
HALVES = [(generation, kind) for generation, kind in CASES if kind in ("fp16", "bf16")]
ENOUGH = 0.7


@pytest.mark.parametrize(("generation", "kind"), CASES)
def test_healthy_cores_stay_well_within_the_tolerance(generation: str, kind: str) -> None:
    ratios = [sweep.healthy_ratio(generation, kind, k) for k in LENGTHS]
    ratios += [sweep.healthy_ratio(generation, kind, 256, shape) for shape in sweep.SHAPES]
    assert max(ratios) < ENOUGH, ratios


@pytest.mark.parametrize(("generation", "kind"), CASES)
def test_accumulators_of_half_precision_exceed_the_tolerance(generation: str, kind: str) -> None:
    ratios = [sweep.wrong_ratio(generation, kind, k) for k in LENGTHS]
    assert min(ratios) > 1, ratios


@pytest.mark.parametrize("generation", FP8_CORES)
@pytest.mark.parametrize("every", [128, 512])
def test_fp8_sums_that_are_promoted_to_float32_stay_well_within_the_tolerance(generation: str, every: int) -> None:
    assert sweep.healthy_ratio(generation, "fp8", 4096, promoted_every=every) < ENOUGH


@pytest.mark.parametrize("generation", FP8_CORES)
def test_fp8_sums_that_are_kept_in_half_precision_are_seen_on_large_integers(generation: str) -> None:
    core = FP8_CORES[generation]
    assert not sweep.misses_large_integers(core)
    assert sweep.misses_large_integers(dataclasses.replace(core, kept=sweep.WRONG_BITS["fp8"]))


@pytest.mark.parametrize("k", LENGTHS)
def test_float32_without_tensor_cores_stays_well_within_the_tolerance_and_tf32_does_not(k: int) -> None:
    assert sweep.float32_ratio(k) < ENOUGH
    assert sweep.float32_ratio(k, tf32=True) > 1


@pytest.mark.parametrize("generation", CORES)
def test_split_k_in_half_precision_stays_well_within_its_tolerance(generation: str) -> None:
    ratios = [sweep.split_ratio(generation, slices, 256) for slices in sweep.SLICES]
    assert max(ratios) < ENOUGH, ratios


@pytest.mark.parametrize(("generation", "kind"), HALVES)
def test_attention_by_healthy_cores_stays_well_within_the_floor_and_by_wrong_ones_does_not(
    generation: str, kind: str
) -> None:
    assert sweep.attention_ratio(generation, kind, 128, 64) < ENOUGH
    assert sweep.attention_ratio(generation, kind, 128, 64, sweep.wrong(generation, kind)) > 1
