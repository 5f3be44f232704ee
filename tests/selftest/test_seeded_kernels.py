"""Kernels with the faults of real GPUs and libraries: the responsible probe reports each fault and its position."""

import pytest

from selftest import seeding
from selftest.named import NAMED
from selftest.reading import Frame

pytest.importorskip("torch")

import torch

from selftest.seeds.failures import RIGHT, WRONG

pytestmark = pytest.mark.slow  # the fixture runs all kernels

TRAITS = [
    ("attention.math:overflow", "needs_upcast", ["fp16"]),
    ("attention.math:overflow", "accumulates_in_half", {"fp16": [], "bf16": []}),
    ("attention.math:half", "accumulates_in_half", {"fp16": ["output"], "bf16": []}),
    ("attention.math:half", "needs_upcast", ["fp16"]),
    ("attention.math:right", "accumulates_in_half", {"fp16": [], "bf16": []}),
    ("attention.flash:attention_nan", "needs_upcast", ["bf16"]),
    ("norm.torch:norm_refuses", "refusal", "expected scalar type Float but found Half"),
    ("norm.torch:right", "needs_upcast", []),
]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    try:
        return seeding.kernels(tmp_path_factory.mktemp("seeds"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("seed", "failure", "words"), WRONG)
def test_a_wrong_kernel_is_caught_and_located(seeds: dict[str, Frame], seed: str, failure: str, words: str) -> None:
    frame = seeds[seed]
    assert (frame["status"], frame["failure"]) == ("failed", failure), frame
    assert words in frame["reason"], frame["reason"]
    assert frame["at"]


@pytest.mark.parametrize("seed", [seed for seed, _, _ in WRONG])
def test_a_wrong_kernel_is_named_with_its_advisory(seeds: dict[str, Frame], seed: str) -> None:
    from envbuild.facts import (
        database,  # not above: WRONG is also read on machines with a GPU and without our dependencies
    )

    result = {**seeds[seed], "probe": seed.partition(":")[0]}
    assert [advisory.id for advisory in database.advisories() if advisory.matches(result)] == NAMED.get(seed, [])


@pytest.mark.parametrize("seed", RIGHT)
def test_a_right_kernel_written_another_way_passes(seeds: dict[str, Frame], seed: str) -> None:
    if seed.startswith("compile.") and " " in torch.__file__:
        pytest.skip("torch.compile's linker does not find torch where its path holds a space")
    assert seeds[seed]["status"] == "passed", seeds[seed]["reason"]


@pytest.mark.parametrize(("seed", "trait", "value"), TRAITS)
def test_the_traits_say_more(seeds: dict[str, Frame], seed: str, trait: str, value: object) -> None:
    assert seeds[seed]["traits"][trait] == value


@pytest.mark.parametrize(("seed", "half"), [("half_by_default", True), ("tf32", False)])
def test_results_with_the_default_flags_of_torch_are_reported_and_not_judged(
    seeds: dict[str, Frame], seed: str, half: bool
) -> None:
    traits = seeds[f"gemm.accuracy:{seed}"]["traits"]
    assert traits["flags"]["allow_fp16_reduced_precision_reduction"] is True
    flags = traits["default flags"]["fp16"]
    assert (flags["within"], flags["ratio"] > 1) == (not half, half)
    assert traits["default flags"]["bf16"]["within"]


def test_no_seed_is_left_untested(seeds: dict[str, Frame]) -> None:
    assert {seed for seed, _, _ in WRONG} | set(RIGHT) == set(seeds)
