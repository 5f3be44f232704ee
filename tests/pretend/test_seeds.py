"""Seeded faults on a simulated H100: the code paths for GPUs detect them too.

SLICE has at least one seed of each probe, and the seeds whose path differs on a GPU: exhausted memory, half types
instead of float32, kernels that only a GPU has. `make pretend` runs all seeds.
"""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from selftest.seeds.on_gpus import PROBES

from pretend import expected, launch
from pretend.sizes import SHORT

pytestmark = pytest.mark.slow

NAMES = [probe.name for probe in PROBES]
SLICE = [
    "init.alloc:greedy",
    "gemm.exact:linear",
    "gemm.exact:leaks",
    "gemm.crash:matmul",
    "gemm.accuracy:half_accumulation",
    "gemm.accumulator:half_accumulation",
    "tf32.mode:conv",
    "gemm.fp8:edge",
    "attention.math:half",
    "attention.flash:attention_nan",
    "attention.cudnn:masked",
    "norm.torch:norm_gradient",
    "conv:nan",
    "compile.triton:not_compiled",
    "burn:now_and_then",
    "burn:right",
    "memory:aliases",
    "graph.replay:stale_input",
    "train.step:noisy",
    "env.libs:foreign",
]


def test_faults_are_caught_on_the_paths_for_gpus(tmp_path: Path) -> None:
    given = launch.document("h100", "quick", NAMES, SLICE)
    variables = {**launch.variables(tmp_path), SHORT: "1"}
    found = launch.run("h100", launch.SEEDS, given, tmp_path / "frames", **variables)
    assert list(expected.missed(found)) == []
    assert set(found) == set(SLICE)


def test_the_slice_has_every_probe_that_has_seeds() -> None:
    assert {name.partition(":")[0] for name in SLICE} == {name.partition(":")[0] for name in NAMES}


def test_something_is_expected_of_every_seed() -> None:
    assert expected.unjudged(NAMES) == set()
