"""Every probe passes on a simulated GPU without faults, on the code path for GPUs and within the memory of real GPUs.

These tests run a part of `make pretend`: an H100, which has every kernel, at level standard with small sizes, and a T4,
which lacks most kernels and has the least memory, at level quick with the real sizes, each with a twentieth of the
sampled cases. `make pretend` runs all eight GPUs at level standard with all cases, and the H100 and the T4 with the
real sizes.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from selftest.reading import Frame

from envbuild.facts import probe_catalogue_reader
from pretend import expected, launch
from pretend.runtime import OLD_AUTOCAST
from pretend.sizes import FEW, SHORT

pytestmark = pytest.mark.slow

Result = dict[str, Frame]
NAMES = list(probe_catalogue_reader.known_probes())
ASKED = ["burn", "memory", "fingerprint"]  # probes in addition to the level's; dist.nodes needs several machines
ATTENTION = ["attention.math", "attention.efficient"]


def run_on(folder: Path, gpu: str, level: str, chosen: "list[str] | None" = None, **variables: str) -> Result:
    given = launch.document(gpu, level, NAMES, chosen, require=[] if chosen else ASKED)
    return found_on(gpu, given, folder, **launch.variables(folder), **variables)


def found_on(gpu: str, given: Frame, folder: Path, **variables: str) -> Result:
    return launch.run(gpu, launch.CATALOGUE, given, folder / "frames", forked=True, **variables)


@pytest.fixture(scope="module")
def h100(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_on(tmp_path_factory.mktemp("h100"), "h100", "standard", **{SHORT: "1", FEW: "1"})


def test_every_probe_passes_on_an_h100(h100: Result) -> None:
    assert list(expected.alarms("h100", "standard", h100)) == []
    assert set(h100) == set(NAMES) - {"dist.nodes"}


def test_the_kernels_that_are_missing_are_named(h100: Result) -> None:
    """Missing are: flash and cuDNN kernels for float32, flash kernels with a mask, and cuDNN kernels for wide heads."""
    masks = (" masked", " window", " padding", " bias", "x63x160 on 2x191 keys causal")
    for backend, lacking in (("flash", (" fp32 ", *masks)), ("cudnn", (" fp32 ", "x160 on ", "x256 on "))):
        unsupported = h100[f"attention.{backend}"]["traits"]["unsupported"]
        assert unsupported and all(any(words in step for words in lacking) for step in unsupported)


def test_every_probe_passes_on_a_t4_with_the_real_sizes(tmp_path: Path) -> None:
    found = run_on(tmp_path, "t4", "quick", **{FEW: "1"})
    assert list(expected.alarms("t4", "quick", found)) == []
    assert expected.skipped("t4") == {"attention.flash", "attention.cudnn", "gemm.fp8", *expected.WITHOUT_APEX}


def test_gradients_and_an_old_torch_on_a_v100(tmp_path: Path) -> None:
    found = run_on(tmp_path, "v100", "standard", ATTENTION, **{SHORT: "1", OLD_AUTOCAST: "1"})
    assert list(expected.alarms("v100", "standard", found)) == []
    words = set(found["attention.math"]["traits"]["unsupported"].values())
    assert words == {"Current CUDA Device does not support bfloat16. Please switch dtype to float16."}


def test_tf32_passes_where_it_is_allowed(tmp_path: Path) -> None:
    chosen = ["tf32.mode", "gemm.accuracy"]
    given = launch.document("a100", "quick", NAMES, chosen, settings={"allow_tf32": True})
    found = found_on("a100", given, tmp_path)
    assert list(expected.alarms("a100", "quick", found)) == []
    assert found["tf32.mode"]["traits"]["mm"] == "TF32"


SCALE = 64  # each limit is divided by this, also those of attention: heads x length x length, heads x length x depth
AT_THE_LIMIT = [
    (
        {"m": 512, "k": (1 << 20) // SCALE, "n": 512, "dtype": "fp64", "layout": "tt", "bias": False},
        {"heads": 1, "length": (1 << 14) // 8, "depth": 64, "dtype": "fp32", "causal": True},
    ),
    (
        {"m": 1024, "k": (1 << 20) // SCALE, "n": 1024, "dtype": "fp32", "layout": "nt", "bias": False},
        {"heads": 1, "length": (1 << 14) // 8, "depth": 64, "dtype": "fp16", "causal": True},
    ),
]


@pytest.mark.parametrize("shapes", AT_THE_LIMIT, ids=["fp64-fp32", "fp32-fp16"])
def test_a_shape_at_the_limit_fits_into_a_t4(tmp_path: Path, shapes: tuple[dict[str, Any], ...]) -> None:
    """One shape is that of a matrix product, the other is that of attention."""
    chosen = ["gemm.crash", "attention.math"]
    given = launch.document("t4", "quick", NAMES, chosen, own={"shapes": list(shapes)})
    found = found_on("t4", given, tmp_path, **{SHORT: "1"})
    assert list(expected.alarms("t4", "quick", found)) == []
    for name in chosen:
        peak = SCALE * found[name]["traits"]["simulated"]["peak_bytes"]
        assert 4 * 10**9 < peak < expected.MOST["standard"], name
